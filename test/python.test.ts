/**
 * python.test.ts: `import rigel`: thread clients, requests and streams of Python programs, under Rigel and without it.
 */

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { describe, expect, test } from "bun:test";
import { z } from "zod";
import { processContextsSchema } from "../src/contexts.ts";
import { Segments } from "../src/discover.ts";
import { Native } from "../src/native.ts";
import { readingOf, statsOf } from "../src/stats.ts";
import { Scratch, plainEnvironment, rigel, root, start } from "./rigel.ts";
import { until } from "./serving.ts";

const python = Bun.which("python3");
if (python === null) console.warn("python.test.ts: there is no python3, so `import rigel` is not tested");

const program = join(root, "test", "fixtures", "threads.py");

const countsSchema = z.object({
  name: z.string(),
  class: z.enum(["high", "best-effort"]),
  processes: z.number(),
  devices: z.array(z.number()),
  launches: z.number(),
  iterations: z.number().nullable(),
  gate: z.object({ waits: z.number() }),
});
const reportSchema = z.object({
  clients: z.array(
    z.object({
      name: z.string(),
      exit_code: z.number().nullable(),
      launches: z.number(),
      threads: z.array(countsSchema).optional(),
    }),
  ),
});

const traceSchema = z.object({ clients: z.array(z.object({ name: z.string(), recorded: z.number() })) });

/** Launches the program in one of its ways; what each of its clients did, by name. */
async function launched(way: string, client: object = {}, more: object = {}) {
  using scratch = new Scratch();
  const config = scratch.file("jobs.json", {
    policy: { name: "priority", preempt: false },
    device: "simulated",
    clients: [{ name: "program", class: "best-effort", command: [python, program, way], ...client }],
    ...more,
  });
  const result = await rigel("launch", config, "--json");
  expect(result.status, result.stderr).toBe(0);
  const [own] = reportSchema.parse(JSON.parse(result.stdout)).clients;
  return {
    stderr: result.stderr,
    own: own?.launches,
    threads: Object.fromEntries((own?.threads ?? []).map(({ name, ...counts }) => [name, counts])),
  };
}

/** What the program printed as `returned`. */
function returnedIn(stderr: string): unknown {
  const line = stderr.split("\n").find((one) => one.includes('"returned"')) ?? "";
  return z.object({ returned: z.unknown() }).parse(JSON.parse(line.slice(line.indexOf("{")))).returned;
}

describe.skipIf(python === null)("import rigel", () => {
  test("counts each client apart, by context manager and decorator", async () => {
    const { own, threads } = await launched("count");
    expect(own).toBe(7);
    expect(threads["fast"]).toMatchObject({ class: "high", launches: 20, iterations: 20, processes: 1, devices: [0] });
    expect(threads["slow"]).toMatchObject({ class: "best-effort", launches: 33, iterations: 2 });
  });

  test("a thread that is no client passes through where only threads are clients", async () => {
    const { own, threads } = await launched("count", { threads: true });
    expect(own).toBe(0);
    expect(threads["fast"]?.launches).toBe(20);
  });

  test("a thread that holds Python's lock never waits for a high client of its own process", async () => {
    // With a bound of ten minutes, a launch that waited would be waiting still.
    const { threads } = await launched(
      "lock",
      {},
      { policy: { name: "priority", preempt: false, starvation_us: 600_000_000 } },
    );
    expect(threads["slow"]).toMatchObject({ launches: 20, gate: { waits: 0 } });
  });

  test("gives a client a stream of its own in PyTorch, and waits at both ends", async () => {
    const { stderr } = await launched("torch");
    const returned = returnedIn(stderr);
    const within = ["2 waits for 1", "current 2", "body", "current 1", "1 waits for 2"];
    expect(returned).toEqual(["make 2", ...within, ...within, "body", "make 3", "current 3", "body", "current 1"]);
  });

  test("of a pool of streams that goes round no two clients get the same, and who ends gives its own back", async () => {
    const { stderr } = await launched("pool");
    // 1 stream of the trainer's, 40 threads of the server's on the other 31.
    expect(returnedIn(stderr)).toEqual([1, 40, 0, 32, 0]);
  });

  test("four ranks on four devices: each client on its rank's device", async () => {
    const shell = `for r in 0 1 2 3; do LOCAL_RANK=$r ${python} ${program} ranks & done; wait`;
    const { own, threads } = await launched("", { command: ["sh", "-c", shell] }, { simulated: { devices: 4 } });
    expect(own).toBe(0);
    for (const stage of [0, 1, 2, 3])
      expect(threads[`stage-${stage}`]).toMatchObject({ launches: 100, devices: [0, 1, 2, 3] });
  });

  test("what goes past Rigel is not counted", async () => {
    const { own, stderr } = await launched("bypass", { class: "high" });
    expect(own).toBe(2);
    expect(returnedIn(stderr)).toEqual([true, true]);
    expect(stderr).not.toContain("cannot bypass");
  });

  test("a best-effort client does not get past Rigel, and is warned", async () => {
    const { own, stderr } = await launched("bypass");
    expect(own).toBe(8);
    expect(returnedIn(stderr)).toEqual([false, false]);
    expect(stderr).toContain(
      "rigel: cannot bypass Rigel: the process has a best-effort client, or the policy holds high clients back",
    );
  });

  test.each([
    ["of its own", "alternate"],
    ["over a connection", "answer"],
  ])(
    "workload.py --alternate: of each two requests %s one goes past Rigel, and the log says which",
    async (_, part) => {
      const { own, stderr } = await launched(part, { class: "high" });
      const past = z.array(z.boolean()).parse(returnedIn(stderr));
      expect(past).toHaveLength(40);
      const firsts = past.filter((_past, index) => index % 2 === 0);
      expect(past.filter((_past, index) => index % 2 === 1)).toEqual(firsts.map((first) => !first));
      expect(new Set(firsts).size).toBe(2);
      // Three to warm up, and twenty of the forty.
      expect(own).toBe(23);
      using scratch = new Scratch();
      const config = scratch.file("jobs.json", {
        device: "simulated",
        clients: [{ name: "program", class: "best-effort", command: [python, program, part] }],
      });
      const refused = await rigel("launch", config);
      expect(refused.stderr).toContain("workload: --alternate: Rigel cannot be bypassed here");
      expect(refused.status).not.toBe(0);
    },
  );

  test("clients of several processes' threads are told apart, whatever their names", async () => {
    using scratch = new Scratch();
    const names = ["one", "two"];
    const command = [python, program, "named"];
    const config = scratch.file("jobs.json", {
      policy: { name: "priority" },
      device: "simulated",
      clients: names.map((name) => ({ name, class: "best-effort", command, threads: true })),
    });
    await using launch = start(["launch", config, "--json", "--segment", scratch.path]);
    const ask = async (...args: string[]) => await rigel(...args, "--segment", scratch.path);
    const segments = new Segments(await Native.load(), scratch.path);
    const clients = () =>
      new Map(
        segments
          .live()
          .flatMap((segment) => statsOf(readingOf(segment)).clients)
          .map((client) => [client.name, client]),
      );
    const all = ["one", "one/part/0", "one/two", "two", "two/part/0", "two/two"];
    const working = () => {
      const found = clients();
      const threads = all.filter((name) => name.includes("/"));
      return threads.every((name) => (found.get(name)?.launches ?? 0) > 0) ? found : undefined;
    };
    expect([...(await until(working)).keys()].toSorted()).toEqual(all);
    for (const name of ["one/part/0", "two"]) expect(await ask("pause", name)).toMatchObject({ status: 0 });
    expect(await ask("set", "two/part/0", "class=high")).toMatchObject({ status: 0 });
    const after = await until(() => {
      const found = clients();
      return found.get("two/part/0")?.class === "high" ? found : undefined;
    });
    expect(all.filter((name) => after.get(name)?.paused)).toEqual(["one/part/0", "two"]);
    expect(all.filter((name) => after.get(name)?.class === "high")).toEqual(["two/part/0"]);
    // Whoever is not paused goes on.
    await until(() => {
      const found = clients();
      const more = ["one/two", "two/two"].every(
        (name) => (found.get(name)?.launches ?? 0) > (after.get(name)?.launches ?? 0),
      );
      return more || undefined;
    });
    const refused = await ask("set", "one/two", "memory=1GiB");
    expect(refused.stderr).toBe(
      "rigel: one/two is of threads, whose memory is their process's; `rigel set one memory=…` limits that\n",
    );
    expect(refused.status).toBe(2);
    launch.kill("SIGINT");
    const { notes } = z.object({ notes: z.array(z.string()) }).parse(await launch.stdout.json());
    expect(notes.filter((note) => note.includes("meanwhile")).toSorted()).toEqual([
      "one/part/0: was paused meanwhile",
      "two/part/0: its class was changed to high meanwhile",
      "two: was paused meanwhile",
    ]);
  });

  test("rigel contexts says where each thread works, what was called, and what was used in a wrong context", async () => {
    using scratch = new Scratch();
    const config = scratch.file("jobs.json", {
      policy: { name: "none" },
      device: "simulated",
      simulated: { devices: 2 },
      clients: [{ name: "program", class: "best-effort", command: [python, program, "confused"] }],
    });
    await using launch = start(["launch", config, "--json", "--segment", scratch.path]);
    const look = async () => {
      const { stdout } = await rigel("contexts", "program", "--json", "--segment", scratch.path);
      return z.object({ processes: z.array(processContextsSchema) }).safeParse(JSON.parse(stdout || "{}")).data
        ?.processes[0];
    };
    // What it does last, before it waits to be stopped.
    const found = await until(async () => {
      const seen = await look();
      return seen?.thread_clients[0]?.calls["cuLaunchKernel"] === 1 ? seen : undefined;
    });
    const text = await rigel("contexts", "--segment", scratch.path);
    const named = await Promise.all(
      ["own", "program/own", "program/other"].map((name) => rigel("contexts", name, "--segment", scratch.path)),
    );
    launch.kill("SIGINT");
    const [stderr, report] = await Promise.all([launch.stderr.text(), launch.stdout.text()]);
    expect(found, stderr).toMatchObject({
      client: "program",
      devices: [{ index: 0 }, { index: 1 }],
      contexts: [{ device: 0 }, { device: 1 }],
      contexts_full: false,
      moves: 1,
      misuses: { count: 1, last: [{ call: "cuStreamSynchronize", result: 400, belongs_to: "destroyed" }] },
      thread_clients: [{ name: "own", devices: [1], calls: { cuLaunchKernel: 1 } }],
    });
    expect(found.threads.find(({ tid }) => tid === found.pid)).toMatchObject({ moves: 1, device: 1 });
    expect(text.stdout).toContain("cuStreamSynchronize in thread");
    expect(text.stdout).not.toContain("not shown");
    expect(named.map(({ status }) => status)).toEqual([0, 0, 2]);
    expect(named.map(({ stdout }) => stdout.includes("  client own: best-effort"))).toEqual([true, true, false]);
    expect(named[2]?.stderr).toContain("there is no client or process program/other; there is program, program/own");
    expect(report).toContain("launched on another device than in its request before");
  });

  test("rigel trace of a client that a thread has entered is that of its process", async () => {
    using scratch = new Scratch();
    const command = [python, program, "named"];
    const clients = ["one", "two"].map((name) => ({ name, class: "best-effort", command, threads: true }));
    const config = scratch.file("jobs.json", { device: "simulated", clients });
    await using launch = start(["launch", config, "--segment", scratch.path]);
    const path = join(scratch.path, "trace.json");
    const trace = async (client: string) => {
      const { stdout } = await rigel("trace", client, "-o", path, "--json", "--segment", scratch.path);
      return traceSchema.safeParse(JSON.parse(stdout || "{}")).data?.clients;
    };
    await until(async () => await trace("one/part/0"));
    await until(async () => (await trace("one"))?.find(({ recorded }) => recorded > 0));
    const traced = await trace("one/part/0");
    launch.kill("SIGINT");
    await launch.exited;
    expect(traced?.map(({ name }) => name)).toEqual(["one"]);
    expect(readFileSync(path, "utf8")).toContain('"call":"cuLaunchKernel"');
  });

  test("rigel contexts says what it has no room for: threads, contexts", async () => {
    using scratch = new Scratch();
    const config = scratch.file("jobs.json", {
      device: "simulated",
      clients: [{ name: "program", class: "best-effort", command: [python, program, "crowd"] }],
    });
    await using launch = start(["launch", config, "--segment", scratch.path]);
    const look = async (...flags: string[]) =>
      (await rigel("contexts", "program", "--segment", scratch.path, ...flags)).stdout;
    const found = await until(async () => {
      const { processes } = z
        .object({ processes: z.array(processContextsSchema).default([]) })
        .parse(JSON.parse((await look("--json")) || "{}"));
      return processes.find((one) => one.calls["cuLaunchKernel"] === 70);
    });
    const text = await look();
    launch.kill("SIGINT");
    await launch.exited;
    // The main thread is one of those that have room.
    expect([found.threads.length, found.threads_lost]).toEqual([64, 7]);
    expect(text).toContain("threads that are not shown, for want of room: 7\n");
    expect([found.contexts.length, found.contexts_full]).toEqual([8, true]);
    expect(text).toContain("  more contexts, which are not shown for want of room\n");
  });

  test.each([
    ["count", [30, 3]],
    ["bypass", [false, false]],
  ])("does nothing without Rigel: %s", async (way, returned) => {
    using scratch = new Scratch();
    await using child = Bun.spawn([python ?? "", program, way], {
      env: {
        ...plainEnvironment(),
        PYTHONPATH: join(root, "src", "python", "importable"),
        LD_LIBRARY_PATH: join(root, "native", "build", "sim"),
        RIGEL_SIM_STATE: join(scratch.path, "gpu"),
      },
      stdout: "pipe",
      stderr: "inherit",
    });
    expect(JSON.parse(await child.stdout.text())).toEqual({ returned, active: false });
    expect(await child.exited).toBe(0);
  });
});
