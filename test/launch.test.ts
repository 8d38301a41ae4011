/** launch.test.ts: what a launch does with its clients on the simulated GPU: attaching, output, endings, the report. */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import {
  chmodSync,
  chownSync,
  closeSync,
  existsSync,
  fstatSync,
  mkdirSync,
  openSync,
  readFileSync,
  readdirSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { Segments } from "../src/discover.ts";
import { Native } from "../src/native.ts";
import { heldUp } from "../src/report.ts";
import { Segment, segmentBytes } from "../src/segment.ts";
import { commandLine } from "../src/self.ts";
import { type Result, Scratch, TINY_PROFILE, after, plainEnvironment, reportOf, rigel, root, start } from "./rigel.ts";
import { until as eventually } from "./serving.ts";

let scratch: Scratch;
/**
 * A program that initialises CUDA, makes the file named by its argument, and waits to be stopped; `-` does not wait. Its
 * libcuda.so.1 is one that can do nothing else: the simulated GPU takes no more processes than the segment does.
 */
let holder: string;
/** The same for a statically linked program, which no preloaded library reaches. */
let statically: string;

const HOLDER = `
#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv)
{
#ifndef NO_CUDA
    void *cuda = dlopen(LIBCUDA, RTLD_NOW);
    int (*init)(unsigned) = cuda ? (int (*)(unsigned))dlsym(cuda, "cuInit") : 0;
    if (!init || init(0) != 0)
        return 3;
#endif
    if (argc < 2 || strcmp(argv[1], "-") == 0)
        return 0;
    close(open(argv[1], O_CREAT | O_WRONLY, 0600));
    for (;;)
        pause();
}
`;

beforeAll(async () => {
  scratch = new Scratch();
  scratch.file("tiny.csv", TINY_PROFILE);
  const source = scratch.file("holder.c", HOLDER);
  holder = join(scratch.path, "holder");
  statically = join(scratch.path, "static");
  const cuda = join(scratch.path, "libcuda.so.1");
  const driver = scratch.file("cuda.c", "int cuInit(unsigned flags) { return (int)flags; }\n");
  for (const command of [
    ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", cuda, driver],
    ["cc", `-DLIBCUDA="${cuda}"`, "-o", holder, source, "-ldl"],
    ["cc", "-static", "-DNO_CUDA", "-o", statically, source],
  ])
    expect(await Bun.spawn(command, { stdout: "inherit", stderr: "inherit" }).exited).toBe(0);
});
afterAll(() => scratch[Symbol.dispose]());

const replay = { profile: "tiny.csv", iterations: 20 };
const serve = { name: "serve", class: "high", replay };
const train = { name: "train", class: "best-effort", replay };

let configs = 0;
function config(clients: object[], rest: object = {}): string {
  return scratch.file(`config-${configs++}.json`, { device: "simulated", clients, ...rest });
}

/** Files of a launch of this user that are still there. */
function leftovers(pid: number): string[] {
  const own = new RegExp(`^rigel-(sim-)?${process.getuid?.()}-${pid}(-|$)`);
  return readdirSync("/dev/shm").filter((name) => own.test(name));
}

test("a client that prints without end keeps neither the launch from its end nor Ctrl-C from being heard", async () => {
  const clients = [{ name: "a", class: "high", command: ["sh", "-c", "yes hello"] }];
  for (const duration_s of [0.3, 1000]) {
    const file = config(clients, { policy: { name: "none" }, duration_s });
    await using launch = start(["launch", file, "--segment", scratch.path, "--start-timeout", "0.1"]);
    const [said, heard] = launch.stderr.tee();
    const rest = heard.pipeTo(new WritableStream());
    let last = "";
    for await (const text of said.pipeThrough(new TextDecoderStream())) {
      if (duration_s > 1 && `${last}${text}`.includes("counting for")) launch.kill("SIGINT");
      last = text.slice(-20);
    }
    await rest;
    expect(await launch.exited).toBe(duration_s > 1 ? 130 : 0);
  }
});

test("a launch that cannot make one of its files leaves none of the others", async () => {
  using folder = new Scratch();
  const profiled = { command: ["true"], profile: "tiny.csv" };
  const clients = ["a", "b"].map((name) => ({ name, class: "high", ...profiled }));
  const file = config(clients, { policy: { name: "none" }, duration_s: 1 });
  const taken = `rigel-${process.getuid?.() ?? 0}-$$-0-counts-1`;
  const launch = [...commandLine(), "launch", file, "--segment", folder.path];
  await using child = Bun.spawn(["sh", "-c", `mkdir ${folder.path}/${taken} && exec "$@"`, "sh", ...launch], {
    cwd: root,
    env: plainEnvironment(),
    stdout: "ignore",
    stderr: "pipe",
  });
  expect(await child.stderr.text()).toContain("-counts-1 cannot be created");
  expect(await child.exited).toBe(1);
  expect(readdirSync(folder.path)).toEqual([`rigel-${process.getuid?.() ?? 0}-${child.pid}-0-counts-1`]);
});

describe("a launch on the simulated GPU", () => {
  test("says that a target in milliseconds was missed, and by what", async () => {
    const clients = [
      { ...serve, replay: { profile: "tiny.csv", rate_per_s: 100 } },
      { ...train, replay: { profile: "tiny.csv" } },
    ];
    /** Of a launch that is ended as soon as its loop knows what requests take at best; again where it has gone elsewhere meanwhile. */
    const known = async (p99_ms: number, ...options: string[]): Promise<string> =>
      await eventually(async () => {
        using folder = new Scratch();
        const file = config(clients, { policy: { name: "slo", target: { p99_ms } } });
        await using child = start(["launch", file, "--segment", folder.path, ...options]);
        const stdout = child.stdout.text();
        const segments = new Segments(await Native.load(), folder.path);
        await eventually(() => {
          const loop = segments.live()[0]?.loop;
          const isThere = loop?.rung === 0 || p99_ms > 1; // where what is missed is missed for good
          return (isThere && (loop?.now.requests ?? 0) >= 40) || undefined;
        });
        child.kill("SIGINT");
        const text = await stdout;
        return /too few requests to tell|"missed": ?null/.test(text) ? undefined : text;
      });
    const { slo } = JSON.parse(await known(0.05, "--json"));
    expect(slo).toMatchObject({ target: { p99_ms: 0.05 }, missed: true });
    const told = await known(0.05);
    // A machine that has been slow for ten seconds knows by then that no settings reach it.
    expect(told).toMatch(
      /^slo: target p99 0\.05 ms, (missed: p99 was [\d.]+ ms at the end|not reached even by the strictest)/m,
    );
    expect(told).toMatch(/^ +at the end: .* with suspend (true|false), defer_us \d+, defer_part [\d.]+, /m);
    expect(JSON.parse(await known(1e6, "--json")).slo).toMatchObject({ missed: false });
  });

  test("says of a target that it is not known to be met where no request came", async () => {
    const file = config([{ ...serve, command: ["true"], replay: undefined }], { policy: { name: "slo" } });
    const { stdout } = await rigel("launch", file, "--start-timeout", "0.1");
    expect(stdout).toContain("slo: target p99 1.05 of alone, too few requests to tell");
  });

  test("runs two replays to their end and reports both", async () => {
    const result = await rigel("launch", config([serve, train]), "--json");
    const report = reportOf(result);
    expect(report.device).toMatchObject({ simulated: true });
    expect(report.device.uuid).toMatch(/^GPU-/);
    expect(report.policy).toMatchObject({ name: "slo", inflight: 8 });
    expect(report.compare).toEqual([]);
    expect(String(report.duration_s)).toMatch(/^\d+(\.\d{1,3})?$/);
    expect(report.clients).toMatchObject([
      { name: "serve", class: "high", exit_code: 0, attached: true, attach_problem: null, requests: { count: 20 } },
      { name: "train", class: "best-effort", exit_code: 0, attached: true, iterations: 20 },
    ]);
    for (const client of report.clients) {
      expect(client.launches).toBeGreaterThanOrEqual(20);
      expect(client.requests.p50_ms).toBeGreaterThan(0.15);
      expect(client.requests.p99_ms).toBeGreaterThanOrEqual(client.requests.p50_ms ?? 0);
      expect(client.iterations_per_s).toBeGreaterThan(0);
    }
    expect(result.status).toBe(0);
  });

  test("uses it though LD_LIBRARY_PATH names another driver, for the launch or for a client", async () => {
    const env = { LD_LIBRARY_PATH: scratch.path }; // its libcuda.so.1 can launch nothing
    await using child = start(["launch", config([serve, { ...train, env }]), "--json"], { env });
    const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    const { device, clients } = reportOf({ stdout, stderr, status });
    expect(device.simulated).toBe(true);
    expect(clients).toMatchObject([
      { name: "serve", exit_code: 0, attached: true, requests: { count: 20 } },
      { name: "train", exit_code: 0, attached: true, iterations: 20 },
    ]);
    expect(status).toBe(0);
  });

  test("counts for --duration, ends what goes on, and shows a table", async () => {
    const endless = { profile: "tiny.csv" };
    const path = config([
      { ...serve, replay: { ...endless, rate_per_s: 100 } },
      { ...train, replay: endless },
    ]);
    const result = await rigel("launch", path, "--duration", "0.5", "--policy", "none");
    const seconds = /\(simulated\) \| policy: none \| time slices \| (\d+\.\d) s/.exec(result.stdout)?.[1];
    expect(Number(seconds)).toBeGreaterThanOrEqual(0.5);
    expect(result.stdout).toMatch(/^serve +high +stopped +yes +\d+/m);
    expect(result.stdout).toMatch(/^train +best-effort +stopped +yes +\d+/m);
    expect(result.status).toBe(0);
  });

  test("compares each client alone, together ungoverned, and governed", async () => {
    const result = await rigel("launch", config([serve, train]), "--compare", "--json");
    const report = reportOf(result);
    expect(report.compare.map(({ mode, clients }) => [mode, clients.map(({ name }) => name)])).toEqual([
      ["alone", ["serve", "train"]],
      ["ungoverned", ["serve", "train"]],
      ["governed", ["serve", "train"]],
    ]);
    for (const { mode, clients } of report.compare)
      for (const { versus_alone: versus } of clients) {
        if (mode === "alone") expect(versus).toBeUndefined();
        else expect(versus).toEqual({ p50: expect.any(Number), p99: expect.any(Number), share: expect.any(Number) });
      }
    expect(report.clients).toEqual(report.compare[2]?.clients ?? []);
    expect(result.status).toBe(0);
  });

  test("prints a comparison with the ratios to each client alone", async () => {
    const { status, stdout } = await rigel("launch", config([serve, train]), "--compare");
    const cells = stdout
      .split("\n")
      .slice(stdout.split("\n").findIndex((line) => line.startsWith("compared")))
      .slice(0, 4)
      .map((line) => line.replaceAll(/\d+(\.\d+)?/g, "N").split(/ {2,}/));
    const ratios = ["N", "N (xN)", "N (xN)"];
    expect(cells).toEqual([
      ["compared", "alone", "ungoverned", "governed"],
      ["serve", "pN ms", ...ratios],
      ["serve", "pN ms", ...ratios],
      ["train", "iter/s", ...ratios],
    ]);
    expect(status).toBe(0);
  });

  test("streams output line by line with the name in front, on standard error", async () => {
    // The high client's end is the launch's: it waits for what the other says.
    const greeted = join(scratch.path, "greeted");
    const script = `echo out; echo err >&2; printf " 10%%\\r100%%\\n"; ${untilThere(greeted)}; printf "no line end"`;
    const path = config([
      shell("a", "high", script),
      { ...shell("longer", "best-effort", `echo $GREETING; touch ${greeted}`), env: { GREETING: "hi" } },
    ]);
    const { stdout, stderr } = await rigel("launch", path, "--json");
    expect(
      stderr
        .split("\n")
        .filter((line) => line.includes(" | "))
        .toSorted(),
    ).toEqual(["a      | 100%", "a      | err", "a      | no line end", "a      | out", "longer | hi"]);
    expect(stdout).toStartWith("{");
  });

  test("tells MPS the classes of the clients, unless nothing is governed or the user has said so", async () => {
    const say = 'echo "priority=${CUDA_MPS_CLIENT_PRIORITY-none}"';
    const said = async (...flags: string[]): Promise<string[]> => {
      using folder = new Scratch();
      const there = (name: string): string => join(folder.path, name);
      const other = (name: string): object => shell(name, "best-effort", `${say}; touch ${there(name)}`);
      // Its end is the launch's.
      const high = shell("high", "high", `${say}; ${untilThere(there("best"), there("own"))}`);
      const path = config([high, other("best"), { ...other("own"), env: { CUDA_MPS_CLIENT_PRIORITY: "0" } }]);
      const { stderr } = await rigel("launch", path, ...flags);
      return [...stderr.matchAll(/^(\w+) +\| (priority=.*)$/gm)]
        .map(([, name, value]) => `${name} ${value}`)
        .toSorted();
    };
    expect(await said()).toEqual(["best priority=1", "high priority=0", "own priority=0"]);
    expect(await said("--policy", "none")).toEqual(["best priority=none", "high priority=none", "own priority=0"]);
  });

  test("a folder for a client is relative to the configuration", async () => {
    const client = { name: "a", class: "high", command: ["pwd"], cwd: "." };
    expect((await rigel("launch", config([client]))).stderr).toContain(`a | ${scratch.path}\n`);
  });

  test("passes the report alone to standard output under `bun run` too", async () => {
    await using child = Bun.spawn([process.execPath, "run", "launch", config([serve]), "--json"], {
      cwd: root,
      env: plainEnvironment(),
      stdin: "ignore",
      stdout: "pipe",
      stderr: "pipe",
    });
    const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    reportOf({ stdout, stderr, status });
    expect(status).toBe(0);
  });
});

function shell(name: string, kind: string, script: string): object {
  return { name, class: kind, command: ["sh", "-c", script] };
}

/** What a shell runs to wait for files. */
function untilThere(...files: string[]): string {
  return `until ${files.map((file) => `[ -e ${file} ]`).join(" && ")}; do sleep 0.02; done`;
}

describe("exit codes", () => {
  test("a client that crashes at once is named with its signal, and its status is the launch's", async () => {
    const result = await rigel("launch", config([shell("a", "high", "kill -SEGV $$"), train]), "--json");
    const report = reportOf(result);
    expect(report.clients[0]).toMatchObject({ exit_code: 139, attached: false, stopped: false });
    expect(report.clients[0]?.attach_problem).toMatch(
      /^it was killed by SIGSEGV after \d+\.\d s without having initialised CUDA/,
    );
    expect(report.notes.join()).toContain("a was killed by SIGSEGV in phase");
    expect(result.status).toBe(139);
  });

  test("the first client that failed decides", async () => {
    // `late` goes on when the launcher has collected `early`, so the order is certain.
    const result = await rigel(
      "launch",
      config([
        shell(
          "late",
          "high",
          `until [ -s ${scratch.path}/pid ]; do sleep 0.02; done; p=$(cat ${scratch.path}/pid); while kill -0 $p 2>&-; do sleep 0.02; done; exit 3`,
        ),
        shell("early", "best-effort", `echo $$ > ${scratch.path}/pid; exit 4`),
      ]),
    );
    expect(result.status).toBe(4);
  });

  test("a client that Rigel ends does not fail", async () => {
    const result = await rigel(
      "launch",
      config([shell("done", "high", "exit 0"), shell("going", "best-effort", "sleep 1000")]),
      "--json",
    );
    expect(reportOf(result).clients).toMatchObject([
      { exit_code: 0, stopped: false },
      { exit_code: 143, stopped: true },
    ]);
    expect(result.status).toBe(0);
  });

  test("is told of at once, while the others go on", async () => {
    const pidFile = join(scratch.path, "short-lived");
    const path = config([
      shell("a", "high", "sleep 1000"),
      shell("b", "best-effort", `echo $$ > ${pidFile}; echo ready; sleep 1000`),
      shell("c", "best-effort", "exit 3"),
    ]);
    await using child = start(["launch", path]);
    const stderr = follow(child.stderr);
    await stderr.until("c: ended with status 3");
    await stderr.until("ready");
    process.kill(Number(await Bun.file(pidFile).text()), "SIGKILL");
    await stderr.until("b: was killed by SIGKILL");
    child.kill("SIGTERM");
    // Who is told to end does not do so by itself.
    expect((await stderr.all).match(/^rigel: .: (ended|was killed).*/gm)).toHaveLength(2);
  });

  test("a failure ends a comparison", async () => {
    const result = await rigel("launch", config([shell("a", "high", "exit 5"), train]), "--compare", "--json");
    const report = reportOf(result);
    expect(report.compare.map(({ mode, clients }) => [mode, clients.length])).toEqual([["alone", 1]]);
    expect(report.notes).toContain("the launch ended before its last phase; what is missing was not run");
    expect(result.status).toBe(5);
  });
});

/**
 * A launch whose client makes a file as soon as it is there, and never any work; with ever more time for that, until the client was there in it,
 * for which a busy machine may need longer than one that is not.
 */
async function idle(command: (up: string) => string[]): Promise<Result & { limit_s: number }> {
  const up = join(scratch.path, "idle-is-up");
  const path = config([{ name: "a", class: "high", command: command(up) }], { duration_s: 0.1 });
  for (let limit_s = 2; ; limit_s *= 2) {
    rmSync(up, { force: true });
    const begun_ms = Date.now();
    const result = await rigel("launch", path, "--json", "--start-timeout", String(limit_s));
    // The launch begins to wait later than this; times of files lag by a few milliseconds.
    if (existsSync(up) && statSync(up).mtimeMs + 50 < begun_ms + limit_s * 1000) return { ...result, limit_s };
  }
}

describe("a client that does not attach is told why:", () => {
  test("it never touched CUDA", async () => {
    const result = await rigel("launch", config([{ name: "a", class: "high", command: ["true"] }]), "--json");
    expect(reportOf(result).clients[0]?.attach_problem).toMatch(
      /^it ended with status 0 after \d+\.\d s without having initialised CUDA/,
    );
    expect(result.status).toBe(0);
  });

  test("it runs and has not touched CUDA yet", async () => {
    const { limit_s, ...result } = await idle((up) => ["sh", "-c", `: > ${up}; while :; do sleep 1; done`]);
    expect(result.stderr).toContain(
      `a: no work in ${limit_s} s (librigel.so is loaded in it, but it has not initialised CUDA`,
    );
    expect(reportOf(result).clients[0]).toMatchObject({ attached: false, stopped: true });
    expect(result.status).toBe(0);
  });

  test("it is late, and whoever watches is told while it still runs", async () => {
    const [up, go] = [join(scratch.path, "late-is-up"), join(scratch.path, "late")];
    const path = config([shell("a", "high", `: > ${up}; until [ -s ${go} ]; do sleep 0.05; done`)]);
    // Whoever watches is told after 5 s, of a client that was there by then; on a busy machine it may not be, and then it is tried again.
    for (let wasThere = false; !wasThere;) {
      for (const file of [up, go]) rmSync(file, { force: true });
      const begun_ms = Date.now();
      await using child = start(["launch", path]);
      const stderr = follow(child.stderr);
      await stderr.until("a: has not attached yet: ");
      wasThere = existsSync(up) && statSync(up).mtimeMs + 50 < begun_ms + 5000;
      writeFileSync(go, "go");
      const said = await stderr.all;
      if (wasThere)
        expect(said).toContain("a: has not attached yet: librigel.so is loaded in it, but it has not initialised CUDA");
      expect(await child.exited).toBe(0);
    }
  });

  test("the library is not loaded, as in a static program", async () => {
    const result = await idle((up) => [statically, up]);
    expect(reportOf(result).clients[0]?.attach_problem).toStartWith(
      "librigel.so is not loaded in it: it is statically linked or setuid",
    );
    expect(result.status).toBe(0);
  });

  // The library takes all but nothing and 0 for yes.
  test.each(["1", "true"])("it was switched off with %s", async (value) => {
    const path = config([{ ...serve, env: { RIGEL_DISABLE: value } }]);
    const result = await rigel("launch", path, "--json");
    expect(reportOf(result).clients[0]).toMatchObject({
      attached: false,
      exit_code: 0,
      attach_problem: `RIGEL_DISABLE=${value} is set in its environment`,
    });
    expect(result.status).toBe(0);
  });

  test("its segment is refused, and it runs bare", async () => {
    const native = await Native.load();
    using folder = new Scratch();
    const made = (name: string): string => Segment.create(native, join(folder.path, name)).path;
    const refused: Record<string, [path: string, because: string]> = {
      missing: [join(folder.path, "missing"), "cannot open segment PATH: No such file or directory"],
      short: [made("short"), "segment PATH has 4096 bytes, this library expects"],
      "other-version": [made("other-version"), "segment PATH is not a version"],
      open: [made("open"), "segment PATH is open to other users (mode 0644, expected 0600)"],
      ...(process.getuid?.() === 0 && {
        "other-user": [made("other-user"), "segment PATH belongs to user 12345, this process runs as 0"],
      }),
    };
    truncateSync(join(folder.path, "short"), 4096);
    Bun.mmap(join(folder.path, "other-version"), { shared: true }).fill(0, 0, 16);
    chmodSync(join(folder.path, "open"), 0o644);
    if (refused["other-user"]) chownSync(refused["other-user"][0], 12345, 0);
    const works = `exec ${native.files.replay} --profile ${scratch.path}/tiny.csv --iterations 3`;
    const clients = Object.entries(refused).map(([name, [path]]) =>
      shell(name, "best-effort", `RIGEL_SEGMENT=${path} ${works}`),
    );
    const result = await rigel("launch", config(clients), "--json");
    for (const { name, attached, attach_problem, exit_code } of reportOf(result).clients) {
      const [path = "", because = ""] = refused[name] ?? [];
      const said = because.replace("PATH", path);
      expect(attach_problem).toStartWith(said);
      expect(attach_problem).toContain("; running without Rigel (start it with `rigel launch` or `rigel run`");
      expect(result.stderr).toContain(`| rigel: ${said}`);
      expect(result.stderr).toMatch(new RegExp(`^${name} +\\| {.*"iterations":3,`, "m"));
      expect({ attached, exit_code }).toEqual({ attached: false, exit_code: 0 });
    }
    expect(result.status).toBe(0);
  });

  test("the segment is full, and it runs bare", async () => {
    const up = join(scratch.path, "up");
    const crowd = `mkdir ${up}; for i in $(seq 64); do ${holder} ${up}/$i & done; wait`;
    const other = join(scratch.path, "other-is-up");
    const late = `until [ -d ${up} ] && [ $(ls ${up} | wc -l) -eq 64 ] && [ -e ${other} ]; do sleep 0.05; done; sleep 1; exec ${holder} -`;
    const result = await rigel(
      "launch",
      config([
        { name: "late", class: "high", command: ["sh", "-c", late] },
        { name: "crowd", class: "best-effort", command: ["sh", "-c", crowd] },
        { name: "other", class: "best-effort", command: [statically, other] },
      ]),
      "--json",
    );
    expect(reportOf(result).clients).toMatchObject([
      {
        name: "late",
        exit_code: 0,
        attached: false,
        attach_problem: "the segment is full: it has room for 64 processes; start fewer at a time",
      },
      { name: "crowd", attached: true },
      { name: "other", attach_problem: expect.stringMatching(/^librigel.so is not loaded in it/) },
    ]);
    expect(result.stderr).toMatch(/^late +\| rigel: all 64 client slots of .* are taken; running without Rigel/m);
    expect(result.status).toBe(0);
  });
});

describe("the segment's folder", () => {
  test.each(["/proc/self", "/nonexistent/folder"])(
    "%s cannot hold one: the error names it and the remedy",
    async (folder) => {
      const { status, stdout, stderr } = await rigel("launch", config([serve]), "--segment", folder);
      expect(stderr).toStartWith(`rigel: no segment file can be created in ${folder} (`);
      expect(stderr).toContain("choose a folder that exists and can be written to with --segment DIR");
      expect({ status, stdout }).toEqual({ status: 1, stdout: "" });
    },
  );

  test("can be chosen and is left empty", async () => {
    using folder = new Scratch();
    const result = await rigel("launch", config([serve]), "--segment", folder.path, "--json");
    expect(reportOf(result).clients[0]).toMatchObject({ attached: true });
    expect(readdirSync(folder.path)).toEqual([]);
    expect(result.status).toBe(0);
  });
});

/** Whether a mount can be made that nobody else sees. */
const canMount = Bun.spawnSync(["sh", "-c", "unshare -m mount -t tmpfs tmpfs /mnt"], { stderr: "ignore" }).success;

/** Runs `rigel` where /dev/shm has 8 MiB. */
async function inLittle(...args: string[]) {
  const script = 'mount -t tmpfs -o size=8m none /dev/shm && exec "$@"';
  await using child = Bun.spawn(["unshare", "-m", "sh", "-c", script, "sh", ...commandLine(), ...args], {
    env: plainEnvironment(),
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { stdout, stderr, status };
}

test.skipIf(!canMount)("where /dev/shm has no room a remedy is named that works (needs root)", async () => {
  using folder = new Scratch();
  const refused = await inLittle("launch", config([serve]));
  expect(refused.stderr).toContain("no room for it; free some, or name another folder with --segment DIR");
  expect(refused).toMatchObject({ status: 1, stdout: "" });
  const elsewhere = await inLittle("launch", config([serve]), "--segment", folder.path, "--json");
  expect(reportOf(elsewhere).clients[0]).toMatchObject({ attached: true });
  expect(readdirSync(folder.path)).toEqual([]);
  const info = await inLittle("info");
  expect(info.stdout, info.stderr).toContain("simulated NVIDIA H200");
  const finding = /segments .* a launch on the simulated GPU takes \d/;
  expect((await inLittle("doctor", "--no-launch", "--device", "simulated")).stdout).toMatch(finding);
});

/** Reads a stream up to a text and goes on reading it; the rest comes with `all`. */
function follow(stream: ReadableStream<Uint8Array<ArrayBuffer>>) {
  let text = "";
  let waiting: { needle: string; resolve: () => void } | undefined;
  const all = (async () => {
    const decoder = new TextDecoder();
    for await (const chunk of stream) {
      text += decoder.decode(chunk, { stream: true });
      if (waiting && text.includes(waiting.needle)) waiting.resolve();
    }
    return text;
  })();
  const until = async (needle: string): Promise<void> => {
    const { promise, resolve } = Promise.withResolvers<void>();
    waiting = { needle, resolve };
    if (text.includes(needle)) return;
    await promise;
  };
  return { all, until };
}

describe("signals", () => {
  const endless = { profile: "tiny.csv" };

  test.each([
    ["SIGINT", 130],
    ["SIGTERM", 143],
    ["SIGHUP", 129],
  ] as const)("%s stops the clients, prints the report and leaves nothing behind", async (signal, status) => {
    const path = config([
      { ...serve, replay: { ...endless, rate_per_s: 50 } },
      { ...train, replay: endless },
    ]);
    await using child = start(["launch", path, "--json"]);
    const stderr = follow(child.stderr);
    await stderr.until("counting until the clients end");
    child.kill(signal);
    const stdout = await child.stdout.text();
    const report = reportOf({ stdout, stderr: await stderr.all, status: await child.exited });
    expect(report.clients).toMatchObject([
      { attached: true, stopped: true },
      { attached: true, stopped: true },
    ]);
    expect(leftovers(child.pid)).toEqual([]);
    expect(await child.exited).toBe(status);
  });

  test("what ignores Ctrl-C may end its work at SIGTERM before it is killed", async () => {
    // As programs do that a shell starts in the background.
    const work = `trap '' INT; trap 'echo told; exit 7' TERM; echo ready; while :; do sleep 0.1; done`;
    const path = config([{ name: "a", class: "high", command: ["sh", "-c", work] }]);
    // It has a second: where that was not enough, as on a busy machine, it is tried again.
    let said = "";
    let report;
    for (let tries = 0; tries < 5 && !said.includes("a | told"); tries++) {
      await using child = start(["launch", path, "--json"]);
      const stderr = follow(child.stderr);
      await stderr.until("ready");
      child.kill("SIGINT");
      const stdout = await child.stdout.text();
      said = await stderr.all;
      report = reportOf({ stdout, stderr: said, status: await child.exited });
      expect(await child.exited).toBe(130);
    }
    expect(said).toContain("a | told");
    expect(report?.clients).toMatchObject([{ exit_code: 7, stopped: true }]);
  });

  test("a second one kills clients that do not listen, with everything they started", async () => {
    const pidFile = join(scratch.path, "stubborn");
    const script = `trap '' INT TERM; sleep 1000 & echo $! > ${pidFile}; echo ready; wait`;
    const path = config([{ name: "a", class: "high", command: ["sh", "-c", script] }]);
    // It kills them by itself after 5 s: where the second one came no sooner, as on a busy machine, it is tried again.
    for (let inTime = false; !inTime;) {
      await using child = start(["launch", path]);
      const stderr = follow(child.stderr);
      await stderr.until("ready");
      const asked_ms = performance.now();
      child.kill("SIGINT");
      await stderr.until("once more kills them");
      await Bun.sleep(300);
      child.kill("SIGINT");
      inTime = performance.now() - asked_ms < 4500;
      const said = await stderr.all;
      if (inTime) expect(said).toContain("killing the clients");
      const grandchild = Number(await Bun.file(pidFile).text());
      await gone(grandchild);
      expect(leftovers(child.pid)).toEqual([]);
      expect(await child.exited).toBe(130);
    }
  });
});

test("of several phases each gives the room of its shared memory back as it ends", async () => {
  const go = join(scratch.path, "next-phase");
  const first = shell("a", "high", `until [ -e ${go} ]; do sleep 0.05; done`);
  const path = config([{ ...first, profile: join(scratch.path, "tiny.csv") }, train], {
    compare: true,
    duration_s: 0.2,
  });
  await using child = start(["launch", path, "--json"]);
  const said = Promise.all([child.stdout.text(), child.stderr.text()]);
  const fileOf = (phase: number): string => `/dev/shm/rigel-${process.getuid?.() ?? 0}-${child.pid}-${phase}`;
  const names = [fileOf(0), `${fileOf(0)}-counts-0`];
  await eventually(() => names.every((name) => existsSync(name)) || undefined);
  const files = names.map((name) => openSync(name, "r"));
  try {
    writeFileSync(go, "");
    const [stdout, stderr] = await said;
    expect(reportOf({ stdout, stderr, status: await child.exited }).compare).toHaveLength(3);
    // A launcher that has ended has nothing mapped, but what is open has its room still.
    for (const file of files) expect(fstatSync(file).blocks).toBeLessThan(100);
  } finally {
    for (const file of files) closeSync(file);
  }
});

test("clients do not outlive a launcher that is killed, and its files go", async () => {
  const pidFile = join(scratch.path, "orphan");
  const path = config([
    { name: "a", class: "high", command: ["sh", "-c", `echo $$ > ${pidFile}; echo ready; exec sleep 1000`] },
  ]);
  await using child = start(["launch", path]);
  await follow(child.stderr).until("ready");
  child.kill("SIGKILL");
  await gone(Number(await Bun.file(pidFile).text()));
  while (leftovers(child.pid).length > 0) await new Promise(setImmediate);
});

/** Settles once a process has ended; it may stay a zombie where nobody collects it. The test's time limit bounds this. */
async function gone(pid: number): Promise<void> {
  const stat = Bun.file(`/proc/${pid}/stat`);
  while ((await stat.exists()) && !/\) [ZX]/.test(await stat.text().catch(() => ") X")))
    await new Promise(setImmediate);
}

describe("what a client leaves in the background", () => {
  test.each([
    ["in its group", "sleep 1000"],
    ["in a session of its own", "setsid sleep 1000"],
  ])("%s is ended, with a note", async (_, command) => {
    const pidFile = join(scratch.path, `background-${command.length}`);
    const script = `sh -c 'echo $$ > ${pidFile}; exec ${command}' & until [ -s ${pidFile} ]; do :; done; echo hi`;
    const { status, stdout, stderr } = await rigel("launch", config([shell("a", "high", script)]), "--json");
    expect(stderr).toContain("a | hi");
    // setsid keeps the number: the shell that becomes it leads no group.
    const pid = Number(await Bun.file(pidFile).text());
    await gone(pid);
    expect(reportOf({ status, stdout, stderr }).notes.join("\n")).toMatch(
      new RegExp(`^a: its command ended but not what it had started \\(\\w+ ${pid}\\)`, "m"),
    );
    expect(status).toBe(0);
  });

  test("may end its work when it is told to", async () => {
    const file = join(scratch.path, "told");
    const work = `trap "echo told > ${file}; exit 0" TERM; echo ready; while :; do sleep 0.1; done`;
    const script = `(${work}) & until [ -s ${file}.go ]; do sleep 0.05; done`;
    const path = config([shell("a", "high", script)], { duration_s: 1000 });
    await using child = start(["launch", path, "--json"]);
    const stderr = follow(child.stderr);
    await stderr.until("ready");
    writeFileSync(`${file}.go`, "go");
    const stdout = await child.stdout.text();
    const { notes } = reportOf({ stdout, stderr: await stderr.all, status: await child.exited });
    expect(await Bun.file(file).text()).toBe("told\n");
    expect(notes.join("\n")).toMatch(/counting took \d+\.\d s of 1000 s/);
  });

  test("cannot hold the launch up, even without a trace of where it comes from", async () => {
    const pidFile = join(scratch.path, "hidden");
    const script = `env -i setsid sh -c 'echo $$ > ${pidFile}; exec sleep 1000' & until [ -s ${pidFile} ]; do :; done`;
    try {
      expect((await rigel("launch", config([shell("a", "high", script)]))).status).toBe(0);
    } finally {
      process.kill(Number(await Bun.file(pidFile).text()), "SIGKILL");
    }
  });

  test("is ended by the guard too", async () => {
    const pidFile = join(scratch.path, "guarded");
    const script = `setsid sh -c 'echo $$ > ${pidFile}; echo ready; exec sleep 1000' & wait`;
    await using child = start(["launch", config([shell("a", "high", script)])]);
    await follow(child.stderr).until("ready");
    child.kill("SIGKILL");
    await gone(Number(await Bun.file(pidFile).text()));
    while (leftovers(child.pid).length > 0) await new Promise(setImmediate);
  });
});

/**
 * In process numbers of its own, which nobody else is given: a launch, and once its client has ended a program in a group of its own that has
 * the client's number. Then the launcher gets a signal; said is whether that program lives when nothing else is left.
 */
const NUMBERED = `
"$@" > "$out" 2> "$err" & launcher=$!
until grep -q "b: ended with status 0" "$err"; do sleep 0.05; done
number=$(cat "$pid_file")
other=
until [ "$other" = "$number" ]; do
    [ -z "$other" ] || kill -KILL "$other"
    echo $((number - 1)) > /proc/sys/kernel/ns_last_pid
    setsid sleep 1000 > /dev/null 2>&1 & other=$!
done
until [ "$(cut -d " " -f 5 /proc/$other/stat)" = "$other" ]; do sleep 0.05; done
kill -s "$signal" "$launcher"
wait "$launcher"
status=$?
left=yes
while [ -n "$left" ]; do
    sleep 0.05
    left=
    for process in /proc/[0-9]*; do
        case $process in /proc/1 | /proc/$other) ;; *) left=yes ;; esac
    done
done
echo "$status $(cut -d " " -f 3 /proc/$other/stat)"
`;
const ALONE = ["unshare", "--pid", "--fork", "--mount-proc"];
const NEXT = "echo 100 > /proc/sys/kernel/ns_last_pid";
const canNumber = Bun.spawnSync([...ALONE, "sh", "-c", NEXT], { stderr: "ignore" }).success;
if (!canNumber) console.warn("launch.test.ts: only root can have process numbers of its own (unshare --pid)");

test.skipIf(!canNumber).each([
  ["TERM", 143],
  ["KILL", 137],
] as const)(
  "whoever has the number of a client that has ended is not taken for it: a launcher that gets SIG%s",
  async (signal, status) => {
    const file = (name: string): string => join(scratch.path, `number-${signal}-${name}`);
    const path = config([shell("a", "high", "sleep 1000"), shell("b", "best-effort", `echo $$ > ${file("pid")}`)]);
    const env = { ...plainEnvironment(), out: file("out"), err: file("err"), pid_file: file("pid"), signal };
    await using child = Bun.spawn([...ALONE, "sh", "-c", NUMBERED, "sh", ...commandLine(), "launch", path, "--json"], {
      env,
      stdout: "pipe",
      stderr: "pipe",
    });
    const [said, problems] = await Promise.all([child.stdout.text(), child.stderr.text()]);
    expect(said, problems).toBe(`${status} S\n`);
    if (signal === "TERM")
      expect(
        reportOf({ stdout: readFileSync(file("out"), "utf8"), stderr: readFileSync(file("err"), "utf8"), status })
          .notes,
      ).toEqual([]);
  },
);

/** Starts a launch from within another command. */
function startFrom(outer: string[], path: string) {
  return Bun.spawn([...outer, ...commandLine(), "launch", path, "--json"], {
    env: plainEnvironment(),
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
}

/** A launcher that may not signal everybody, as one that is not root: its clients can become somebody else. */
if (process.getuid?.() !== 0) console.warn("launch.test.ts: only root can start a client that it then cannot signal");
test.skipIf(process.getuid?.() !== 0)("a client that cannot be signalled is named and holds nothing up", async () => {
  const pidFile = join(scratch.path, "other-user");
  const script = `echo $$ > ${pidFile}; exec setpriv --reuid 65534 sh -c 'echo ready; exec sleep 1000'`;
  const path = config([shell("a", "high", script)]);
  await using child = startFrom(["setpriv", "--bounding-set", "-kill", "--inh-caps", "-kill"], path);
  const stderr = follow(child.stderr);
  await stderr.until("ready");
  child.kill("SIGTERM");
  try {
    const stdout = await child.stdout.text();
    const said = await stderr.all;
    expect(said).toContain("a: SIGTERM could not be sent to process");
    const report = reportOf({ stdout, stderr: said, status: await child.exited });
    expect(report.clients).toMatchObject([{ exit_code: null, stopped: true }]);
    expect(leftovers(child.pid)).toEqual([]);
    expect(await child.exited).toBe(143);
  } finally {
    process.kill(Number(await Bun.file(pidFile).text()), "SIGKILL");
  }
});

describe("where a launch comes from does not matter:", () => {
  test("a folder for the segment is relative to the launcher, not to its clients", async () => {
    using folder = new Scratch();
    const path = config([serve, { ...shell("b", "high", "exit 0"), cwd: "/" }]);
    await using child = start(["launch", path, "--json", "--segment", "."], { cwd: folder.path });
    const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text()]);
    expect(stderr).not.toContain("cannot open segment");
    const holding = config([{ name: "a", class: "high", command: [holder, "-"], cwd: "/" }]);
    await using second = start(["launch", holding, "--json", "--segment", "."], { cwd: folder.path });
    const result = { stdout: await second.stdout.text(), stderr: await second.stderr.text(), status: 0 };
    expect(reportOf(result).clients).toMatchObject([{ attached: true }]);
    reportOf({ stdout, stderr, status: await child.exited });
    expect(await second.exited).toBe(0);
  });

  test("nohup: a signal that was ignored stays so", async () => {
    const go = join(scratch.path, "nohup");
    const path = config([shell("a", "high", `echo ready; until [ -s ${go} ]; do sleep 0.05; done`)]);
    await using child = startFrom(["sh", "-c", 'trap "" HUP; exec "$@"', "sh"], path);
    const stderr = follow(child.stderr);
    await stderr.until("ready");
    child.kill("SIGHUP");
    writeFileSync(go, "go");
    const stdout = await child.stdout.text();
    const report = reportOf({ stdout, stderr: await stderr.all, status: await child.exited });
    expect(report.clients).toMatchObject([{ exit_code: 0, stopped: false }]);
    expect(await child.exited).toBe(0);
  });

  test("a umask that takes everything: its files can be used by its clients, and by who comes later", async () => {
    const { files } = await Native.load();
    const home = join(scratch.path, "no-umask", "home");
    const script = `"${files.replay}" --profile tiny.csv --iterations 20; stat -c "state %a" "$RIGEL_SIM_STATE"`;
    const path = scratch.file("umask.json", {
      device: "simulated",
      policy: { preempt: false },
      clients: [{ name: "train", class: "best-effort", command: ["sh", "-c", script] }],
    });
    // Bun's own cache would be there first.
    const first = `umask 777; export XDG_CACHE_HOME=${home} BUN_RUNTIME_TRANSPILER_CACHE_PATH=0; mkdir -m 700 no-umask`;
    const { status, stderr } = await after(first, scratch.path, ["launch", path]);
    expect(stderr).toContain("train | state 600\n");
    const kept = ["", "rigel", "rigel/durations"].map((folder) => statSync(join(home, folder)).mode & 0o777);
    const [learned = ""] = readdirSync(join(home, "rigel/durations"));
    expect([...kept, statSync(join(home, "rigel/durations", learned)).mode & 0o777, status]).toEqual([
      0o700, 0o700, 0o700, 0o600, 0,
    ]);
  });

  test("an environment without PATH", async () => {
    await using child = start(["launch", config([shell("a", "high", "ls /")])], { env: { PATH: undefined } });
    expect(await child.stderr.text()).toContain("a | proc");
    expect(await child.exited).toBe(0);
  });

  test("but for a folder that has been removed, which is said", async () => {
    using own = new Scratch();
    const removed = join(own.path, "removed");
    const from = (...args: string[]): Promise<Result> => {
      mkdirSync(removed);
      return after('rmdir "$PWD"', removed, args);
    };
    const said = { status: 1, stdout: "", stderr: "rigel: the current folder is no more; change to one that exists\n" };
    expect(await from("launch", config([shell("a", "high", "exit 0")]))).toEqual(said);
    expect(await from("run", "--class", "high", "--device", "simulated", "--", "true")).toEqual(said);
    const elsewhere = config([{ ...shell("a", "high", "exit 0"), cwd: "/" }]);
    expect(await from("launch", elsewhere)).toMatchObject({ status: 0 });
  });

  test("a configuration on standard input, whose paths begin where Rigel was called", async () => {
    const text = JSON.stringify({ device: "simulated", clients: [serve] });
    const from = (given: string) =>
      Bun.spawn([...commandLine(), "launch", "-", "--dry-run", "--json"], {
        cwd: scratch.path,
        env: plainEnvironment(),
        stdin: Buffer.from(given),
        stdout: "pipe",
        stderr: "pipe",
      });
    await using child = from(text);
    await using wrong = from('{"clients": 3}');
    expect(await child.stdout.text()).toContain(join(scratch.path, "tiny.csv"));
    expect(await wrong.stderr.text()).toBe("rigel: standard input:1:2: clients: expected a list, got 3\n");
    expect([await child.exited, await wrong.exited]).toEqual([0, 2]);
  });

  test("a standard output or error without room", async () => {
    const path = config([shell("a", "high", "echo hi")]);
    const run = (redirection: string) =>
      Bun.spawn(["sh", "-c", `"$@" ${redirection}`, "sh", ...commandLine(), "launch", path], {
        env: plainEnvironment(),
        stdin: "ignore",
        stdout: "pipe",
        stderr: "pipe",
      });
    await using unseen = run(">/dev/full");
    await using silent = run("2>/dev/full");
    const lines = (await unseen.stderr.text()).trimEnd().split("\n");
    expect(lines.at(-1)).toMatch(/^rigel: standard output cannot be written \(ENOSPC: [^\n]*\)$/);
    expect(await silent.stdout.text()).toContain("client");
    expect([await unseen.exited, await silent.exited]).toEqual([1, 0]);
  });

  test("a standard error that nobody reads: a client that says too much waits", async () => {
    const pipe = join(scratch.path, "unread");
    expect(Bun.spawnSync(["mkfifo", pipe]).success).toBe(true);
    const said = join(scratch.path, "said");
    const works = `${(await Native.load()).files.replay} --profile ${join(scratch.path, "tiny.csv")} --iterations 2`;
    const path = config([
      { name: "serve", class: "high", replay: { profile: "tiny.csv", rate_per_s: 50 } },
      shell(
        "talker",
        "best-effort",
        `${works} && yes $(printf %01000d 0) | head -c 40000000; echo all > ${said}; sleep 60`,
      ),
    ]);
    const report = join(scratch.path, "report");
    const script = `exec 3<> ${pipe}; "$@" 2>&3 >${report} & wait $!`;
    const command = [...commandLine(), "launch", path, "--json", "--duration", "2"];
    await using child = Bun.spawn(["sh", "-c", script, "sh", ...command], {
      env: plainEnvironment(),
      stdin: "ignore",
      stdout: "inherit",
      stderr: "inherit",
    });
    const ended = (): boolean => existsSync(report) && readFileSync(report, "utf8").endsWith("}\n");
    while (child.exitCode === null && !ended()) await Bun.sleep(20);
    const result = { stdout: readFileSync(report, "utf8"), stderr: "", status: 0 };
    expect(reportOf(result).clients).toMatchObject([{ name: "serve" }, { name: "talker", stopped: true }]);
    expect(existsSync(said)).toBe(false);
    // It ends when what waits has been read.
    await using reader = Bun.spawn(["cat", pipe], { stdin: "ignore", stdout: "ignore" });
    expect(await child.exited).toBe(0);
    reader.kill();
  });

  test.each(["stdout", "stderr"])("a closed %s", async (name) => {
    const closed = name === "stdout" ? "| true" : "2>&1 >/dev/null | true";
    const path = config([shell("a", "high", "sleep 0.3; echo hi")]);
    const script = `{ "$@"; echo $? >&3; } 3>${scratch.path}/${name} ${closed}`;
    const command = [...commandLine(), "launch", path];
    await using child = Bun.spawn(["sh", "-c", script, "sh", ...command], {
      env: plainEnvironment(),
      stdin: "ignore",
      stdout: "ignore",
      stderr: "pipe",
    });
    expect(await child.stderr.text()).not.toContain("EPIPE");
    expect(await Bun.file(join(scratch.path, name)).text()).toBe("0\n");
  });
});

describe("counts", () => {
  test("of processes whose slot others have taken over are kept", async () => {
    const { files } = await Native.load();
    const loop = `for i in $(seq 80); do ${files.replay} --profile ${scratch.path}/tiny.csv --iterations 2 >&- || exit; done`;
    const { stdout, stderr, status } = await rigel("launch", config([shell("a", "high", loop)]), "--json");
    const { clients, notes } = reportOf({ stdout, stderr, status });
    expect(notes).toEqual([]);
    expect(clients[0]?.iterations).toBe(160);
    expect(status).toBe(0);
  });

  test("of iterations whose ends are seen together share the time between them", async () => {
    const [header = ""] = TINY_PROFILE.split('"');
    const row = "k,kernel,7,132,1,1,256,1,1,32,0,0,50000000,1000\n";
    const profile = scratch.file("ahead.csv", `${header}${row}`);
    using folder = new Scratch();
    const client = { ...train, replay: { profile, iterations: 17 } };
    const args = ["launch", config([client], { policy: { name: "none" } }), "--json", "--segment", folder.path];
    await using child = start(args);
    const stderr = child.stderr.text();
    const segments = new Segments(await Native.load(), folder.path);
    // Whatever it has launched then ends while it is stopped. Where this comes too late all ends are seen one by one.
    const pid = await eventually(() => {
      if (child.exitCode !== null) return 0;
      const [segment] = segments.live();
      const [slot] = segment?.slots() ?? [];
      return segment && slot && segment.read(slot).usage.counters.launches >= 3 + 16 ? slot.pid : undefined;
    });
    if (pid > 0) {
      process.kill(pid, "SIGSTOP");
      await Bun.sleep(1000);
      process.kill(pid, "SIGCONT");
    }
    const stdout = await child.stdout.text();
    const { clients } = reportOf({ stdout, stderr: await stderr, status: await child.exited });
    expect(clients[0]?.iterations).toBe(17);
    // The time that it takes to look once more, 0.0002, is not what one took.
    expect(clients[0]?.requests.p50_ms).toBeGreaterThan(1);
  });

  test("of a process that was killed are over the time that it lived", async () => {
    const { files } = await Native.load();
    const replayed = `${files.replay} --profile ${scratch.path}/tiny.csv`;
    using folder = new Scratch();
    const working = join(folder.path, "working");
    const script = `${replayed} --iterations 1000000 >&- & ${untilThere(working)}; kill -KILL $!; wait; sleep 2`;
    const args = ["launch", config([shell("a", "high", script)]), "--json", "--segment", folder.path];
    await using child = start(args);
    const stderr = follow(child.stderr);
    const segments = new Segments(await Native.load(), folder.path);
    // How long it has lived is known by its heartbeat.
    await eventually(() => {
      const [segment] = segments.live();
      const [slot] = segment?.slots() ?? [];
      if (!segment || !slot) return undefined;
      const { first_launch_ns, heartbeat_ns } = segment.read(slot);
      return first_launch_ns > 0 && heartbeat_ns > first_launch_ns ? true : undefined;
    });
    await stderr.until("counting until the clients end");
    writeFileSync(working, "");
    const stdout = await child.stdout.text();
    const report = reportOf({ stdout, stderr: await stderr.all, status: await child.exited });
    expect(report.clients[0]?.counted_s).toBeGreaterThan(0);
    expect(report.clients[0]?.counted_s).toBeLessThan(report.duration_s - 1);
  });
});

describe("--dry-run", () => {
  test("shows commands, phases and what would be added, and starts nothing", async () => {
    const marker = join(scratch.path, "must-not-appear");
    const path = config([{ name: "a", class: "high", command: ["touch", marker], env: { X: "1 2" } }, train]);
    const { status, stdout } = await rigel("launch", path, "--dry-run", "--compare", "--duration", "3");
    expect(stdout).toContain(`run    touch ${marker}`);
    expect(stdout).toContain("with   X='1 2'");
    expect(stdout.split("\n").filter((line) => line.startsWith("phase"))).toEqual([
      "phase    alone: a, policy none",
      "phase    alone: train, policy none",
      "phase    ungoverned: a + train, policy none",
      "phase    governed: a + train, policy slo",
    ]);
    expect(await Bun.file(marker).exists()).toBe(false);
    expect(status).toBe(0);
  });

  test("of replays each has a seed of its own, or the one that it is given", async () => {
    const path = config([serve, { ...serve, name: "b", replay: { ...replay, seed: 7 } }, { ...serve, name: "c" }]);
    const { stdout } = await rigel("launch", path, "--dry-run");
    expect([...stdout.matchAll(/ --seed (\d+)/g)].map(([, seed]) => seed)).toEqual(["1", "7", "3"]);
  });
});

const suspended = (name: string, slow_calls: number, suspensions = 500) => ({
  name,
  preemption: { state: "on" as const, suspensions, suspended_ms: 900, slow_calls, stays: 0, ahead: 0, foreseen: 0 },
});

describe("the report", () => {
  test("names whose suspensions the driver held up, if it was more than a few", () => {
    const notes = heldUp([suspended("few", 2), suspended("many", 25), suspended("long", 25, 100_000)]);
    expect(notes.map((note) => note.split(" calls")[0])).toEqual(["many: 25"]);
  });
});

describe("the library", () => {
  test("is found under RIGEL_LIB, or the variable is named in the error", async () => {
    const path = config([serve]);
    await using child = start(["launch", path], { env: { RIGEL_LIB: "/nonexistent/librigel.so" } });
    expect(await child.stderr.text()).toContain("RIGEL_LIB=/nonexistent/librigel.so: no such file");
    expect(await child.exited).toBe(1);
  });

  test("that cannot be loaded is refused before anything starts", async () => {
    const broken = join(scratch.path, "librigel.so");
    writeFileSync(broken, "not an ELF file");
    await using child = start(["launch", config([serve])], { env: { RIGEL_LIB: broken } });
    expect(await child.stderr.text()).toContain(`RIGEL_LIB=${broken} cannot be loaded`);
    expect(await child.exited).toBe(1);
  });

  test("of another version is told to be that", async () => {
    const native = await Native.load();
    const layout = native.layout.replace(/"version": ?\d+/, '"version":1');
    expect(layout).not.toBe(native.layout);
    expect(() => segmentBytes({ layout })).toThrow(/another version of Rigel.*unset RIGEL_LIB, or build it anew/);
    expect(segmentBytes(native)).toBeGreaterThan(1e6);
  });
});
