/**
 * binary.test.ts: dist/rigel as the only file carried somewhere: no Bun, no checkout, an empty environment. Slow, as it
 * builds the binary.
 */

import { beforeAll, describe, expect, test } from "bun:test";
import {
  copyFileSync,
  existsSync,
  mkdirSync,
  readFileSync,
  readdirSync,
  rmSync,
  statSync,
  writeFileSync,
} from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { z } from "zod";
import { launchDetailSchema } from "../src/launches.ts";
import { Scratch, TINY_PROFILE, plainEnvironment, reportOf, root } from "./rigel.ts";
import { until } from "./serving.ts";

const BUILD_LIMIT_ms = 300_000;

const threadsSchema = z.object({
  clients: z.array(z.object({ threads: z.array(z.object({ name: z.string(), launches: z.number() })) })),
});

beforeAll(async () => {
  await using child = Bun.spawn([process.execPath, join(root, "src", "build.ts")], {
    env: plainEnvironment(),
    stdout: "inherit",
    stderr: "inherit",
  });
  expect(await child.exited).toBe(0);
}, BUILD_LIMIT_ms);

async function run(binary: string, cwd: string, env: Record<string, string>, ...args: string[]) {
  await using child = Bun.spawn([binary, ...args], { cwd, env, stdin: "ignore", stdout: "pipe", stderr: "pipe" });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { status, stdout, stderr };
}

/** A folder with the binary, a configuration beside it, and a cache folder. */
class Elsewhere extends Scratch {
  readonly binary = join(this.path, "rigel");
  readonly cache = join(this.path, "cache");
  readonly empty = join(this.path, "empty");
  readonly config: string;

  constructor() {
    super();
    copyFileSync(join(root, "dist", "rigel"), this.binary);
    mkdirSync(this.empty);
    this.file("tiny.csv", TINY_PROFILE);
    this.config = this.file("config.json", {
      device: "simulated",
      clients: [{ name: "serve", class: "high", replay: { profile: "tiny.csv", iterations: 5 } }],
    });
  }
}

/** As root of a namespace of its own, where a folder can be mounted that no one else sees. */
const NAMESPACE = ["unshare", ...(process.getuid?.() === 0 ? [] : ["--map-current-user", "--keep-caps"]), "--mount"];
const noMounts =
  Bun.which("unshare") === null ||
  !Bun.spawnSync([...NAMESPACE, "mount", "-t", "tmpfs", "-o", "noexec", "none", "/mnt"]).success;
if (noMounts) console.warn("binary.test.ts: nothing can be mounted here, so noexec folders are not tested");

/** A folder from which nothing can be executed or mapped for that, for commands that begin with `inside`. */
function noexecFolder(place: Elsewhere): { noexec: string; inside: string[] } {
  const noexec = join(place.path, "noexec");
  mkdirSync(noexec);
  const mount = `mount -t tmpfs -o noexec none ${noexec} && exec "$@"`;
  return { noexec, inside: [...NAMESPACE, "sh", "-c", mount, "sh"] };
}

/** Removes what `body` has added to a folder. */
async function leavingAsItWas(folder: string, body: () => Promise<void>): Promise<void> {
  const names = (): string[] => (existsSync(folder) ? readdirSync(folder) : []);
  const before = new Set(names());
  try {
    await body();
  } finally {
    for (const name of names()) if (!before.has(name)) rmSync(join(folder, name), { recursive: true, force: true });
  }
}

describe("the single binary", () => {
  test("launches from an empty folder with an empty environment, and unpacks once", async () => {
    using place = new Elsewhere();
    const environment = { XDG_CACHE_HOME: place.cache };
    const result = await run(place.binary, place.empty, environment, "launch", place.config, "--json");
    expect(reportOf(result).clients).toMatchObject([{ attached: true, exit_code: 0, iterations: 5 }]);
    const [digest, ...others] = readdirSync(join(place.cache, "rigel"));
    expect(others).toEqual([]);
    const library = join(place.cache, "rigel", digest ?? "", "librigel.so");
    expect(statSync(join(place.cache, "rigel")).mode & 0o777).toBe(0o700);
    const before = statSync(library).ino;
    await run(place.binary, place.empty, environment, "info");
    expect(statSync(library).ino).toBe(before);
    expect(readdirSync(place.empty)).toEqual([]);
    expect(result.status).toBe(0);
  });

  test("unpacks where the umask takes what its folders need", async () => {
    using place = new Elsewhere();
    const shell = ["-c", 'umask 177; exec "$@"', "sh", place.binary, "info"];
    const { status, stderr } = await run("/bin/sh", place.empty, { XDG_CACHE_HOME: place.cache }, ...shell);
    expect({ status, stderr }).toEqual({ status: 0, stderr: "" });
    const entries = readdirSync(place.cache, { recursive: true, withFileTypes: true });
    const modes = entries.map((entry) => [
      entry.isDirectory(),
      statSync(join(entry.parentPath, entry.name)).mode & 0o700,
    ]);
    expect(modes.filter(([isFolder]) => isFolder).every(([, mode]) => mode === 0o700)).toBe(true);
    expect(entries.length).toBeGreaterThan(2);
  });

  test("has the dashboards in it, and starts itself for doctor's launch and those of the server", async () => {
    using place = new Elsewhere();
    const environment = {
      XDG_CACHE_HOME: place.cache,
      XDG_RUNTIME_DIR: place.empty,
      XDG_STATE_HOME: join(place.path, "state"),
    };
    // Not within the second that they have on a busy machine, perhaps.
    await until(async () => {
      const doctor = await run(place.binary, place.empty, environment, "doctor", "--json", "--device", "simulated");
      return /"status": "ok",\n +"found": "two small programs attached/.test(doctor.stdout) || undefined;
    });
    const serving = [place.binary, "serve", "--port", "0", "--json", "--segment", place.cache];
    await using server = Bun.spawn(serving, { env: environment, stdin: "ignore", stdout: "pipe", stderr: "inherit" });
    const { value } = await server.stdout.getReader().read();
    const { url, token_file } = JSON.parse(new TextDecoder().decode(value));
    expect(await (await fetch(`${url}/`)).text()).toContain("/v1/events");
    const grafana = await run(place.binary, place.empty, environment, "serve", "--print-grafana");
    expect(await (await fetch(`${url}/grafana.json`)).json()).toEqual(JSON.parse(grafana.stdout));
    const authorization = `Bearer ${readFileSync(token_file, "utf8").trim()}`;
    const headers = { authorization, "content-type": "application/json" };
    const body = JSON.stringify({ ...JSON.parse(readFileSync(place.config, "utf8")), cwd: place.path });
    const started = await fetch(`${url}/v1/launch`, { method: "POST", headers, body });
    expect(started.status).toBe(201);
    const ended = await until(async () => {
      const launch = launchDetailSchema.parse(
        await (await fetch(`${url}${started.headers.get("location")}`, { headers })).json(),
      );
      return launch.state === "running" ? undefined : launch;
    });
    expect(ended).toMatchObject({ state: "ended", exit_status: 0, report: { clients: [{ iterations: 5 }] } });
  });

  const python = Bun.which("python3");
  if (python === null)
    console.warn("binary.test.ts: there is no python3, so `import rigel` from the binary is not tested");
  test.skipIf(python === null)(
    "brings the module that Python programs import, whose threads become clients",
    async () => {
      using place = new Elsewhere();
      const program = join(place.path, "threads.py");
      copyFileSync(join(root, "test", "fixtures", "threads.py"), program);
      const config = place.file("python.json", {
        device: "simulated",
        clients: [{ name: "program", class: "best-effort", command: [python, program, "count"] }],
      });
      const environment = { XDG_CACHE_HOME: place.cache };
      const result = await run(place.binary, place.empty, environment, "launch", config, "--json");
      expect(result.stderr).toContain('"active": true');
      const { clients } = threadsSchema.parse(JSON.parse(result.stdout));
      expect(clients[0]?.threads.toSorted((a, b) => a.name.localeCompare(b.name))).toEqual([
        { name: "fast", launches: 20 },
        { name: "slow", launches: 33 },
      ]);
      expect(result.status).toBe(0);
    },
  );

  test("knows the demo, and needs no environment at all", async () => {
    using place = new Elsewhere();
    // Without an environment the user's own cache folder is used; what this build adds to it goes again.
    await leavingAsItWas(join(homedir(), ".cache", "rigel"), async () => {
      const bare = await run(place.binary, place.empty, {}, "--version");
      expect(bare.stdout).toMatch(/^\d+\.\d+\.\d+\n$/);
      const { status, stdout, stderr } = await run(place.binary, place.empty, {}, "launch", "--dry-run");
      expect(stdout, stderr).toContain("client   resnet50-infer (high)");
      expect(status).toBe(0);
    });
  });

  test("has the program of rigel bench with it", async () => {
    using place = new Elsewhere();
    const environment = { XDG_CACHE_HOME: place.cache };
    const args = ["bench", "--device", "simulated", "--dry-run"];
    const { status, stdout, stderr } = await run(place.binary, place.empty, environment, ...args);
    expect(stdout, stderr).toContain("resnet50+resnet50-train, round 1, time slicing");
    const [digest] = readdirSync(join(place.cache, "rigel"));
    const unpacked = readFileSync(join(place.cache, "rigel", digest ?? "", "workload.py"));
    expect(unpacked).toEqual(readFileSync(join(root, "src", "python", "workload.py")));
    expect(status).toBe(0);
  });

  test("starts commands without any environment", async () => {
    using place = new Elsewhere();
    const client = { name: "a", class: "high", command: ["sh", "-c", "ls /"] };
    const path = place.file("command.json", { device: "simulated", clients: [client] });
    await leavingAsItWas(join(homedir(), ".cache", "rigel"), async () => {
      const { status, stderr } = await run(place.binary, place.empty, {}, "launch", path);
      expect(stderr).toContain("a | proc");
      expect(status).toBe(0);
    });
  });

  test("goes elsewhere when the path of a cache folder cannot be preloaded from", async () => {
    using place = new Elsewhere();
    const home = join(place.path, "a home");
    const temporary = join(place.path, "tmp");
    for (const folder of [home, temporary]) mkdirSync(folder);
    const result = await run(
      place.binary,
      place.empty,
      { HOME: home, TMPDIR: temporary },
      "launch",
      place.config,
      "--json",
    );
    expect(reportOf(result).clients).toMatchObject([{ attached: true }]);
    expect(readdirSync(home)).toEqual([]);
    expect(readdirSync(temporary)).toEqual([`rigel-${process.getuid?.()}`]);
    expect(result.status).toBe(0);
  });

  test("replaces an unpacked file that has been changed", async () => {
    using place = new Elsewhere();
    const environment = { XDG_CACHE_HOME: place.cache };
    await run(place.binary, place.empty, environment, "info");
    const [digest] = readdirSync(join(place.cache, "rigel"));
    const library = join(place.cache, "rigel", digest ?? "", "librigel.so");
    writeFileSync(library, "tampered with");
    const result = await run(place.binary, place.empty, environment, "launch", place.config, "--json");
    expect(reportOf(result).clients).toMatchObject([{ attached: true }]);
    expect(result.status).toBe(0);
  });

  test("goes elsewhere when a cache folder cannot be used, and does not read .env of the folder it is in", async () => {
    using place = new Elsewhere();
    writeFileSync(join(place.empty, ".env"), "RIGEL_LIB=/nonexistent/librigel.so\n");
    const temporary = join(place.path, "tmp");
    mkdirSync(temporary);
    // No folder can be made under a file, whoever asks.
    const environment = { XDG_CACHE_HOME: place.config, HOME: place.config, TMPDIR: temporary };
    const result = await run(place.binary, place.empty, environment, "launch", place.config, "--json");
    expect(reportOf(result).clients).toMatchObject([{ attached: true }]);
    expect(readdirSync(temporary)).toEqual([`rigel-${process.getuid?.()}`]);
    expect(result.status).toBe(0);
  });

  test.skipIf(noMounts)("runs with a noexec TMPDIR, and goes elsewhere from a noexec cache folder", async () => {
    using place = new Elsewhere();
    const { noexec, inside } = noexecFolder(place);
    const launched = async (environment: Record<string, string>) => {
      const [program = "", ...args] = [...inside, place.binary, "launch", place.config, "--json"];
      const result = await run(program, place.empty, { PATH: process.env["PATH"] ?? "", ...environment }, ...args);
      expect(reportOf(result).clients).toMatchObject([{ attached: true, exit_code: 0, iterations: 5 }]);
      expect(result.status).toBe(0);
    };
    await launched({ XDG_CACHE_HOME: place.cache, TMPDIR: noexec });
    expect(readdirSync(place.cache)).toEqual(["rigel"]);
    const temporary = join(place.path, "tmp");
    mkdirSync(temporary);
    await launched({ XDG_CACHE_HOME: noexec, HOME: noexec, TMPDIR: temporary });
    expect(readdirSync(temporary)).toEqual([`rigel-${process.getuid?.()}`]);
  });

  test.skipIf(noMounts)("says so where all folders are noexec", async () => {
    using place = new Elsewhere();
    const { noexec, inside } = noexecFolder(place);
    const environment = { PATH: process.env["PATH"] ?? "", HOME: noexec, TMPDIR: noexec };
    const [program = "", ...args] = [...inside, place.binary, "launch", place.config];
    const { status, stdout, stderr } = await run(program, place.empty, environment, ...args);
    expect(stderr).toContain("set XDG_CACHE_HOME to one that is writable and not mounted noexec");
    expect(stderr.match(/^rigel: {3}.*librigel\.so cannot be loaded: .*failed to map segment/gm)).toHaveLength(2);
    expect({ status, stdout }).toEqual({ status: 1, stdout: "" });
  });

  test("blames RIGEL_LIB alone where what that names is not there, or cannot be loaded", async () => {
    using place = new Elsewhere();
    for (const [library, said] of [
      ["/nonexistent/librigel.so", "no such file; name librigel.so or unset the variable"],
      [place.config, "cannot be loaded: "],
    ] as const) {
      const environment = { XDG_CACHE_HOME: place.cache, RIGEL_LIB: library };
      const { status, stderr } = await run(place.binary, place.empty, environment, "info");
      expect(stderr).toMatch(new RegExp(`^rigel: RIGEL_LIB=${RegExp.escape(library)}:? ${RegExp.escape(said)}.*\n$`));
      expect(status).toBe(1);
    }
  });

  test("names every folder it has tried when there is none", async () => {
    using place = new Elsewhere();
    // /proc takes no files, and what is mounted there is noexec besides.
    const environment = { XDG_CACHE_HOME: "/proc/self", HOME: "/proc/self", TMPDIR: "/proc/self" };
    const { status, stderr } = await run(place.binary, place.empty, environment, "info");
    expect(stderr).toContain("set XDG_CACHE_HOME to one that is writable and not mounted noexec");
    expect(stderr.match(/^rigel: {3}\/proc\/self\//gm)).toHaveLength(3);
    expect(existsSync("/proc/self/rigel")).toBe(false);
    expect(status).toBe(1);
  });
});
