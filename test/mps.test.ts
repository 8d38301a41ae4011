/**
 * mps.test.ts: how a launch shares a GPU: whose MPS daemon is used, what clients are told, and that nothing is left.
 *
 * The GPU is the simulated one under a driver that does not say so, which a launch takes for a real one; the daemon is
 * fake-mps.ts, found on PATH under the name of the real one. gpu.test.ts has the real pair.
 */

import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { chmodSync, existsSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { decide } from "../src/mps.ts";
import { findDaemon } from "../src/mps-daemon.ts";
import { Native } from "../src/native.ts";
import { living, startedWith } from "../src/proc.ts";
import { adviceFor, areBound, areShort } from "../src/sharing-advice.ts";
import { type Result, Scratch, TINY_PROFILE, reportOf, root, start, withoutPlaces } from "./rigel.ts";

const PROGRAM = "nvidia-cuda-mps-control";
let scratch: Scratch;

// As setup.ts: what that says holds for the first file of a run alone. Two tests here wait for limits of seconds.
setDefaultTimeout(300_000);

beforeAll(async () => {
  scratch = new Scratch();
  scratch.file("tiny.csv", TINY_PROFILE);
  for (const folder of ["bin", "driver"]) mkdirSync(join(scratch.path, folder));
  const program = scratch.file(
    `bin/${PROGRAM}`,
    `#!/bin/sh\nexec '${process.execPath}' '${join(root, "test", "fake-mps.ts")}' "$@"\n`,
  );
  chmodSync(program, 0o755);
  // The mark by which a program can tell that the GPU is simulated, under another name of the same length.
  const driver = readFileSync(join(files.simulator, "libcuda.so.1"), "latin1");
  expect(driver).toContain("rigel_sim_marker");
  const unmarked = driver.replaceAll("rigel_sim_marker", "rigel_sim_marked");
  writeFileSync(join(scratch.path, "driver", "libcuda.so.1"), unmarked, "latin1");
});
afterAll(() => scratch[Symbol.dispose]());

/** One machine: its runtime folder, what its daemons were told, and a state of the GPU. */
class Machine implements AsyncDisposable {
  readonly path: string;
  readonly env: Record<string, string>;
  static #count = 0;

  constructor(fault = "") {
    this.path = join(scratch.path, `machine-${Machine.#count++}`);
    for (const folder of ["", "run", "daemon", "daemon/log"]) mkdirSync(join(this.path, folder), { mode: 0o700 });
    this.env = {
      PATH: `${join(scratch.path, "bin")}:${process.env["PATH"]}`,
      LD_LIBRARY_PATH: join(scratch.path, "driver"),
      RIGEL_SIM_STATE: join(this.path, "gpu"),
      RIGEL_SIM_MPS: "1",
      XDG_RUNTIME_DIR: join(this.path, "run"),
      // How long kernels of other tests' programs were seen to take is no business of this one's.
      XDG_CACHE_HOME: join(this.path, "cache"),
      CUDA_MPS_PIPE_DIRECTORY: join(this.path, "daemon"),
      CUDA_MPS_LOG_DIRECTORY: join(this.path, "daemon", "log"),
      FAKE_MPS: fault,
      FAKE_MPS_RECORD: this.path,
    };
  }

  /** Starts the daemon that a launch may adopt. */
  async startDaemon(env: Record<string, string> = {}): Promise<number> {
    const child = Bun.spawn([join(scratch.path, "bin", PROGRAM), "-d"], {
      env: { ...process.env, ...this.env, ...env },
      stdio: ["ignore", "inherit", "inherit"],
    });
    expect(await child.exited).toBe(0);
    return Number(readFileSync(join(this.path, "daemon", `${PROGRAM}.pid`), "utf8"));
  }

  /** A process becomes a client of the daemon that was started. */
  async join(pid: number): Promise<void> {
    const control = [join(scratch.path, "bin", PROGRAM)];
    await using child = Bun.spawn(control, {
      env: { ...process.env, ...this.env },
      stdin: new Blob(["start_server -uid 0\n"]),
    });
    expect(await child.exited).toBe(0);
    writeFileSync(join(this.path, "daemon", "joined"), `${pid}\n`);
  }

  config(clients: object[], rest: object = {}): string {
    const path = join(this.path, "jobs.json");
    writeFileSync(path, JSON.stringify({ clients, ...rest }));
    return path;
  }

  launch(clients: object[], rest: object, ...flags: string[]) {
    return start(["launch", this.config(clients, rest), ...flags], { env: this.env });
  }

  async run(clients: object[], rest: object, ...flags: string[]): Promise<Result> {
    await using child = this.launch(clients, rest, ...flags);
    const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    return { stdout, stderr, status };
  }

  /** What its daemons were told, one line each. */
  get told(): string[] {
    const path = join(this.path, "told");
    return existsSync(path) ? readFileSync(path, "utf8").trim().split("\n") : [];
  }

  /** Folders that launches have made and not removed. */
  get folders(): string[] {
    return readdirSync(join(this.path, "run"));
  }

  /** Daemons and servers that run. */
  get processes(): number[] {
    return living()
      .filter(({ pid }) => startedWith(pid, [`FAKE_MPS_RECORD=${this.path}`]))
      .map(({ pid }) => pid);
  }

  /** Settles when nothing is left of any launch; the test's time limit bounds this. */
  async isClean(): Promise<void> {
    while (this.folders.length > 0 || this.processes.length > 0) await Bun.sleep(20);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const pid of this.processes) kill(pid);
    while (this.processes.length > 0) await Bun.sleep(20);
  }
}

/** Of processes that may end by themselves. */
function kill(pid: number): void {
  try {
    process.kill(pid, "SIGKILL");
  } catch {
    // It has just ended.
  }
}

// Replays calibrate themselves on a real GPU, which this one would not stand: they may know.
const { files } = await Native.load();
const replay = { profile: "../tiny.csv", iterations: 20 };
const env = { LD_LIBRARY_PATH: files.simulator };
const serve = { name: "serve", class: "high", replay, env };
const train = { name: "train", class: "best-effort", replay, env };

function shell(name: string, kind: string, script: string, more: object = {}): object {
  return { name, class: kind, command: ["sh", "-c", script], ...more };
}

/** Prints what a client is told of MPS. */
const SAY =
  'echo "pipe=$CUDA_MPS_PIPE_DIRECTORY; log=$CUDA_MPS_LOG_DIRECTORY; percent=${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE-none}; ' +
  'mode=$(stat -c %a "$CUDA_MPS_PIPE_DIRECTORY"); holds=$(ls "$CUDA_MPS_PIPE_DIRECTORY" | tr "\\n" " ")"';

function said(stderr: string, name: string): Record<string, string> {
  const line = new RegExp(`^${name} *\\| (pipe=.*)$`, "m").exec(stderr)?.[1] ?? "";
  return Object.fromEntries(line.split("; ").map((entry) => entry.split("=").map((part) => part.trim())));
}

describe("sharing mps starts a daemon", () => {
  test("for the launch alone, tells the clients, and ends it", async () => {
    await using machine = new Machine();
    const result = await machine.run([serve, shell("say", "high", SAY), train], { sharing: "mps" }, "--json");
    const report = reportOf(result);
    const { pipe = "", log, mode, holds } = said(result.stderr, "say");
    expect(report.device).toMatchObject({ simulated: false });
    expect(report.sharing).toEqual({ mode: "mps", daemon: "private", pipe_directory: pipe });
    expect(report.clients).toMatchObject([{ mps: true }, { mps: true }, { mps: true }]);
    expect(pipe).toMatch(new RegExp(`^${machine.path}/run/rigel-mps-\\d+-\\w+/pipe$`));
    expect(log).toBe(pipe.replace(/pipe$/, "log"));
    expect({ mode, holds }).toEqual({ mode: "700", holds: `control log ${PROGRAM}.pid` });
    expect(machine.told.filter((line) => !line.startsWith("get_"))).toEqual([
      `started for ${report.device.uuid} in ${pipe}`,
      `start_server -uid ${process.getuid?.()}`,
      "quit -t 5",
    ]);
    await machine.isClean();
    expect(result.status).toBe(0);
  });

  test("that serves a comparison, but for who is alone, unless that may use a part of the GPU only", async () => {
    await using machine = new Machine();
    const say = { ...shell("say", "high", SAY), sm_percent: 50 };
    const result = await machine.run([serve, say, train], { sharing: "mps" }, "--json", "--compare");
    const report = reportOf(result);
    expect(report.compare.map(({ mode, clients }) => [mode, clients.map(({ mps }) => mps)])).toEqual([
      ["alone", [false, true, false]],
      ["ungoverned", [true, true, true]],
      ["governed", [true, true, true]],
    ]);
    expect(machine.told.filter((line) => line.startsWith("started"))).toHaveLength(1);
    await machine.isClean();
    expect(result.status).toBe(0);
  });

  test.each([
    ["and says which clients are not among the daemon's", "$$", false],
    ["and believes nothing of a daemon that cannot tell its clients", "0", true],
  ])("%s", async (_, pid, out) => {
    await using machine = new Machine();
    const endless = `env LD_LIBRARY_PATH=${files.simulator} ${files.replay} --profile ${scratch.path}/tiny.csv >&-`;
    const joins = `echo ${pid} >> "$CUDA_MPS_PIPE_DIRECTORY/joined"`;
    const report = reportOf(
      await machine.run(
        [shell("in", "high", `${joins}; exec ${endless}`), shell("out", "best-effort", `exec ${endless}`)],
        { sharing: "mps", duration_s: 0.2 },
        "--json",
      ),
    );
    expect(report.clients).toMatchObject([
      { name: "in", mps: true, attached: true },
      { name: "out", mps: out, attached: true },
    ]);
    expect(report.notes).toEqual(
      out ? [] : ["out: was to run under MPS, but the daemon does not have it among its clients"],
    );
    await machine.isClean();
  });

  // Whether the launcher ends well or is killed.
  test.each(["SIGTERM", "SIGKILL"] as const)(
    "that stays, after %s, for what has joined the launch, and ends with it",
    async (signal) => {
      await using machine = new Machine();
      const at = (name: string): string => join(machine.path, name);
      const until = (name: string): string => `until [ -e '${at(name)}' ]; do sleep 0.05; done`;
      const there = async (name: string): Promise<void> => {
        while (!existsSync(at(name))) await Bun.sleep(20);
      };
      const serves = shell("serve", "high", `touch '${at("serves")}'; sleep 1000`);
      await using launch = machine.launch([serves], { sharing: "mps" }, "--segment", machine.path);
      await there("serves");
      const script = `touch '${at("joined")}'; ${until("over")}; echo "$CUDA_MPS_PIPE_DIRECTORY"`;
      const run = ["run", "--class", "best-effort", "--segment", machine.path, "--", "sh", "-c", script];
      await using joined = start(run, { env: machine.env });
      await there("joined");
      const [folder = ""] = machine.folders;
      launch.kill(signal);
      const stderr = await launch.stderr.text();
      await launch.exited;
      if (signal === "SIGTERM")
        expect(stderr).toMatch(/MPS: the daemon ends with what has joined this launch \(process \d/);
      // Its guard has had time for a look or two.
      await Bun.sleep(2500);
      expect(machine.told).not.toContain("quit -t 5");
      expect(machine.folders).toEqual([folder]);
      writeFileSync(at("over"), "");
      const [stdout, status] = await Promise.all([joined.stdout.text(), joined.exited]);
      expect(stdout).toBe(`${machine.path}/run/${folder}/pipe\n`);
      await machine.isClean();
      expect(machine.told).toContain("quit -t 5");
      expect(status).toBe(0);
    },
  );

  test("in a folder whose path its sockets can have", async () => {
    await using machine = new Machine();
    machine.env["XDG_RUNTIME_DIR"] = join(machine.path, "a".repeat(100));
    mkdirSync(machine.env["XDG_RUNTIME_DIR"]);
    machine.env["TMPDIR"] = join(machine.path, "run");
    const { sharing } = reportOf(await machine.run([serve], { sharing: "mps" }, "--json"));
    expect(sharing.pipe_directory).toStartWith(`${machine.path}/run/rigel-mps-`);
    await machine.isClean();
  });

  test("only in a launch: --dry-run shows what is meant", async () => {
    await using machine = new Machine();
    const result = await machine.run([serve], { sharing: "mps" }, "--dry-run");
    expect(result.stdout).toContain("sharing  MPS, own daemon\n");
    expect(machine.told).toEqual([]);
    expect(result.status).toBe(0);
  });

  test.each(["denied", "silent", "exclusive"])("or says why it cannot: %s", async (fault) => {
    await using machine = new Machine(fault);
    const marker = join(machine.path, "must-not-appear");
    const result = await machine.run([shell("a", "high", `touch ${marker}`)], { sharing: "mps" }, "--json");
    expect(withoutPlaces(result.stderr)).toContain(`rigel: ${machine.path}/jobs.json: sharing: "mps" cannot be had: `);
    expect(result.stderr).toContain(
      {
        denied: `${PROGRAM} -d ended with status 1: Failed to create the pipe directory: permission denied`,
        silent: `${PROGRAM} -d ended well, but no daemon answers`,
        exclusive: "its server did not start",
      }[fault] ?? fault,
    );
    if (fault === "exclusive") expect(result.stderr).toContain("devices are busy or unavailable");
    expect(result.stderr).toContain('set sharing to "auto" or "time-slice" to go without');
    expect(existsSync(marker)).toBe(false);
    await machine.isClean();
    expect(result).toMatchObject({ status: 1, stdout: "" });
  });

  test.each([
    ["its server", "late", `start_server -uid ${process.getuid?.()}`],
    ["the daemon", "stuck", "stuck"],
  ])(
    "and no client where it was asked to end while it waited for %s, which it then does no more",
    async (_, fault, last) => {
      await using machine = new Machine(fault);
      const marker = join(machine.path, "must-not-appear");
      const script = `trap '' TERM; touch ${marker}; sleep 1000`;
      await using launch = machine.launch([shell("a", "high", script)], { sharing: "mps" }, "--json");
      while (!machine.told.includes(last)) await Bun.sleep(20);
      launch.kill("SIGTERM");
      const [stdout, stderr, status] = await Promise.all([launch.stdout.text(), launch.stderr.text(), launch.exited]);
      const report = reportOf({ stdout, stderr, status });
      expect(existsSync(marker)).toBe(false);
      expect(report.clients).toEqual([]);
      expect(report.notes).toContain("the launch was asked to end before its clients were started");
      await machine.isClean();
      // A launch that waits on gives up first, after 30 s.
      expect(machine.told.filter((line) => !line.startsWith("started for")).slice(0, 2)).toEqual([last, "quit -t 5"]);
      expect(status).toBe(143);
    },
  );

  test("or names the program that is missing", async () => {
    await using machine = new Machine();
    machine.env["PATH"] = join(machine.path, "run"); // where there is no program at all
    const result = await machine.run([serve], { sharing: "mps" }, "--dry-run");
    expect(withoutPlaces(result.stderr)).toContain(`jobs.json: sharing: expected ${PROGRAM} on PATH for "mps"`);
    expect(result).toMatchObject({ status: 1, stdout: "" });
  });
});

/** The client, with a daemon of its own. */
function naming(client: object): object {
  return { ...client, env: { ...env, CUDA_MPS_PIPE_DIRECTORY: "/nowhere" } };
}

/** A kernel of a profile. */
function row(grid: number, duration_ns: number): string {
  return `rigel_spin,kernel,0,${grid},1,1,32,1,1,16,0,0,${duration_ns},1000\n`;
}

const SPIN = "# rigel-profile 1; device=NVIDIA H200\n";
const COLUMNS =
  "name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns\n";

describe("sharing auto", () => {
  const profiled = (duration_ns: number): object => ({ ...train, profile: `../spin-${duration_ns}.csv` });
  beforeAll(() => {
    for (const duration_ns of [900_000, 4_000_000])
      scratch.file(`spin-${duration_ns}.csv`, SPIN + COLUMNS + row(1, duration_ns));
    scratch.file("spin-seldom.csv", SPIN + COLUMNS + row(1, 900_000).repeat(60) + row(2, 2_000_000));
    scratch.file("spin-often.csv", SPIN + COLUMNS + row(1, 900_000) + row(2, 2_000_000).repeat(60));
  });

  test("starts a daemon where best-effort kernels are known to be short", async () => {
    await using machine = new Machine();
    const report = reportOf(await machine.run([serve, profiled(900_000)], {}, "--json"));
    expect(report.sharing).toMatchObject({ mode: "mps", daemon: "private" });
    expect(report.clients).toMatchObject([{ mps: true }, { mps: true }]);
    expect(report.notes).toContain(
      "an MPS daemon of the launch's own: best-effort kernels are known to be short (the longest takes 0.90 ms); " +
        '"sharing": "time-slice" goes without',
    );
    await machine.isClean();
  });

  test.each([
    ["seldom", "mps"],
    ["often", "time-slice"],
  ] as const)("weighs kernels of a profile by launches: long ones that come %s make it %s", async (how, mode) => {
    await using machine = new Machine();
    const result = await machine.run([serve, { ...train, profile: `../spin-${how}.csv` }], {}, "--json");
    expect(reportOf(result).sharing.mode).toBe(mode);
  });

  test("goes on in time slices where that daemon does not start", async () => {
    await using machine = new Machine("denied");
    const result = await machine.run([serve, { ...profiled(900_000), sm_percent: 50 }], {}, "--json");
    const report = reportOf(result);
    expect(report.sharing).toEqual({ mode: "time-slice", daemon: null, pipe_directory: null });
    expect(report.clients).toMatchObject([{ mps: false }, { mps: false }]);
    expect(report.notes.join()).toContain("time slices instead, as the MPS daemon did not start");
    expect(report.notes.join()).toContain("train: sm_percent has no effect, as it is not under MPS");
    expect(result.status).toBe(0);
    await machine.isClean();
  });

  test.each([
    ["they are long", [serve, profiled(4_000_000)], {}],
    ["nothing is known of them", [serve, train], {}],
    ["one of the programs is not known", [serve, profiled(900_000), { ...train, name: "other" }], {}],
    ["no request can be delayed", [profiled(900_000)], {}],
    ["each names a daemon", [naming(serve), naming(profiled(900_000))], {}],
    ["nothing holds them back", [serve, profiled(900_000)], { policy: { name: "none" } }],
  ] as const)("is time slices where %s", async (_why, clients, rest) => {
    await using machine = new Machine();
    const { sharing } = reportOf(await machine.run([...clients], rest, "--json"));
    expect(sharing).toEqual({ mode: "time-slice", daemon: null, pipe_directory: null });
    expect(machine.told).toEqual([]);
  });

  test("is time slices where the high client has another GPU", async () => {
    await using machine = new Machine();
    machine.env["RIGEL_SIM_DEVICES"] = "2";
    const result = await machine.run([serve, { ...profiled(900_000), device: 1 }], {}, "--dry-run");
    expect(result.stdout).toContain("sharing  time slices\n");
    const together = await machine.run(
      [
        { ...serve, device: [0, 1] },
        { ...profiled(900_000), device: 1 },
      ],
      {},
      "--dry-run",
    );
    expect(together.stdout).toContain("sharing  MPS, own daemon\n");
  });

  test("is time slices where requests were seen to keep the GPU busy, which MPS makes longer", async () => {
    const busy = { ...serve, replay: { profile: "../tiny.csv", iterations: 80 } };
    const clients = [busy, profiled(900_000)];
    await using machine = new Machine();
    const first = reportOf(await machine.run(clients, {}, "--json"));
    expect(first.sharing.mode).toBe("mps");
    // Of what that has learned, which depends on how fast this machine is, its requests as they may have been seen.
    const folder = join(machine.path, "cache", "rigel", "durations");
    const [file = ""] = readdirSync(folder);
    const [head, ...rows] = readFileSync(join(folder, file), "utf8").trimEnd().split("\n");
    const requests = rows.map((line) => JSON.parse(line)).find((kept) => "waited_part" in kept);
    const seen = async (length_ms: number, waited_part: number): Promise<Result> => {
      writeFileSync(join(folder, file), `${head}\n${JSON.stringify({ ...requests, length_ms, waited_part })}\n`);
      return await machine.run(clients, {}, "--json");
    };
    expect(reportOf(await seen(4, 0.4)).sharing.mode).toBe("mps");
    const told = machine.told.length;
    expect(reportOf(await seen(4, 0.9)).sharing).toEqual({ mode: "time-slice", daemon: null, pipe_directory: null });
    expect(machine.told).toHaveLength(told);
    // The same beside a daemon that serves nobody, of which the report says why it is not used.
    await machine.startDaemon();
    expect(reportOf(await seen(4, 0.9)).notes).toContain(
      "time slices, though an MPS daemon runs: serve is known to wait for the GPU for 90% of its requests of 4.0 ms, which MPS " +
        'itself makes longer; "sharing": "mps" uses it',
    );
  });

  const short = [{ duration_ns: 100_000, samples: 64 }];
  const busy = { length_ms: 4, waited_part: 0.9 };
  test.each([
    ["short kernels", short, undefined, "mps"],
    ["short kernels, requests that leave gaps", short, { length_ms: 4, waited_part: 0.3 }, "mps"],
    ["short kernels, busy requests", short, busy, "time-slice"],
    ["nothing of its kernels, busy requests", [], busy, "time-slice"],
    ["too few launches", [{ duration_ns: 100_000, samples: 63 }], undefined, undefined],
    ["long kernels", [{ duration_ns: 4_000_000, samples: 64 }], undefined, "time-slice"],
    ["nothing", [], undefined, undefined],
  ] as const)("where %s are known", (_what, kernels, requests, mode) => {
    const device = {
      index: 0,
      name: "GPU",
      uuid: "GPU-1",
      simulated: false,
      sms: 132,
      memory_bytes: 1,
      exclusive: false,
    };
    const known = {
      kernels: new Map([["b", [...kernels]]]),
      requests: new Map(requests ? [["a", { ...requests, program: "a", command: "", requests: 20, used: "" }]] : []),
    };
    const sharer = (program: string) => ({ name: program, program, device, profile: undefined });
    expect(adviceFor([sharer("a")], [sharer("b")], () => known)?.mode).toBe(mode);
    // Nobody has to be protected where no best-effort program is.
    expect(adviceFor([sharer("a")], [], () => known)).toBeUndefined();
  });

  test.each([
    [{ length_ms: 1, waited_part: 0.51 }, true],
    [{ length_ms: 0.9, waited_part: 1 }, false],
    [{ length_ms: 9, waited_part: 0.5 }, false],
  ])("requests of %j keep the GPU busy for long: %p", (requests, bound) => {
    expect(areBound(requests)).toBe(bound);
  });

  test("lets a twentieth of the GPU time be in long kernels", () => {
    const long = { duration_ns: 2_000_000, samples: 1 };
    expect(areShort([{ duration_ns: 100_000, samples: 381 }, long])).toBe(true);
    expect(areShort([{ duration_ns: 100_000, samples: 379 }, long])).toBe(false);
    expect(areShort([])).toBe(false);
  });
});

describe("the launch's own daemon ends", () => {
  const waits = shell("a", "high", "echo ready; exec sleep 1000");

  test.each([
    ["SIGINT", 130],
    ["SIGTERM", 143],
    ["SIGKILL", 137],
  ] as const)("with a launcher that gets %s", async (signal, status) => {
    await using machine = new Machine();
    await using child = machine.launch([waits], { sharing: "mps" });
    await ready(child.stderr);
    expect(machine.folders).toHaveLength(1);
    child.kill(signal);
    expect(await child.exited).toBe(status);
    await machine.isClean();
    expect(machine.told.at(-1)).toBe("quit -t 5");
  });

  test("with a client that crashes", async () => {
    await using machine = new Machine();
    const result = await machine.run([shell("a", "high", "kill -SEGV $$")], { sharing: "mps" });
    await machine.isClean();
    expect(result.status).toBe(139);
  });

  test("with a launch that cannot go on", async () => {
    await using machine = new Machine();
    const command = join(machine.path, "no-interpreter");
    writeFileSync(command, "#!/nonexistent/interpreter\n", { mode: 0o700 });
    const result = await machine.run([{ ...waits, command: [command] }], { sharing: "mps" });
    expect(result.stderr).toContain("no-interpreter");
    expect(machine.told.at(-1)).toBe("quit -t 5");
    await machine.isClean();
    expect(result.status).toBe(2);
  });

  test("by a signal, if it does not when told to, also with a launcher that is killed", async () => {
    await using machine = new Machine("stubborn");
    await using child = machine.launch([waits], { sharing: "mps" });
    await ready(child.stderr);
    child.kill("SIGKILL");
    await machine.isClean();
    expect(machine.told.at(-1)).toBe("quit -t 5");
  });

  test("by a signal, with its server, if it does not when told to", async () => {
    await using machine = new Machine("stubborn");
    const result = await machine.run([serve], { sharing: "mps" });
    expect(machine.told.slice(-2)).toEqual(["quit -t 5", "SIGTERM"]);
    await machine.isClean();
    expect(result.status).toBe(0);
  });
});

/** Reads up to the line that says that a client runs. */
async function ready(stream: ReadableStream<Uint8Array<ArrayBuffer>>): Promise<void> {
  const decoder = new TextDecoder();
  let text = "";
  for await (const chunk of stream) {
    text += decoder.decode(chunk, { stream: true });
    if (text.includes("| ready")) return;
  }
  throw new Error(`the launch ended early: ${text}`);
}

describe("a daemon that runs", () => {
  test("serves a comparison, who is alone, too", async () => {
    await using machine = new Machine();
    await machine.startDaemon();
    const { compare } = reportOf(await machine.run([serve, train], {}, "--json", "--compare"));
    expect(compare.flatMap(({ clients }) => clients.map(({ mps }) => mps))).toEqual(Array(6).fill(true));
  });

  test.each(["auto", "mps"])("is used with sharing %s, and not stopped", async (sharing) => {
    await using machine = new Machine();
    const pid = await machine.startDaemon();
    const result = await machine.run([shell("say", "high", SAY), train], { sharing }, "--json");
    const report = reportOf(result);
    const folder = join(machine.path, "daemon");
    expect(report.sharing).toEqual({ mode: "mps", daemon: "adopted", pipe_directory: folder });
    expect(report.clients).toMatchObject([{ mps: true }, { mps: true }]);
    expect(said(result.stderr, "say")).toMatchObject({ pipe: folder, log: join(folder, "log") });
    expect(machine.processes).toContain(pid);
    expect(machine.told.filter((line) => /quit|start_server/.test(line))).toEqual([]);
    expect(machine.folders).toEqual([]);
    expect(result.status).toBe(0);
  });

  describe("where best-effort kernels are known to be long", () => {
    test("is left alone, as long as it serves nobody", async () => {
      await using machine = new Machine();
      const pid = await machine.startDaemon();
      const profile = "long.csv";
      writeFileSync(join(machine.path, profile), SPIN + COLUMNS + row(1, 4_000_000));
      const result = await machine.run([shell("say", "high", SAY), { ...train, profile }], {}, "--json");
      const report = reportOf(result);
      expect(report.sharing).toEqual({ mode: "time-slice", daemon: null, pipe_directory: null });
      expect(report.notes).toContain(
        "time slices, though an MPS daemon runs: best-effort kernels are known to be long (the longest takes 4.0 ms), and can be " +
          'interrupted there; "sharing": "mps" uses it',
      );
      expect(said(result.stderr, "say")["pipe"]).toStartWith(`${machine.path}/run/rigel-mps-`);
      expect(machine.processes).toContain(pid);
      expect(machine.told.filter((line) => /quit|start_server/.test(line))).toEqual([]);
      expect(machine.folders).toEqual([]);
    });

    test.each([
      ["serves others", true, false],
      ["has the GPU to itself", false, true],
    ])("is used where it %s", async (_why, clients, exclusive) => {
      await using machine = new Machine();
      await machine.startDaemon();
      if (clients) await machine.join(process.pid);
      using _ = pathOf(machine.env["PATH"] ?? "");
      const advice = { mode: "time-slice", why: "they are long" } as const;
      const decided = await decide(
        "auto",
        [{ uuid: "GPU-1", exclusive }],
        machine.env,
        "jobs.json: sharing",
        () => advice,
      );
      expect(decided).toMatchObject({ mode: "mps", daemon: "adopted", hides: false, notes: [] });
    });
  });

  test("is not found by clients that are to have time slices", async () => {
    await using machine = new Machine();
    await machine.startDaemon();
    const result = await machine.run([shell("say", "high", SAY)], { sharing: "time-slice" }, "--json");
    expect(reportOf(result)).toMatchObject({
      sharing: { mode: "time-slice", daemon: null, pipe_directory: null },
      clients: [{ mps: false }],
    });
    const { pipe, mode, holds } = said(result.stderr, "say");
    expect(pipe).toStartWith(`${machine.path}/run/rigel-mps-`);
    expect({ mode, holds }).toEqual({ mode: "700", holds: "" });
    expect(machine.folders).toEqual([]);
  });

  test("but serves other GPUs is named and not used", async () => {
    await using machine = new Machine();
    await machine.startDaemon({ CUDA_VISIBLE_DEVICES: "GPU-0000,GPU-1111" });
    const report = reportOf(await machine.run([train], {}, "--json"));
    expect(report.sharing).toEqual({ mode: "time-slice", daemon: null, pipe_directory: null });
    expect(report.notes).toEqual([
      `${machine.path}/daemon: its MPS control daemon serves other GPUs (GPU-0000, GPU-1111), not ${report.device.uuid}; ` +
        "it is not used, and left as it is, as Rigel did not make it",
    ]);
  });

  test("but is stopped is named and not used", async () => {
    await using machine = new Machine();
    const pid = await machine.startDaemon();
    process.kill(pid, "SIGSTOP");
    const report = reportOf(await machine.run([train], {}, "--json"));
    expect(report.sharing.mode).toBe("time-slice");
    expect(report.notes.join()).toContain(`its MPS control daemon does not answer within 5 s (process ${pid})`);
  });
});

/** Listens at a path with a socket that keeps the bounds of messages, as bun's cannot, until it is killed. */
const LISTEN = `import socket, sys, time
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(sys.argv[1])
server.listen(5)
print("listening", flush=True)
time.sleep(600)`;

/** Sets this process's PATH for a scope. */
function pathOf(path: string): Disposable {
  const before = process.env["PATH"];
  process.env["PATH"] = path;
  return { [Symbol.dispose]: () => void (process.env["PATH"] = before) };
}

/** A benchmark of one pair whose programs do not start, where no daemon does either. */
async function denied(...ways: string[]): Promise<Result> {
  await using machine = new Machine("denied");
  const python = join(machine.path, "python3");
  writeFileSync(python, "#!/bin/sh\nexit 3\n", { mode: 0o755 });
  machine.env["PATH"] = `${machine.path}:${machine.env["PATH"]}`;
  const args = ["bench", "--pairs", "resnet50+resnet50-train", "--rounds", "1", ...ways];
  await using child = start(args, { env: machine.env });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  await machine.isClean();
  return { stdout, stderr, status };
}

describe("rigel bench where MPS is denied", () => {
  test("leaves the ways with it out, says so, and goes on", async () => {
    const { stdout, stderr } = await denied();
    expect(stderr).toContain("note: the ways with MPS are left out: ");
    expect(stderr).toContain("permission denied");
    // Each is tried, though here there is no program to run.
    expect(stderr).toMatch(/\[(\d+)\/\1\] resnet50\+resnet50-train, live: alone; time slicing; rigel slo: FAILED/);
    expect(stderr).not.toMatch(/live: .*MPS/);
    expect(stdout).toContain("the ways with MPS are left out");
  });

  test("starts programs anew for every way where it is told so", async () => {
    const { stderr } = await denied("--anew");
    expect(stderr).toMatch(/\[(\d+)\/\1\] resnet50\+resnet50-train, round 1, rigel priority: FAILED/);
    expect(stderr).not.toMatch(/round 1, .*MPS/);
  });

  test("says what to do about --ways where those were asked for", async () => {
    const { stdout, stderr, status } = await denied("--ways", "MPS");
    expect(stderr).toContain('--ways: "mps" cannot be had');
    expect(stderr).toContain("name ways without MPS");
    expect(stderr).not.toContain("sharing");
    expect({ stdout, status }).toEqual({ stdout: "", status: 1 });
  });
});

test("a daemon is found by its control socket, of whatever type", async () => {
  using own = new Scratch();
  const environment = { CUDA_MPS_PIPE_DIRECTORY: own.path };
  const control = join(own.path, "control");
  await using child = Bun.spawn(["python3", "-c", LISTEN, control], { stdout: "pipe", stderr: "inherit" });
  // The whole line: whoever writes its end to a pipe that is no longer read dies of it.
  for await (const chunk of child.stdout) if (new TextDecoder().decode(chunk).includes("\n")) break;
  {
    // Without a program that could ask it: this one does not answer.
    using _ = pathOf(own.path);
    expect(await findDaemon(environment, [])).toEqual({ state: "running", folder: own.path });
  }
  child.kill("SIGKILL");
  await child.exited;
  expect(await findDaemon(environment, [])).toMatchObject({ state: "unusable" });
});

test("what a dead daemon has left behind is named, not used and not removed", async () => {
  await using machine = new Machine();
  const pid = await machine.startDaemon();
  process.kill(pid, "SIGKILL");
  while (machine.processes.includes(pid)) await Bun.sleep(20);
  const left = readdirSync(join(machine.path, "daemon"));
  expect(left).toContain("control");
  for (const [sharing, daemon] of [
    ["auto", null],
    ["mps", "private"],
  ] as const) {
    const report = reportOf(await machine.run([train], { sharing }, "--json"));
    expect(report.sharing.daemon).toBe(daemon);
    expect(report.notes.join()).toMatch(
      new RegExp(
        `^${machine.path}/daemon: it holds the files of an MPS control daemon that does not answer ` +
          `\\(ECONNREFUSED; process ${pid} of its pid file is gone\\); it is not used, and left as it is`,
      ),
    );
    expect(readdirSync(join(machine.path, "daemon"))).toEqual(left);
  }
  expect(await findDaemon(machine.env, [])).toMatchObject({ state: "unusable", isGone: true });
  await machine.isClean();
});

test("auto without a daemon is time slices, and starts none", async () => {
  await using machine = new Machine();
  const result = await machine.run([shell("say", "high", SAY)], {}, "--json");
  expect(reportOf(result)).toMatchObject({
    sharing: { mode: "time-slice", daemon: null, pipe_directory: null },
    clients: [{ mps: false }],
    notes: [],
  });
  expect(said(result.stderr, "say")).toMatchObject({ pipe: join(machine.path, "daemon"), percent: "none" });
  expect(machine.told).toEqual([]);
});

test("isolation and sm_percent are for one client", async () => {
  await using machine = new Machine();
  const clients = [
    shell("serve", "high", SAY),
    shell("half", "high", SAY, { sm_percent: 50 }),
    shell("apart", "high", SAY, { isolation: "process" }),
  ];
  const result = await machine.run(clients, { sharing: "mps" }, "--json");
  const report = reportOf(result);
  const pipe = report.sharing.pipe_directory ?? "";
  expect(report.clients).toMatchObject([{ mps: true }, { mps: true }, { mps: false }]);
  expect(said(result.stderr, "serve")).toMatchObject({ pipe, percent: "none" });
  expect(said(result.stderr, "half")).toMatchObject({ pipe, percent: "50" });
  expect(said(result.stderr, "apart")).toMatchObject({ pipe: pipe.replace(/pipe$/, "none"), holds: "", mode: "700" });
  await machine.isClean();
  expect((await machine.run(clients, { sharing: "mps" })).stdout).toContain("\nnote: apart: not under MPS\n");
});

/** Does some work on the GPU. */
function work(): string {
  return `env LD_LIBRARY_PATH=${files.simulator} ${files.replay} --profile ${scratch.path}/tiny.csv --iterations 1 >&-`;
}

/** Waits until the process whose number is in a file has ended, which is when the launcher has collected it, then ends. */
function after(file: string, status: number): string {
  return (
    `until [ -s ${file} ]; do sleep 0.02; done; p=$(cat ${file}); ` +
    `while kill -0 $p 2>&-; do sleep 0.02; done; exit ${status}`
  );
}

/** The same after some work. */
function later(file: string, status = 7): string {
  return `${work()}; ${after(file, status)}`;
}

/** Works, leaves a line in the server's log, its number in the file, and crashes. */
function crash(file: string): string {
  const line = "[2026-01-01 00:00:01.000 Server 7] Client encountered a fatal exception";
  return `${work()}; echo "${line}" >> "$CUDA_MPS_LOG_DIRECTORY/server.log"; echo $$ > ${file}; kill -SEGV $$`;
}

test("where every client has its own isolation, no daemon is started", async () => {
  await using machine = new Machine();
  const apart = shell("apart", "high", SAY, { isolation: "process" });
  const result = await machine.run([apart], { sharing: "mps" }, "--json");
  expect(reportOf(result).sharing).toEqual({ mode: "time-slice", daemon: null, pipe_directory: null });
  expect(said(result.stderr, "apart")["pipe"]).toMatch(new RegExp(`^${machine.path}/run/rigel-mps-\\d+-\\w+/none$`));
  expect(machine.told).toEqual([]);
  expect(machine.folders).toEqual([]);
});

test("a client whose own environment names a daemon is under that one", async () => {
  await using machine = new Machine();
  await machine.startDaemon();
  const its = { CUDA_MPS_PIPE_DIRECTORY: join(machine.path, "daemon") };
  machine.env["CUDA_MPS_PIPE_DIRECTORY"] = join(machine.path, "nothing");
  const clients = [shell("a", "high", SAY, { env: its }), shell("b", "high", SAY)];
  const result = await machine.run(clients, {}, "--json");
  expect(reportOf(result)).toMatchObject({ sharing: { mode: "time-slice" }, clients: [{ mps: true }, { mps: false }] });
  expect(said(result.stderr, "a")["pipe"]).toBe(its.CUDA_MPS_PIPE_DIRECTORY);
});

describe("clients that fail under MPS", () => {
  test("one after the other may have one cause, which is said with the log", async () => {
    await using machine = new Machine();
    const file = join(machine.path, "crashed");
    const clients = [shell("train", "best-effort", crash(file)), shell("serve", "high", later(file))];
    const result = await machine.run(clients, { sharing: "mps" }, "--json");
    const notes = reportOf(result).notes.join("\n");
    expect(notes).toMatch(
      /^train was the first to fail \(it was killed by SIGSEGV\), serve ended with status 7 \d+\.\d s later\. They shared/,
    );
    expect(notes).toContain("train may have ended the others");
    expect(notes).toContain('"isolation": "process"');
    expect(notes).toContain("server.log: [2026-01-01 00:00:01.000 Server 7] Client encountered a fatal exception");
    expect(result.status).toBe(139);
  });

  test.each([
    ["if only one does", {}, 0, later],
    ["if the others are not under MPS", { isolation: "process" }, 7, later],
    ["if the others have not used the GPU", {}, 7, after],
  ])("are not blamed on each other %s", async (_, more, status, script) => {
    await using machine = new Machine();
    const file = join(machine.path, "crashed");
    const clients = [shell("train", "best-effort", crash(file)), shell("serve", "high", script(file, status), more)];
    const report = reportOf(await machine.run(clients, { sharing: "mps" }, "--json"));
    expect(report.clients).toMatchObject([{ exit_code: 139 }, { exit_code: status }]);
    const notes = report.notes.join("\n");
    expect(notes).not.toContain("first to fail");
    expect(notes).toContain("Client encountered a fatal exception");
  });

  test("are not, where there is none", async () => {
    await using machine = new Machine();
    const file = join(machine.path, "crashed");
    const clients = [shell("train", "best-effort", crash(file)), shell("serve", "high", later(file))];
    const report = reportOf(await machine.run(clients, {}, "--json"));
    expect(report.notes).toEqual(["train was killed by SIGSEGV in phase: train + serve together, governed"]);
  });
});

test("--sharing is for the configuration's, and --mps for the simulated GPU alone", async () => {
  await using machine = new Machine();
  const shown = async (...flags: string[]): Promise<unknown> => {
    const { stdout, stderr, status } = await machine.run([train], { sharing: "mps" }, "--dry-run", "--json", ...flags);
    expect(status, stderr).toBe(0);
    return JSON.parse(stdout);
  };
  expect(await shown()).toMatchObject({ sharing: { mode: "mps", daemon: "private" }, mps: true });
  expect(await shown("--sharing", "time-slice")).toMatchObject({ sharing: { mode: "time-slice" }, mps: false });
  expect(await shown("--mps", "off")).toMatchObject({
    sharing: { mode: "mps" },
    notes: ["--mps has no effect on a real GPU; use --sharing"],
  });
  expect(await shown("--device", "simulated", "--sharing", "auto", "--mps", "on")).toMatchObject({
    sharing: { mode: "mps", daemon: null },
  });
  expect(await shown("--device", "simulated", "--mps", "off")).toMatchObject({
    sharing: { mode: "mps" },
    notes: ['--mps off has no effect, as sharing is "mps"'],
  });
  const refused = await machine.run([train], {}, "--sharing", "mig");
  expect(refused.stderr).toContain("Allowed choices are auto, time-slice, mps.");
  expect(refused).toMatchObject({ status: 2, stdout: "" });
});

describe("a configuration", () => {
  const own = { name: "a", class: "high", command: ["true"] };
  test.each([
    [
      { sharing: "time-slice", clients: [{ ...own, sm_percent: 50 }] },
      "clients[0].sm_percent: expected no share, as sharing",
    ],
    [
      { clients: [{ ...own, sm_percent: 50, isolation: "process" }] },
      "clients[0].sm_percent: expected no share, as isolation",
    ],
    [{ clients: [{ ...own, sm_percent: 0 }] }, "clients[0].sm_percent: expected a number of at least 1, got 0"],
    [{ clients: [{ ...own, sm_percent: 101 }] }, "clients[0].sm_percent: expected a number of at most 100, got 101"],
    [{ clients: [{ ...own, isolation: "none" }] }, 'clients[0].isolation: expected one of "shared", "process"'],
    [{ sharing: "mig", clients: [own] }, 'sharing: expected one of "auto", "time-slice", "mps"'],
  ])("%j is refused with its place", async (config, message) => {
    await using machine = new Machine();
    const path = machine.config([], { device: "simulated", ...config });
    await using child = start(["launch", path, "--dry-run"], { env: machine.env });
    expect(withoutPlaces(await child.stderr.text())).toContain(`rigel: ${path}: ${message}`);
    expect(await child.exited).toBe(2);
  });
});

describe("on the simulated GPU", () => {
  test.each([
    [{ sharing: "mps" }, "MPS", []],
    [{ simulated: { mps: true } }, "MPS", []],
    [{}, "time slices", []],
    [
      { sharing: "time-slice", simulated: { mps: true } },
      "time slices",
      ['simulated.mps has no effect, as sharing is "time-slice"'],
    ],
  ])("%j is %s, without a daemon", async (rest, words, notes) => {
    await using machine = new Machine();
    const config = [[serve, train], { device: "simulated", ...rest }] as const;
    const result = await machine.run([...config[0]], config[1], "--json");
    const report = reportOf(result);
    const mode = words === "MPS" ? "mps" : "time-slice";
    expect(report.sharing).toEqual({ mode, daemon: null, pipe_directory: null });
    expect(report.clients.map(({ mps }) => mps)).toEqual([mode === "mps", mode === "mps"]);
    expect(report.notes).toEqual(notes);
    expect((await machine.run([...config[0]], config[1])).stdout).toContain(` | ${words} | `);
    expect(machine.told).toEqual([]);
    expect(result.status).toBe(0);
  });

  test("a client that is to see all GPUs sees the simulated ones alone", async () => {
    await using machine = new Machine();
    const count = `${files.replay} --probe | tr , '\\n' | grep -c '"simulated":true'`;
    const all = shell("all", "high", count, { device: "all" });
    const result = await machine.run([all], { device: "simulated", simulated: { devices: 3 } });
    expect(result.stderr).toMatch(/^all *\| 3$/m);
    expect(result.status).toBe(0);
  });
});
