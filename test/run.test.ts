/** run.test.ts: `rigel run` and what changes running clients: set, pause, resume, ps, on the simulated GPU. */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import {
  closeSync,
  copyFileSync,
  fstatSync,
  mkdtempSync,
  openSync,
  readFileSync,
  readdirSync,
  rmSync,
  statSync,
  watch,
  writeFileSync,
} from "node:fs";
import { basename, join } from "node:path";
import { Segments } from "../src/discover.ts";
import { joinOrMake, removeLeft } from "../src/join.ts";
import { Native } from "../src/native.ts";
import { commandOf, environmentOf, living, startedAt_ticks, startedWith } from "../src/proc.ts";
import { Segment, segmentBytes } from "../src/segment.ts";
import { commandLine } from "../src/self.ts";
import { type Action, Controller, TICK_S } from "../src/slo.ts";
import { SloLoop } from "../src/slo-loop.ts";
import { readingOf, statsOf } from "../src/stats.ts";
import { threadsOf } from "../src/threads.ts";
import { root } from "./rigel.ts";
import { Place, until } from "./serving.ts";

let place: Place;
let replay: string;
beforeAll(async () => {
  place = new Place();
  replay = (await Native.load()).files.replay;
});
afterAll(() => place[Symbol.dispose]());

/** What `rigel ps` would show. */
async function ps() {
  const segments = new Segments(await Native.load(), place.segments);
  return segments.live().map((segment) => {
    const stats = statsOf(readingOf(segment));
    return { ...stats, clients: stats.clients.filter(({ state }) => state === "live") };
  });
}

/** The clients that have launched something, once all of these have. */
async function working(...names: string[]) {
  return await until(async () => {
    const [stats] = await ps();
    const found = names.map((name) => stats?.clients.find((one) => one.name === name && one.launches > 0));
    return stats && found.every((one) => one !== undefined) ? { stats, clients: found } : undefined;
  });
}

/** Until this process runs the control loop. */
const heldBy = (pid: number) => until(async () => ((await ps())[0]?.slo?.holder_pid === pid ? true : undefined));

async function client() {
  return (await ps())[0]?.clients.find(({ name }) => name === "train");
}

function run(kind: "high" | "best-effort", name: string, ...more: string[]) {
  const profile = join(place.path, "tiny.csv");
  const options = ["--device", "simulated", "--segment", place.segments, "--class", kind, "--name", name, ...more];
  return place.start(["run", ...options, "--", replay, "--profile", profile]);
}

/** A client that works and is killed, with its `rigel run`. */
async function trainKilled() {
  await using first = run("best-effort", "train");
  const { clients } = await working("train");
  const pid = clients[0]?.processes.find(({ state }) => state === "live")?.pid ?? 0;
  first.kill("SIGKILL");
  process.kill(pid, "SIGKILL");
  await first.exited;
  await until(() => (startedAt_ticks(pid) === undefined ? true : undefined));
}

const rigel = async (...args: string[]) => await place.rigel(...args, "--segment", place.segments);

describe("rigel run", () => {
  test("is the command: its arguments, output, input, exit status and signals; nothing is left", async () => {
    const sh = [
      "run",
      "--class",
      "best-effort",
      "--device",
      "simulated",
      "--segment",
      place.segments,
      "--",
      "sh",
      "-c",
    ];
    const status = await place.rigel(...sh, 'echo "$0 $1"; echo err >&2; exit 7', "a", "--class");
    expect(status).toMatchObject({ status: 7, stdout: "a --class\n" });
    expect(status.stderr).toMatch(/^err\nrigel: sh-\d+: was no client of Rigel: it ended with status 7/);
    await using goesOn = place.start([...sh, "sleep 600 <&- >&- 2>&- & echo $!"]);
    const [background, said] = await Promise.all([goesOn.stdout.text(), goesOn.stderr.text()]);
    process.kill(Number(background), "SIGKILL");
    expect(said).toMatch(
      /: is no client of Rigel so far: it ended with status 0 .* CUDA; what it has started runs on\n$/,
    );
    const waiting = place.start([...sh, "trap 'echo term; exit 3' TERM; echo ready; while :; do sleep 0.05; done"]);
    const reader = waiting.stdout.getReader();
    expect(new TextDecoder().decode((await reader.read()).value)).toBe("ready\n");
    waiting.kill("SIGTERM");
    expect(new TextDecoder().decode((await reader.read()).value)).toBe("term\n");
    expect(await waiting.exited).toBe(3);
    const missing = await place.rigel("run", "--class", "high", "--device", "simulated", "--", "no-such-program");
    expect(missing).toMatchObject({ status: 2, stdout: "" });
    expect(missing.stderr).toContain("the command: expected a program on PATH, no-such-program is not found");
    for (const [option, value] of [
      ["--memory", "1parsec"],
      ["--weight", "1000"],
      ["--name", "a/b"],
      ["--device", "99"],
    ] as const) {
      const refused = await place.rigel("run", "--class", "high", option, value, "--", "true");
      expect(refused.stderr).toMatch(new RegExp(`^rigel: rigel run: ${option}: (expected|there is no) `));
      expect(refused).toMatchObject({ stdout: "" });
    }
    expect(readdirSync(place.segments)).toEqual([]);
  });

  test("says that what has cleared its environment has no librigel.so", async () => {
    const options = ["--device", "simulated", "--segment", place.segments, "--class", "high", "--name", "bare"];
    let said = "";
    // It is looked at while it runs, five times a second or, on a busy machine, less often.
    for (let sleep_s = 1; sleep_s < 30 && !said.includes("not loaded"); sleep_s *= 2)
      said = (await place.rigel("run", ...options, "--", "env", "-i", "sleep", String(sleep_s))).stderr;
    expect(said).toMatch(
      /^rigel: bare: was no client of Rigel: it ended with .* CUDA; librigel.so is not loaded in it: /,
    );
  });

  test("a program that becomes another again and again has room as if it were one", async () => {
    const program = place.file(
      "becomes.py",
      `import ctypes, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
left = int(sys.argv[1])
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
done = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0)]
done += [cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), cuda.cuCtxSetCurrent(context)]
done += [cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(100 << 30))]
if any(done) or left == 0:
    print(left, done, flush=True)
    sys.stdin.read()
    sys.exit()
os.execv(sys.executable, [sys.executable, sys.argv[0], str(left - 1)])`,
    );
    const options = ["--device", "simulated", "--segment", place.segments, "--class", "high", "--name", "becomes"];
    // More often than a segment, or the simulated GPU, has room for processes.
    const argv = [...commandLine(), "run", ...options, "--", "python3", program, "70"];
    const pipes = { stdin: "pipe", stdout: "pipe", stderr: "pipe" } as const;
    await using child = Bun.spawn(argv, { cwd: place.path, env: place.env, ...pipes });
    const { value } = await child.stdout.getReader().read();
    expect(new TextDecoder().decode(value)).toBe("0 [0, 0, 0, 0, 0]\n");
    const [found] = (await ps())[0]?.clients ?? [];
    expect(found?.processes.map(({ state }) => state).toSorted()).toEqual(["dead", "live"]);
    child.stdin.end();
    expect({ stderr: await child.stderr.text(), status: await child.exited }).toEqual({ stderr: "", status: 0 });
  });

  test("finds its own process among those of the same name", async () => {
    const options = ["--device", "simulated", "--segment", place.segments, "--class", "high", "--name", "same", "-v"];
    const go = join(place.path, "go");
    const script = `echo ready; until [ -e ${go} ]; do sleep 0.05; done; "$0" "$@" & echo $!; wait`;
    const replays = [replay, "--profile", join(place.path, "tiny.csv"), "--iterations", "4000"];
    await using late = place.start(["run", ...options, "--", "sh", "-c", script, ...replays]);
    const reader = late.stdout.getReader();
    expect(new TextDecoder().decode((await reader.read()).value)).toBe("ready\n");
    expect((await place.rigel("run", ...options, "--", ...replays)).stderr).toContain("same: attached (process ");
    place.file("go", "");
    const pid = new TextDecoder().decode((await reader.read()).value).trim();
    expect((await late.stderr.text()).match(/same: attached.*/g)).toEqual([`same: attached (process ${pid})`]);
  });

  test("what it was started to ignore its command ignores, as under nohup", async () => {
    const command = ["--", "grep", "SigIgn", "/proc/self/status"];
    const options = ["run", "--class", "best-effort", "--device", "simulated", "--segment", place.segments, ...command];
    const ignores = async (trap: string): Promise<number> => {
      const argv = ["sh", "-c", `${trap}exec "$@"`, "sh", ...commandLine(), ...options];
      await using child = Bun.spawn(argv, { cwd: place.path, env: place.env, stdout: "pipe", stderr: "ignore" });
      return Number.parseInt((await child.stdout.text()).split(":")[1] ?? "", 16) & 0b111;
    };
    // SIGHUP is 1, SIGINT 2, SIGQUIT 3.
    expect([await ignores(""), await ignores("trap '' HUP; "), await ignores("trap '' HUP INT; ")]).toEqual([0, 1, 3]);
    // And has the environment that it would have: bash exports functions so.
    const odd = { ...place.env, "BASH_FUNC_module%%": "() { echo; }", "a.b": "1" };
    const argv = ["nohup", ...commandLine(), ...options.slice(0, -3), "env"];
    await using child = Bun.spawn(argv, { cwd: place.path, env: odd, stdout: "pipe", stderr: "ignore" });
    const given = (await child.stdout.text()).split("\n");
    expect(given).toEqual(expect.arrayContaining(["BASH_FUNC_module%%=() { echo; }", "a.b=1"]));
  });

  test("what it was started with open its command has open, as bash has it for <(command), and nothing else", async () => {
    const options = ["--class", "high", "--device", "simulated", "--segment", place.segments, "--"];
    const rigelRun = [...commandLine(), "run", ...options];
    place.file("given", "told\n");
    const outputs: string[] = [];
    for (const before of [[], rigelRun, ["nohup", ...rigelRun]]) {
      const command = [...before, "sh", "-c", "cat <&5; echo told >&7; ls /proc/self/fd"];
      const argv = ["sh", "-c", 'exec 5<given 7>taken; exec "$@"', "sh", ...command];
      const taken = place.file("taken", "");
      await using child = Bun.spawn(argv, { cwd: place.path, env: place.env, stdout: "pipe", stderr: "ignore" });
      outputs.push((await child.stdout.text()) + readFileSync(taken, "utf8"));
    }
    expect(outputs).toEqual(Array<string>(3).fill("told\n0\n1\n2\n3\n5\n7\ntold\n"));
  });

  test("what asks for something else than its end leaves it paused", async () => {
    const options = ["--device", "simulated", "--segment", place.segments, "--class", "best-effort", "--name", "train"];
    const script = `trap 'echo checkpoint' USR1; ${replay} --profile ${join(place.path, "tiny.csv")} & while :; do wait; done`;
    await using child = place.start(["run", ...options, "--", "sh", "-c", script]);
    const reader = child.stdout.getReader();
    const { stats } = await working("train");
    expect((await rigel("pause", "train")).status).toBe(0);
    child.kill("SIGUSR1");
    expect(new TextDecoder().decode((await reader.read()).value)).toContain("checkpoint");
    expect(await client()).toMatchObject({ paused: true });
    for (const { pid } of living().filter(
      (one) =>
        startedWith(one.pid, ["RIGEL_NAME=train", `RIGEL_SEGMENT=${stats.segment.path}`]) && one.pid !== child.pid,
    ))
      process.kill(pid, "SIGKILL");
    await child.exited;
  });

  test("while it is stopped, as by Ctrl-Z, another looks after the segment", async () => {
    // A job of a shell, which could let it go on: the kernel stops no others.
    const job = `import os, sys
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    os.execvp(sys.argv[1], sys.argv[1:])
print(pid, flush=True)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))`;
    const command = (name: string) => {
      const options = ["--device", "simulated", "--segment", place.segments, "--class", "best-effort", "--name", name];
      return [...commandLine(), "run", ...options, "--", replay, "--profile", join(place.path, "tiny.csv")];
    };
    const settings = { cwd: place.path, env: place.env, stdin: "ignore", stderr: "ignore" } as const;
    await using first = Bun.spawn(["python3", "-c", job, ...command("train")], { ...settings, stdout: "pipe" });
    const pid = Number(new TextDecoder().decode((await first.stdout.getReader().read()).value));
    await working("train");
    await using second = run("best-effort", "guest");
    await working("train", "guest");
    await heldBy(pid);
    process.kill(pid, "SIGTSTP");
    await heldBy(second.pid);
    process.kill(pid, "SIGCONT");
    second.kill("SIGTERM");
    await second.exited;
    await heldBy(pid);
    process.kill(pid, "SIGTERM");
    expect(await first.exited).toBe(0);
    // One that nobody could let go on does not stop.
    await using alone = Bun.spawn(command("train"), { ...settings, stdout: "ignore", detached: true });
    await working("train");
    await heldBy(alone.pid);
    alone.kill("SIGTSTP");
    await heldBy(alone.pid);
    alone.kill("SIGTERM");
    expect(await alone.exited).toBe(0);
    expect(readdirSync(place.segments)).toEqual([]);
  });

  test("a signal at any moment reaches the command, and nothing is left", async () => {
    const options = ["--class", "best-effort", "--device", "simulated", "--segment", place.segments];
    for (let time = 0; time < 5; time++) {
      await using early = place.start(["run", ...options, "--", "sleep", "600"]);
      // As soon as there is a segment, which is before there is a command.
      while (readdirSync(place.segments).length === 0) {
        expect(early.exitCode).toBeNull();
        await new Promise(setImmediate);
      }
      early.kill("SIGTERM");
      expect(await early.exited).toBe(143);
      expect(readdirSync(place.segments)).toEqual([]);
    }
  });

  test("in a terminal the command gets each signal once: Ctrl-C as early as may be, and what was sent to rigel run alone", async () => {
    const job = `import os, pty, signal, sys
folder, rigel = sys.argv[1], sys.argv[2:]
def start(*command):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(rigel[0], [*rigel, *command])
    return pid, terminal
said = b""
def hear(terminal, text=None):
    global said
    while text is None or text not in said:
        try:
            said += os.read(terminal, 1000)
        except OSError:
            return
def end(pid, terminal):
    hear(terminal)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
pid, terminal = start("sh", "-c", "n=0; trap 'n=$((n+1)); echo int $n' INT; trap 'echo quit' QUIT; trap 'exit 3' TERM; echo ready; while :; do sleep 0.05; done")
hear(terminal, b"ready")
os.kill(pid, signal.SIGINT)
hear(terminal, b"int 1")
os.kill(pid, signal.SIGQUIT)
hear(terminal, b"quit")
os.write(terminal, b"\\x03")
hear(terminal, b"int 2")
os.kill(pid, signal.SIGTERM)
end(pid, terminal)
print("int 3" if b"int 3" in said else "each once")
# As soon as there is a segment, which is before there is a command.
for time in range(5):
    pid, terminal = start("sleep", "600")
    while not any(name.endswith("-runsimulated") for name in os.listdir(folder)):
        pass
    os.write(terminal, b"\\x03")
    end(pid, terminal)`;
    using own = new Place();
    const options = ["--class", "best-effort", "--device", "simulated", "--segment", own.segments];
    const argv = ["python3", "-c", job, own.segments, ...commandLine(), "run", ...options, "--"];
    await using child = Bun.spawn(argv, { cwd: own.path, env: own.env, stdout: "pipe", stderr: "inherit" });
    expect((await child.stdout.text()).split("\n")).toEqual(["3", "each once", ...Array<string>(5).fill("130"), ""]);
    expect(readdirSync(own.segments)).toEqual([]);
  });

  test("gives the room of its segment back as it ends, though others have it mapped", async () => {
    await using first = run("best-effort", "train");
    const { stats } = await working("train");
    const file = openSync(stats.segment.path, "r");
    first.kill("SIGTERM");
    await first.exited;
    const { blocks } = fstatSync(file);
    closeSync(file);
    expect(blocks).toBeLessThan(100);
    expect(readdirSync(place.segments)).toEqual([]);
  });

  test("joins what runs; another looks after it when its maker ends; the last one takes it away", async () => {
    await using first = run("best-effort", "train", "--memory", "1GiB");
    await working("train");
    await using second = run("high", "serve");
    const { stats, clients } = await working("train", "serve");
    expect(stats.segment.id).toMatch(/^rigel-\d+-runsimulated$/);
    expect(clients).toMatchObject([
      { class: "best-effort", memory: { limit_bytes: 2 ** 30 } },
      { class: "high", memory: { limit_bytes: null } },
    ]);
    await until(async () => ((await ps())[0]?.slo?.holder_pid === first.pid ? true : undefined));
    const state = statSync(join(place.segments, `rigel-sim-${process.getuid?.() ?? 0}-run`));
    expect(state.size).toBe((await Native.load()).simulatedBytes);
    expect((await rigel("doctor", "--no-launch")).stdout).toContain(`none in ${place.segments}`);
    const other = await place.rigel(
      "run",
      "--class",
      "high",
      "--name",
      "train",
      "--device",
      "simulated",
      "--segment",
      place.segments,
      "--",
      "true",
    );
    expect(other).toMatchObject({ status: 2 });
    expect(other.stderr).toContain("a client train of that class runs already");
    first.kill("SIGTERM");
    expect(await first.exited).toBe(0);
    await until(async () => ((await ps())[0]?.slo?.holder_pid === second.pid ? true : undefined));
    expect((await ps())[0]?.clients).toMatchObject([{ name: "serve" }]);
    second.kill("SIGTERM");
    await second.exited;
    expect(readdirSync(place.segments)).toEqual([]);
  });

  test("who was killed together with its rigel run is no client any more, and its name is free for another class", async () => {
    const options = ["--device", "simulated", "--segment", place.segments, "--class", "high", "--name"];
    // Nobody who comes or goes says so meanwhile.
    await using other = place.start(["run", ...options, "other", "--", "sh", "-c", "echo ready; exec sleep 600"]);
    await other.stdout.getReader().read();
    await trainKilled();
    expect(await place.rigel("run", ...options, "train", "--", "true")).toMatchObject({ status: 0 });
    await trainKilled();
    await until(async () => ((await ps())[0]?.clients.length === 0 ? true : undefined));
    const refused = await rigel("pause", "train");
    expect(refused).toMatchObject({ status: 2, stderr: expect.stringContaining("there is no client") });
    other.kill("SIGTERM");
    await other.exited;
    expect(readdirSync(place.segments)).toEqual([]);
  });

  test("what killed ones have left is used again or taken away", async () => {
    await using first = run("best-effort", "train");
    const { clients } = await working("train");
    first.kill("SIGKILL");
    await first.exited;
    // The command goes on as a client.
    const pid = clients[0]?.processes[0]?.pid ?? 0;
    expect((await working("train")).clients[0]?.processes[0]?.pid).toBe(pid);
    process.kill(pid, "SIGKILL");
    // It may stay a zombie where nobody collects it.
    await until(() => (startedAt_ticks(pid) === undefined ? true : undefined));
    expect(await ps()).toEqual([]);
    await using second = run("best-effort", "again");
    expect((await working("again")).stats.clients).toHaveLength(1);
    second.kill("SIGTERM");
    await second.exited;
    expect(readdirSync(place.segments)).toEqual([]);
  });

  test("what killed ones have left is removed by any launch and run, once nobody can be using it", async () => {
    using own = new Place();
    const native = await Native.load();
    const uid = process.getuid?.() ?? 0;
    const options = ["--class", "best-effort", "--device", "simulated", "--segment", own.segments, "--"];
    await using killed = own.start(["run", ...options, "sleep", "600"]);
    const pathOf = (name: string): string => join(own.segments, `rigel-${uid}-${name}`);
    const path = pathOf("runsimulated");
    const command = await until(
      () => living().find(({ pid, name }) => name === "sleep" && startedWith(pid, [`RIGEL_SEGMENT=${path}`]))?.pid,
    );
    killed.kill("SIGKILL");
    await killed.exited;
    const segment = Segment.open(native, path);
    await until(() => (segment.quiet_ms > 10_000 ? true : undefined));
    const here = (): string[] => {
      removeLeft(native, own.segments);
      return readdirSync(own.segments).toSorted();
    };
    const kept = [`rigel-${uid + 1}-run0badbeef`, `rigel-${uid}-runother`];
    copyFileSync(path, join(own.segments, kept[0] ?? ""));
    own.file(`segments/${kept[1]}`, "of another version");
    const left = [...kept, `rigel-${uid}-runsimulated`].toSorted();
    // Its command lives, and may become a client.
    expect(here()).toEqual(left);
    process.kill(command, "SIGKILL");
    await until(() => (startedAt_ticks(command) === undefined ? true : undefined));
    // Somebody has joined.
    const leave = segment.lock("member");
    expect(leave).toBeFunction();
    expect(here()).toEqual(left);
    leave?.();
    own.file(`segments/rigel-sim-${uid}-run`, "");
    const old = join(own.path, "old");
    copyFileSync(path, old);
    const config = own.file("short.json", own.pair({ duration_s: 0.1 }));
    // It is started to be a client of another one, of the same name.
    const elsewhere = own.file(`rigel-${uid}-runsimulated`, "");
    await using _ = Bun.spawn(["sleep", "600"], { env: { ...own.env, RIGEL_SEGMENT: elsewhere } });
    // Above the largest number that Linux gives a process; the other one's maker looks for GPUs still.
    const [probed, probing] = [4194305, process.pid].map((pid) => `rigel-sim-${uid}-${pid}-0`);
    own.file(`segments/${probing}`, "");
    kept.push(String(probing));
    for (const args of [
      ["launch", config, "--segment", own.segments],
      ["run", ...options, "true"],
    ]) {
      copyFileSync(old, pathOf("run0badbeef"));
      own.file(`segments/${probed}`, "");
      expect(await own.rigel(...args)).toMatchObject({ status: 0 });
      expect(readdirSync(own.segments).toSorted()).toEqual(kept.toSorted());
    }
  });

  test("the simulated GPU that is there decides what a share of its memory is, whatever --preset says", async () => {
    const native = await Native.load();
    /** A launch on one, and what a command is told that joins it. */
    async function joining(simulated: string, ...more: string[]) {
      using own = new Place();
      const config = own.file("pair.json", own.pair({ simulated: { preset: simulated } }));
      await using launch = own.start(["launch", config, "--duration", "600", "--segment", own.segments]);
      const drained = launch.stderr.text();
      const segments = new Segments(native, own.segments);
      await until(() => (segments.live()[0]?.slots().length === 2 ? true : undefined));
      const options = ["--device", "simulated", "--segment", own.segments, "--class", "best-effort", "--name", "guest"];
      const asked = [...options, "--memory", "25%", "-v", ...more];
      const { stdout, stderr } = await own.rigel("run", ...asked, "--", "printenv", "RIGEL_MEMORY");
      launch.kill("SIGINT");
      await drained;
      return { gib: Math.round(Number(stdout) / 2 ** 30), said: stderr };
    }
    const [l4, h200] = [6, 35]; // a quarter
    const none = "rigel: note: --preset";
    const smaller = await joining("l4");
    expect(smaller.gib).toBe(l4);
    expect(smaller.said).toContain("guest: NVIDIA L4 (simulated), joins");
    expect(smaller.said).not.toContain(none);
    const larger = await joining("h200", "--preset", "l4");
    expect(larger.gib).toBe(h200);
    expect(larger.said).toContain("guest: NVIDIA H200 (simulated), joins");
    expect(larger.said).toContain(`${none} l4 has no effect: NVIDIA H200 (simulated) is there already\n`);
    const same = await joining("l4", "--preset", "l4");
    expect(same.gib).toBe(l4);
    expect(same.said).not.toContain(none);
  });

  test("that of a real GPU leaves the state of the simulated one alone", async () => {
    using own = new Place();
    const native = await Native.load();
    const uid = process.getuid?.() ?? 0;
    const state = own.file(`segments/rigel-sim-${uid}-run`, "");
    const device = {
      index: 0,
      name: "NVIDIA H200",
      uuid: "GPU-0badbeef-0000-0000-0000-000000000000",
      simulated: false,
      sms: 132,
      memory_bytes: 1,
      exclusive: false,
    };
    const enter = async () =>
      await joinOrMake(native, new Segments(native, own.segments), own.segments, device, "h200");
    (await enter()).leave();
    expect(readdirSync(own.segments)).toEqual([basename(state)]);
    // Left by a process that was killed.
    const made = JSON.stringify(join(own.segments, `rigel-${uid}-run0badbeef`));
    const make = `Segment.create(await Native.load(), ${made}); process.kill(process.pid, "SIGKILL")`;
    const [load, segment] = ["native", "segment"].map((name) => JSON.stringify(join(root, "src", `${name}.ts`)));
    const script = `import { Native } from ${load}; import { Segment } from ${segment}; ${make}`;
    await Bun.spawn([process.execPath, "-e", script]).exited;
    expect(readdirSync(own.segments)).toHaveLength(2);
    (await enter()).leave();
    expect(readdirSync(own.segments)).toEqual([basename(state)]);
  });

  test("joins a launch, and goes on when that has ended", async () => {
    const config = place.file("pair.json", place.pair());
    await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    const said = launch.stderr.text();
    await working("serve", "train");
    await using joined = run("best-effort", "guest");
    const { stats } = await working("serve", "train", "guest");
    expect(stats.segment.creator_pid).toBe(launch.pid);
    launch.kill("SIGINT");
    await launch.exited;
    const after = await until(async () => {
      const [left] = await ps();
      return left?.clients.length === 1 && left.slo?.holder_pid === joined.pid ? left : undefined;
    });
    expect(after, await said).toMatchObject({ settings: { shutdown: 0 }, clients: [{ name: "guest", state: "live" }] });
    joined.kill("SIGTERM");
    await joined.exited;
    expect(readdirSync(place.segments)).toEqual([]);
  });
});

test("who has joined a launch goes on with its segment when that is killed, and takes it away", async () => {
  await using launch = place.start(["launch", place.file("pair.json", place.pair()), "--segment", place.segments]);
  await working("serve", "train");
  await using joined = run("best-effort", "guest");
  const { stats } = await working("serve", "train", "guest");
  launch.kill("SIGKILL");
  await launch.exited;
  // Its guard is the last to go.
  const isGuarded = () =>
    living().some(({ pid }) => commandOf(pid).includes(stats.segment.path) && pid !== process.pid);
  await until(() => (isGuarded() ? undefined : true));
  expect(await ps()).toMatchObject([{ segment: { path: stats.segment.path }, clients: [{ name: "guest" }] }]);
  joined.kill("SIGTERM");
  await joined.exited;
  expect(readdirSync(place.segments)).toEqual([]);
});

test("who has joined a launch that is killed as it ends its clients is governed again", async () => {
  const deaf = `trap '' INT TERM; ${replay} --profile ${join(place.path, "tiny.csv")} & wait; sleep 600`;
  const clients = [{ name: "deaf", class: "best-effort", command: ["sh", "-c", deaf] }];
  const config = place.file("deaf.json", { device: "simulated", clients });
  await using launch = place.start(["launch", config, "--segment", place.segments]);
  await working("deaf");
  await using joined = run("best-effort", "guest");
  const { stats } = await working("deaf", "guest");
  const [segment] = new Segments(await Native.load(), place.segments).live();
  launch.kill("SIGINT");
  await until(() => (segment?.settings()["shutdown"] === 1 ? true : undefined));
  // Or it would have ended them after 5 s, in which a busy machine may not let the other one look.
  launch.kill("SIGSTOP");
  await heldBy(joined.pid);
  expect(segment?.settings()["shutdown"]).toBe(1);
  launch.kill("SIGKILL");
  await launch.exited;
  await until(() => (segment?.settings()["shutdown"] === 0 ? true : undefined));
  // Both killed: what is left goes with whoever comes next, once nobody can be using it.
  joined.kill("SIGKILL");
  await joined.exited;
  for (const { pid } of living().filter((one) => startedWith(one.pid, [`RIGEL_SEGMENT=${stats.segment.path}`])))
    process.kill(pid, "SIGKILL");
  const native = await Native.load();
  await until(() => {
    removeLeft(native, place.segments);
    return readdirSync(place.segments).length === 0 ? true : undefined;
  });
});

/** The processes that were started to be clients of what is in a folder. */
const startedIn = (folder: string) =>
  living().filter(({ pid }) => environmentOf(pid)["RIGEL_SEGMENT"]?.startsWith(`${folder}/`));

test("what a command has left running becomes a client though the command has ended before", async () => {
  using own = new Place();
  const script = `(until [ -e go ]; do sleep 0.05; done; exec ${replay} --profile tiny.csv) > left.txt 2>&1 & exit 3`;
  const options = ["--class", "best-effort", "--name", "late", "--device", "simulated", "--segment", own.segments];
  const ran = await own.rigel("run", ...options, "--", "sh", "-c", script);
  expect(ran).toMatchObject({ status: 3, stderr: expect.stringContaining("is no client of Rigel so far") });
  const segments = new Segments(await Native.load(), own.segments);
  try {
    // Nobody is to remove it meanwhile.
    const told = (await own.rigel("doctor", "--no-launch", "--segment", own.segments)).stdout;
    expect(told).toContain(`none in ${own.segments}`);
    own.file("go", "");
    const name = await until(() => {
      const left = readFileSync(join(own.path, "left.txt"), "utf8");
      return left || segments.live().flatMap((segment) => segment.slots().map((slot) => slot.name))[0];
    });
    expect(name).toBe("late");
  } finally {
    for (const { pid } of startedIn(own.segments)) process.kill(pid, "SIGKILL");
  }
});

test("what a command has left running in a launch goes on with its segment when that has ended", async () => {
  using own = new Place();
  await using launch = own.start(["launch", own.file("pair.json", own.pair()), "--segment", own.segments]);
  const said = Promise.all([launch.stdout.text(), launch.stderr.text()]);
  const segments = new Segments(await Native.load(), own.segments);
  const names = () =>
    segments.live().flatMap((segment) => segment.slots().flatMap((slot) => (slot.finished ? [] : slot.name)));
  await until(() => (names().length === 2 ? true : undefined));
  const options = ["--class", "best-effort", "--name", "left", "--device", "simulated", "--segment", own.segments];
  const script = `${replay} --profile tiny.csv > /dev/null 2>&1 & exit 0`;
  expect((await own.rigel("run", ...options, "--", "sh", "-c", script)).status).toBe(0);
  try {
    await until(() => (names().includes("left") ? true : undefined));
    launch.kill("SIGINT");
    expect(await launch.exited, (await said)[1]).toBe(130);
    expect(names()).toEqual(["left"]);
    expect(segments.live()[0]?.settings()).toMatchObject({ shutdown: 0 });
  } finally {
    for (const { pid } of startedIn(own.segments)) process.kill(pid, "SIGKILL");
  }
});

test("who has joined one phase of a launch and ends in another leaves nothing of the first", async () => {
  // The first phase ends once somebody has joined it, however long that takes.
  const go = join(place.path, "next-phase");
  const script = `until [ -e ${go} ]; do sleep 0.05; done`;
  const clients = [
    { name: "serve", class: "high", command: ["sh", "-c", script] },
    { name: "train", class: "best-effort", command: [replay, "--profile", join(place.path, "tiny.csv")] },
  ];
  const config = place.file("compared.json", { device: "simulated", compare: true, clients });
  await using launch = place.start(["launch", config, "--segment", place.segments]);
  const said = Promise.all([launch.stdout.text(), launch.stderr.text()]);
  await until(async () => ((await ps()).length === 1 ? true : undefined));
  await using joined = run("best-effort", "guest");
  const { stats } = await working("guest");
  writeFileSync(go, "");
  await until(async () => ((await ps()).some(({ segment }) => segment.path !== stats.segment.path) ? true : undefined));
  joined.kill("SIGTERM");
  await joined.exited;
  launch.kill("SIGINT");
  await launch.exited;
  expect(readdirSync(place.segments), (await said)[1]).toEqual([]);
});

test("the control loop marks who comes and who goes, and when", async () => {
  await using train = run("best-effort", "train");
  await working("train");
  const [segment] = new Segments(await Native.load(), place.segments).live();
  if (!segment) throw new Error("no segment");
  const loop = new SloLoop(segment, { p99_over_alone: 1.05 });
  loop.tick(TICK_S);
  await using guest = run("best-effort", "guest");
  await working("train", "guest");
  loop.tick(TICK_S);
  loop.tick(TICK_S);
  guest.kill("SIGTERM");
  await guest.exited;
  loop.tick(TICK_S);
  loop.pause();
  // Not train, which was there before.
  expect(loop.report().marks).toEqual([
    { t_s: 0.2, client: "guest", what: "joins" },
    { t_s: 0.4, client: "guest", what: "leaves" },
  ]);
  train.kill("SIGTERM");
  await train.exited;
});

test("who waits for another client's turn does nothing until the loop says so no more, or nothing more at all", async () => {
  class Told extends Controller {
    ticks: number | undefined;
    override step(): Action {
      return { settings: undefined, hold: false, waits: new Map(this.ticks ? [["train", this.ticks]] : []) };
    }
  }
  await using train = run("best-effort", "train");
  await using guest = run("best-effort", "guest");
  await working("train", "guest");
  const [segment] = new Segments(await Native.load(), place.segments).live();
  if (!segment) throw new Error("no segment");
  const slotOf = (name: string) => {
    const slot = segment.slots().find((one) => one.name === name);
    if (!slot) throw new Error(`no ${name}`);
    return slot;
  };
  // At the gate, or for what it has on the GPU.
  const isWaiting = (name: string): boolean =>
    threadsOf(segment, slotOf(name)).some(({ waiting }) => /^(wait_turn|suspended)$/.test(waiting?.operation ?? ""));
  const goesOn = async (name: string) => {
    const before = segment.work(slotOf(name)).launches;
    await until(() => (segment.work(slotOf(name)).launches > before + 100 ? true : undefined));
  };
  const target = { p99_over_alone: 1.05 };
  const controller = new Told(target);
  const loop = new SloLoop(segment, target, controller);
  loop.tick(TICK_S);
  for (const ends of [
    () => loop.tick(TICK_S),
    () => loop.pause(),
    // As if it had been killed.
    () => undefined,
  ]) {
    controller.ticks = 6000;
    // On a busy machine more than once: what a loop says holds for as long as it is seen to run.
    await until(() => {
      loop.tick(TICK_S);
      return isWaiting("train") ? true : undefined;
    });
    await goesOn("guest");
    expect(isWaiting("guest")).toBe(false);
    controller.ticks = 1;
    loop.tick(TICK_S);
    controller.ticks = undefined;
    ends();
    await goesOn("train");
  }
  for (const child of [train, guest]) child.kill("SIGTERM");
});

/** The settings, once so many launches may be in flight. */
const inflight = async (is: number) =>
  await until(async () => {
    const settings = (await ps())[0]?.settings;
    return settings?.["inflight"] === is ? settings : undefined;
  });

test("another policy gets back what slo has moved, but for what is set with it", async () => {
  // The loop moves nothing before there are requests.
  const options = ["--class", "best-effort", "--device", "simulated", "--segment", place.segments];
  await using idle = place.start(["run", ...options, "--", "sleep", "600"]);
  const before = await inflight(8);
  await using serve = run("high", "serve");
  expect(before).toMatchObject({ inflight: 8, suspend: 1, corun: 0 });
  // A high client alone is where slo begins: with fewer launches in flight than its policy has.
  await inflight(4);
  await rigel("set", "policy", "name=priority");
  // The loop may be in the middle of a move, which it then takes back.
  await until(async () => {
    const after = { ...(await ps())[0]?.settings, hold_until_ms: 0 };
    return Bun.deepEquals(after, { ...before, policy: 1 }) ? after : undefined;
  });
  // Another target is another loop, which finds settings that its predecessor has moved.
  await rigel("set", "policy", "name=slo");
  await inflight(4);
  await rigel("set", "policy", "target.p99_over_alone=1.2");
  await Bun.sleep(300);
  await rigel("set", "policy", "name=priority");
  await inflight(8);
  await rigel("set", "policy", "name=slo");
  await inflight(4);
  // What is asked for stands, also where slo had just that.
  await rigel("set", "policy", "name=priority", "inflight=4");
  await Bun.sleep(300);
  // But for a move that it was in the middle of, which it takes back.
  const asked = { policy: 1, inflight: 4, slice_us: before["slice_us"] };
  await until(async () => Bun.deepMatch(asked, (await ps())[0]?.settings ?? {}) || undefined);
  for (const one of [serve, idle]) one.kill("SIGTERM");
  await Promise.all([serve.exited, idle.exited]);
});

test("a launch reports what was in force at its end, what was changed meanwhile, and what slo did until it was left", async () => {
  const config = place.file("pair.json", place.pair());
  await using launch = place.start(["launch", config, "--json", "--duration", "600", "--segment", place.segments]);
  const said = launch.stderr.text();
  const { stats } = await working("serve", "train");
  await rigel("set", "policy", "name=priority", "inflight=3", "min_share=0.2", "suspend=false");
  await rigel("set", "train", "weight=2", "memory=1GiB");
  await rigel("pause", "train");
  launch.kill("SIGINT");
  const report = JSON.parse(await launch.stdout.text());
  expect(report, await said).toMatchObject({
    device: { uuid: stats.devices[0]?.uuid },
    policy: { name: "priority", inflight: 3, min_share: 0.2, suspend: false },
    slo: { target: { p99_over_alone: 1.05 }, seconds: expect.any(Array) },
    notes: [
      "policy slo was planned and changed to priority meanwhile",
      "inflight was changed from 8 to 3 meanwhile",
      "suspend was changed from true to false meanwhile",
      "min_share was changed from 0.05 to 0.2 meanwhile",
      "train: its weight was changed from 1 to 2 meanwhile",
      "train: its memory limit was changed from none to 1.00 GiB meanwhile",
      "train: was paused meanwhile",
    ],
  });
  await launch.exited;
});

test("a folder of segments that is not there is an error, and named", async () => {
  const missing = join(place.path, "missing");
  for (const args of [
    ["ps"],
    ["top", "--once"],
    ["contexts"],
    ["trace"],
    ["serve"],
    ["set", "train", "weight=2"],
    ["pause", "train"],
  ]) {
    const { status, stdout, stderr } = await place.rigel(...args, "--segment", missing);
    expect(stderr, args.join(" ")).toMatch(/^rigel: --segment: expected a .*, got .*\/missing\n$/);
    expect({ status, stdout }).toEqual({ status: 2, stdout: "" });
  }
  const made = ["run", "--class", "high", "--device", "simulated", "--segment", missing, "--", "true"];
  const { status, stderr } = await place.rigel(...made);
  expect(stderr).toContain("choose a folder that exists and can be written to with --segment DIR");
  expect(status).toBe(1);
});

test("a segment has no other name while it is made, under which who is killed meanwhile would leave it", async () => {
  const folder = mkdtempSync("/dev/shm/rigel-test-");
  try {
    const native = await Native.load();
    const seen = new Set<string | null>();
    const { promise: over, resolve } = Promise.withResolvers<void>();
    const watcher = watch(folder, (event, name) => {
      // Of what is written to files that have no name it tells, too, but not that they come.
      if (event === "rename") seen.add(name);
      if (name === "end") resolve();
    });
    Segment.create(native, join(folder, "segment"));
    writeFileSync(join(folder, "end"), "");
    await over;
    watcher.close();
    expect([...seen]).toEqual(["segment", "end"]);
  } finally {
    rmSync(folder, { recursive: true });
  }
});

test("what is no segment where one would be made is named, with what to do, and left there", async () => {
  using own = new Place();
  const path = join(own.segments, `rigel-${process.getuid?.() ?? 0}-runsimulated`);
  const size = segmentBytes(await Native.load());
  for (const [make, why] of [
    ["umask 077; echo >", "was made by another version"],
    [`umask 077; truncate -s ${size}`, "is not a version"],
    ["umask 022; touch", "is open to other users (mode 0644, expected 0600)"],
    ["mkdir", "Is a directory"],
    ["mkfifo", "is not a regular file"],
    ["ln -s /missing/file", "symbolic links"],
  ] as const) {
    expect(await Bun.spawn(["sh", "-c", `${make} "$0"`, path]).exited).toBe(0);
    const command = ["run", "--class", "high", "--device", "simulated", "--segment", own.segments, "--", "true"];
    const { status, stderr } = await own.rigel(...command);
    expect(stderr).toMatch(
      /^rigel: no segment can be made .*; remove that once nothing uses it, or .* --segment DIR\n$/,
    );
    expect(stderr).toContain(path);
    expect(stderr).toContain(why);
    expect(status).toBe(1);
    expect(readdirSync(own.segments)).toEqual([basename(path)]);
    rmSync(path, { recursive: true });
  }
});

describe("running clients", () => {
  test("change class, memory and weight, are paused and go on, and keep what was set", async () => {
    await using train = run("best-effort", "train");
    await working("train");
    const set = await rigel("set", "train", "class=high", "memory=2GiB", "weight=3", "--json");
    expect(JSON.parse(set.stdout)).toMatchObject({
      changed: [{ client: "train", notes: ["train: weight has no effect under policy slo, only under fair"] }],
    });
    expect(set.stderr).toContain("note: train: weight has no effect under policy slo, only under fair");
    await until(async () => {
      const now = await client();
      return now?.class === "high" && now.weight === 3 ? true : undefined;
    });
    expect(await client()).toMatchObject({ memory: { limit_bytes: 2 ** 31 } });
    const refused = await rigel("pause", "train");
    expect(refused.stderr).toContain("never held back");
    expect(refused.status).toBe(2);
    // Far more nanoseconds than there is room for: it ended at any time.
    const tooLong = await rigel("pause", "train", "--for", "1e20");
    expect(tooLong.stderr).toContain("Expected a number above 0, up to 1000000000.");
    expect(tooLong.status).toBe(2);
    await rigel("set", "train", "class=best-effort", "memory=none");
    await until(async () => ((await client())?.class === "best-effort" ? true : undefined));
    expect(await client()).toMatchObject({ memory: { limit_bytes: null } });

    const table = await rigel("pause", "train");
    expect(table.stdout).toBe("train is paused until it is resumed\n");
    // Nothing more is launched once those that were under way have gone.
    const still = await until(async () => {
      const before = (await client())?.launches ?? 0;
      await Bun.sleep(300);
      return (await client())?.launches === before ? before : undefined;
    });
    const { segments } = JSON.parse((await rigel("ps", "--json")).stdout);
    expect(segments[0]).toMatchObject({ schema: 1, clients: [{ name: "train", paused: true }] });
    expect((await rigel("ps")).stdout).toMatch(/^train +best-effort +paused/m);
    const resumed = await rigel("resume", "train", "--json");
    expect(JSON.parse(resumed.stdout)).toMatchObject({
      schema: 1,
      changed: [{ client: "train", text: "train goes on" }],
    });
    await until(async () => (((await client())?.launches ?? 0) > still + 10 ? true : undefined));
    expect(await client()).toMatchObject({ paused: false });
    // A paused program ends when it is asked to.
    await rigel("pause", "train");
    await until(async () => ((await client())?.paused ? true : undefined));
    train.kill("SIGTERM");
    expect(await train.exited).toBe(0);
  });

  test("keep the memory that they have below a limit that is less, which is said", async () => {
    const profile = join((await Native.load()).files.profiles, "h200-mobilenetv2-infer-bs4.csv");
    const options = ["--device", "simulated", "--segment", place.segments, "--class", "best-effort", "--name", "train"];
    await using train = place.start(["run", ...options, "--", replay, "--profile", profile]);
    await until(async () => (((await client())?.memory.used_bytes ?? 0) > 1 ? true : undefined));
    const set = await rigel("set", "train", "memory=1");
    expect(set.stderr).toMatch(/^rigel: note: train: has \S+ \w+ already, which it keeps; it gets no more until/m);
    expect(set.stderr).toMatch(/^rigel: note: train: a memory limit of 1 B leaves CUDA libraries no room to work; /m);
    expect((await rigel("set", "train", "memory=1GiB")).stderr).toBe("");
    train.kill("SIGTERM");
    await train.exited;
  });

  test("keep what was set also in processes that come later, which is said", async () => {
    await using train = run("best-effort", "train", "--memory", "2GiB");
    await working("train");
    const more = async (...options: string[]) => {
      await using another = run("best-effort", "train", ...options);
      const attached = await until(async () => {
        const found = await client();
        return found?.processes.filter(({ state }) => state === "live").length === 2 ? found : undefined;
      });
      another.kill("SIGTERM");
      await another.exited;
      return { limit_bytes: attached.memory.limit_bytes, stderr: await another.stderr.text() };
    };
    // Nothing was set yet: the latest one says how much.
    expect(await more("--memory", "3GiB", "--weight", "2")).toEqual({
      limit_bytes: 3 * 2 ** 30,
      stderr: "rigel: note: train: weight has no effect under policy slo, only under fair\n",
    });
    await rigel("set", "train", "memory=1GiB");
    expect(await more("--memory", "3GiB")).toEqual({
      limit_bytes: 2 ** 30,
      stderr: "rigel: note: train: keeps what was set for it while it ran: a memory limit of 1.00 GiB\n",
    });
    await rigel("set", "train", "memory=none");
    expect((await more("--memory", "3GiB")).limit_bytes).toBeNull();
    expect((await more()).stderr).toBe("");
    await rigel("pause", "train");
    expect((await more()).stderr).toBe(
      "rigel: note: train: is paused, as it was before; `rigel resume train` lets it go on\n",
    );
    train.kill("SIGTERM");
    await train.exited;
  });

  test("are told of as those of their processes are that have not ended", async () => {
    const once = ["--profile", join(place.path, "tiny.csv"), "--iterations", "3"];
    await using train = run("best-effort", "train");
    await working("train");
    const options = ["--device", "simulated", "--segment", place.segments, "--class", "best-effort", "--name", "train"];
    expect((await place.rigel("run", ...options, "--", replay, ...once)).status).toBe(0);
    expect((await client())?.processes.map(({ state }) => state)).toEqual(["live", "ended"]);
    const [segment] = new Segments(await Native.load(), place.segments).live();
    if (!segment) throw new Error("no segment");
    await rigel("set", "train", "class=high", "weight=3");
    // The process takes it up a moment later, the weight last.
    await until(() => segment.slots().find((slot) => !slot.finished && segment.read(slot).weight === 3));
    expect(await client()).toMatchObject({ class: "high", weight: 3 });
    train.kill("SIGTERM");
    await train.exited;
  });

  test("change policy, and what is wrong is said without changing anything", async () => {
    await using train = run("best-effort", "train");
    await working("train");
    const changed = await rigel("set", "policy", "name=priority", "inflight=3", "min_share=2E-1", "suspend=FALSE");
    expect(changed.status).toBe(0);
    expect((await ps())[0]).toMatchObject({
      policy: "priority",
      settings: { inflight: 3, min_share_ppm: 200_000, suspend: 0 },
    });
    await rigel("set", "policy", "name=slo", "target.p99_ms=12.5");
    await until(async () => ((await ps())[0]?.slo?.target ? true : undefined));
    // The control loop moves that by itself.
    const moved = await rigel("set", "policy", "inflight=3");
    expect(moved.stderr).toBe(
      "rigel: note: policy.inflight: policy slo moves it itself; what was set is what another policy will have\n",
    );
    expect((await ps())[0]).toMatchObject({ policy: "slo", slo: { target: { p99_ms: 12.5 } } });
    for (const [wrong, why] of [
      [["policy", "inflight=x"], "inflight: expected a number"],
      [["policy", "inflight=01"], 'inflight: expected a number, got "01"'],
      [["policy", "infligt=1"], "infligt: unknown field"],
      [["policy", "name=orion"], "needs every client's profile"],
      [["train", "class=low"], "class: expected one of"],
      [
        ["train", "memory=1parsec"],
        'memory: expected a size such as "40GiB" or "512MiB", a number of bytes, or "none"',
      ],
      [
        ["train", "memory=30%"],
        'memory: expected a size such as "40GiB" or "512MiB", a number of bytes, or "none", got 30%',
      ],
      [["policy", "sm_threshold=3"], "sm_threshold: expected a field that can be changed"],
      [["nobody", "class=high"], "there is no client"],
      [["train", "class"], "expected FIELD=VALUE"],
      [["train", "__proto__=1"], "__proto__: unknown field; expected one of class, memory, weight"],
      [["train", "weight=2", "weight=7"], "weight is given twice"],
      [["policy", "target.p99_ms=9", "target.p99_ms=8"], "target.p99_ms is given twice"],
      [["policy", "target.p99_over_alone.p99=1.5"], "target"],
    ] as const) {
      const { status, stderr, stdout } = await rigel("set", ...wrong);
      expect(stderr).toContain(why);
      expect({ status, stdout }).toEqual({ status: 2, stdout: "" });
    }
    expect((await ps())[0]).toMatchObject({ policy: "slo", slo: { target: { p99_ms: 12.5 } } });
    train.kill("SIGTERM");
    await train.exited;
  });
});
