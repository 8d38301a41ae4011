/** top.test.ts: what `rigel top` shows of hand-made data, and the command on running launches: in a terminal and in a pipe. */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { z } from "zod";
import { commandLine } from "../src/self.ts";
import { stateOf } from "../src/show.ts";
import { processTable } from "../src/process-table.ts";
import { type ClientStats, type Stats, statsSchema } from "../src/stats.ts";
import { keysIn } from "../src/terminal.ts";
import { pressed } from "../src/top.ts";
import { type Screen, type View, render, rowsOf } from "../src/top-view.ts";
import { Scratch, TINY_PROFILE, plainEnvironment, start } from "./rigel.ts";
import { until as eventually } from "./serving.ts";

/* ---- Hand-made data */

const guard = {
  mode: null,
  null_handle: 0,
  wrong_context: 0,
  no_context: 0,
  in_use_elsewhere: 0,
  foreign_stream: 0,
  create_failed: 0,
  create_retried: 0,
  repaired: 0,
  events: [],
};
const requests = { count: 60, p50_ms: 2.328, p95_ms: 3.79, p99_ms: 4.561, source: "busy-period" as const };
const rates: NonNullable<ClientStats["rates"]> = {
  interval_s: 1,
  launches_per_s: 14_057.2,
  requests_per_s: 60.04,
  requests,
  iterations_per_s: null,
  copies_per_s: 0,
  gate_waits_per_s: 0,
  gate_wait_ms_per_s: 0,
  inflight_waits_per_s: 0,
  inflight_wait_ms_per_s: 0,
  suspensions_per_s: 0,
  suspended_ms_per_s: 0,
  charged_ms_per_s: 0,
  guard_repaired_per_s: 0,
};
const serve: ClientStats = {
  name: "serve",
  class: "high",
  state: "live",
  paused: false,
  devices: [0],
  attached_ms: 1000,
  first_launch_ms: 1100,
  ended_ms: null,
  processes: [
    {
      slot: 0,
      pid: 4711,
      state: "live",
      attached_ms: 1000,
      first_launch_ms: 1100,
      ended_ms: null,
      heartbeat_age_ms: 100,
    },
  ],
  weight: 1,
  counted_s: 4,
  launches: 50_000,
  launches_per_s: 12_500,
  graph_launches: 0,
  copies: 0,
  memsets: 0,
  requests,
  iterations: null,
  iterations_per_s: null,
  gate: {
    waits: 0,
    wait_ms: 0,
    inflight_waits: 0,
    inflight_wait_ms: 0,
    starved: 0,
    shared: 0,
    unprofiled: 0,
    graphs_cut: 0,
    graph_pieces: 0,
    graphs_whole: 0,
    graph_whole_reason: null,
  },
  charged_ms: 0,
  preemption: { state: "on", suspensions: 0, suspended_ms: 0, slow_calls: 0, stays: 0, ahead: 0, foreseen: 0 },
  guard,
  gate_waits: { p50_ms: null, p95_ms: null, p99_ms: null },
  durations: { seeded: 0, samples: 0 },
  memory: { limit_bytes: null, used_bytes: 2.4 * 2 ** 20, peak_bytes: 0, denied: 0 },
  gpu_share: 0.0712,
  rates,
};
const train: ClientStats = {
  ...serve,
  name: "train",
  class: "best-effort",
  memory: { limit_bytes: 40 * 2 ** 30, used_bytes: 12 * 2 ** 30, peak_bytes: 0, denied: 0 },
  gpu_share: 1,
  rates: {
    ...rates,
    launches_per_s: 99.4,
    requests_per_s: 22.8,
    requests: { ...requests, p50_ms: 42.71, p99_ms: 178.4 },
    gate_wait_ms_per_s: 600,
    inflight_wait_ms_per_s: 76,
    suspended_ms_per_s: 253,
  },
};
const stats: Stats = {
  schema: 1,
  at: "2026-01-01T00:00:00.000Z",
  at_ms: 95_000,
  segment: {
    id: "rigel-0-42-0",
    path: "/dev/shm/rigel-0-42-0",
    creator_pid: 42,
    created_ms: 1000,
    capacity: 64,
    processes: 2,
    refused: 0,
    overwritten: 0,
  },
  policy: "slo",
  settings: { inflight: 8, stale_ms: 1000 },
  slo: null,
  devices: [{ index: 0, uuid: "GPU-1", name: "NVIDIA H200", high_busy: false }],
  clients: [serve, train],
};
const view: View = {
  segments: [stats],
  folder: "/dev/shm",
  interval_s: 1,
  sort: "attached",
  selected: undefined,
  help: false,
  notice: "",
};
const file: Screen = { width: 160, height: Number.POSITIVE_INFINITY, colour: false, keys: false };
const terminal: Screen = { width: 80, height: 24, colour: true, keys: true };

function withClients(...clients: ClientStats[]): View {
  return { ...view, segments: [{ ...stats, clients }] };
}

describe("the picture", () => {
  test("has every column where there is room", () => {
    expect(render(view, file)).toEqual([
      "rigel top: 1 launch, 2 clients, over 1 s",
      "",
      "NVIDIA H200 | policy slo, 8 in flight | launch 42, 1 min 34 s",
      "  CLIENT  CLASS  STATE    LAUNCH/S  REQ/S  P50 ms  P95 ms  P99 ms  GPU%  WAIT%  OFF%   MEM  LIMIT    PID",
      "  serve   high   running     14057   60.0    2.33    3.79    4.56   7.1    0.0   0.0  2.4M      -   4711",
      "  train   best   running      99.4   22.8    42.7    3.79     178   100   67.6  25.3   12G    40G   4711",
    ]);
  });

  test("fits 80 columns and 24 lines, and any other size", () => {
    const many = withClients(
      ...Array.from({ length: 40 }, (_, index) => ({ ...train, name: `a-rather-long-name-of-client-${index}` })),
    );
    for (const width of [1, 20, 40, 79, 80, 81, 100, 132, 300])
      for (const height of [1, 2, 5, 24, 60]) {
        const lines = render(many, { ...terminal, width, height });
        expect(lines.length).toBeLessThanOrEqual(height);
        const helped = render({ ...many, help: true }, { ...terminal, width, height });
        for (const line of [...lines, ...helped]) expect(Bun.stringWidth(line)).toBeLessThanOrEqual(width);
      }
    expect(render(view, { ...file, width: 80 })[3]).toBe(
      "  CLIENT CLASS STATE   LAUNCH/S REQ/S P50 ms P99 ms GPU% WAIT% OFF%  MEM   PID",
    );
    expect(render(withClients({ ...train, name: "resnet50-infer" }), { ...file, width: 80 })[4]).toBe(
      "  resnet50-infer best  running     99.4  22.8   42.7    178  100  67.6 25.3  12G",
    );
  });

  test("is coloured only where that is wanted", () => {
    expect(render(view, terminal).join("")).toContain("\u001b[");
    expect(render({ ...view, selected: "rigel-0-42-0 train" }, { ...terminal, colour: false }).join("")).not.toContain(
      "\u001b",
    );
  });

  test("says that nothing runs, or that nobody has attached", () => {
    expect(render({ ...view, segments: [] }, file)).toEqual([
      "rigel top: 0 launches, 0 clients, over 1 s",
      "",
      "  Nothing runs under Rigel: there is no live launch of this user in /dev/shm.",
    ]);
    expect(render(withClients(), file)).toContain("  no client has attached yet");
  });

  test("shows what is not known as such, and a share of nothing as that", () => {
    const fresh = withClients({ ...serve, gpu_share: null, rates: null });
    expect(render(fresh, file)[4]).toMatch(/^ {2}serve +high +new( +-){7} +2\.4M +4711$/);
    expect(render(withClients({ ...serve, gpu_share: 0 }), file)[4]).toMatch(/ 4\.56 +0\.0 +0\.0 +0\.0 +2\.4M /);
    expect(render(withClients({ ...serve, gpu_share: null }), file)[4]).toMatch(/ 4\.56 +- +0\.0 +0\.0 +2\.4M /);
  });

  test("turns red a p99 over the target", () => {
    const slo = {
      target: { p99_over_alone: 1.05 },
      holder_pid: 42,
      alone: { requests: 50, p50_ms: 2, p99_ms: 4 },
      over_alone: { requests: 60, p50: 1.012, p99: 1.04 },
      now: { requests: 50, p50_ms: 2, p99_ms: 4 },
      rung: 0,
      changes: 0,
      held_s: 0.5,
      unreachable: false,
    };
    const missed = render({ ...view, segments: [{ ...stats, slo }] }, terminal);
    expect(missed[2]).toContain("p99 target 4.20 ms, delayed x1.01 x1.04");
    expect(missed.find((line) => line.includes("serve"))).toContain("\u001b[31m  4.56\u001b[0m");
    const met = { ...slo, target: { p99_ms: 5 } };
    expect(render({ ...view, segments: [{ ...stats, slo: met }] }, terminal).join("")).not.toContain("\u001b[31m");
  });

  test("never lets a name move the cursor", () => {
    const lines = render(withClients({ ...serve, name: "a\u001b[2Jb\r\n" }), file);
    expect(lines[4]).toStartWith("  a?[2Jb??  high");
  });

  test("keeps the marked client in sight", () => {
    const clients = Array.from({ length: 40 }, (_, index) => ({ ...train, name: `client-${index}` }));
    const shown = render(
      { ...withClients(...clients), selected: "rigel-0-42-0 client-30" },
      { ...terminal, height: 12 },
    );
    expect(shown.map((line) => Bun.stripANSI(line)).filter((line) => line.startsWith("> client-30 "))).toHaveLength(1);
  });

  test.each<[string, Partial<ClientStats>]>([
    ["running", {}],
    ["idle", { rates: { ...rates, launches_per_s: 0, requests_per_s: 0 } }],
    ["starting", { first_launch_ms: null }],
    ["paused", { paused: true }],
    ["stopped", { processes: serve.processes.map((one) => ({ ...one, heartbeat_age_ms: 5000 })) }],
    ["ended", { state: "ended" }],
    ["killed", { state: "dead" }],
  ])("calls a client %s", (word, changed) => {
    expect(stateOf({ ...serve, ...changed }, stats)).toBe(word);
    // rigel ps, which looks only once.
    const kept = ["paused", "stopped", "ended"].includes(word) ? word : word === "killed" ? "dead" : "live";
    const table = processTable([{ ...stats, clients: [{ ...serve, ...changed }] }]);
    expect(table).toMatch(new RegExp(`^serve +high +${kept} `, "m"));
  });
});

test("rigel ps names the first of a client's processes, and how many more there are", () => {
  const [one] = serve.processes;
  if (!one) throw new Error("no process");
  const pidsOf = (count: number, ended = 0, state = serve.state): string | undefined => {
    const processes = Array.from({ length: count }, (_, i) => ({
      ...one,
      pid: 100 + i,
      state: i < ended ? ("ended" as const) : one.state,
    }));
    const table = processTable([{ ...stats, clients: [{ ...serve, processes, state }] }]);
    return /^serve +high +\w+ +(.*?)  /m.exec(table)?.[1];
  };
  expect([1, 4, 5, 64].map((count) => pidsOf(count))).toEqual([
    "100",
    "100,101,102,103",
    "100,101,102 and 2 more",
    "100,101,102 and 61 more",
  ]);
  // Those that have ended are none of them, unless all have.
  expect([pidsOf(6, 5), pidsOf(2, 2, "ended")]).toEqual(["105", "100,101"]);
});

describe("keys", () => {
  test("are taken apart", () => {
    expect(keysIn("q\u001b[A\u001bOBh\u0003")).toEqual(["q", "up", "down", "h", "interrupt"]);
    expect(keysIn("\u001b[5~x")).toEqual(["\u001b[5~", "x"]);
  });

  test("sort, with what has ended last", () => {
    const ended = { ...serve, name: "old", state: "ended" as const };
    const names = (sort: View["sort"]): string[] =>
      rowsOf({ segments: withClients(ended, serve, train).segments, sort }).map(({ client }) => client.name);
    expect(names("attached")).toEqual(["serve", "train", "old"]);
    expect(names("p99")).toEqual(["train", "serve", "old"]);
    expect(names("launches")).toEqual(["serve", "train", "old"]);
    expect(names("gpu")).toEqual(["train", "serve", "old"]);
    expect(pressed(view, "s").sort).toBe("name");
  });

  test("mark a client, which stays marked when the order changes", () => {
    const one = pressed(view, "down");
    expect(one.selected).toBe("rigel-0-42-0 serve");
    expect(pressed(one, "up").selected).toBe(one.selected);
    const two = pressed(pressed(one, "down"), "down");
    expect(two.selected).toBe("rigel-0-42-0 train");
    expect(pressed({ ...two, sort: "p99" }, "up").selected).toBe("rigel-0-42-0 train");
    expect(pressed({ ...view, segments: [] }, "down").selected).toBeUndefined();
  });
});

/* ---- The command */

const running = (lines: string[]): boolean => lines.some((line) => /serve +high +running/.test(line));

const isNarrow = (lines: string[]): boolean => lines.every((line) => Bun.stringWidth(line) <= 30);

/** What a terminal shows of what was written to it: it does not wrap lines, so after the last column the cursor stays in it. */
function shownOn(cols: number, rows: number, text: string): string[] {
  const screen = Array.from({ length: rows }, () => Array.from({ length: cols }, () => " "));
  let [row, column] = [0, 0];
  const clear = (line: number, from: number): unknown => screen[line]?.fill(" ", from);
  for (const [one] of text.matchAll(/\u001b\[[?\d;]*[A-Za-z]|[\s\S]/gu)) {
    const line = screen[row];
    if (one === "\u001b[H") [row, column] = [0, 0];
    else if (one === "\r") column = 0;
    else if (one === "\n") row = Math.min(rows - 1, row + 1);
    else if (one === "\u001b[K" || one === "\u001b[J") {
      clear(row, column);
      if (one === "\u001b[J") for (let below = row + 1; below < rows; below++) clear(below, 0);
    } else if (!one.startsWith("\u001b") && line) {
      line[column] = one;
      column = Math.min(cols - 1, column + 1);
    }
  }
  return screen.map((line) => line.join("").trimEnd());
}

describe("the command", () => {
  let scratch: Scratch;
  let launched: ReturnType<typeof start>;

  beforeAll(async () => {
    scratch = new Scratch();
    scratch.file("tiny.csv", TINY_PROFILE);
    const config = scratch.file("jobs.json", {
      device: "simulated",
      clients: [
        { name: "serve", class: "high", replay: { profile: "tiny.csv", rate_per_s: 50 } },
        { name: "train", class: "best-effort", replay: { profile: "tiny.csv" } },
      ],
    });
    launched = start(["launch", config, "--duration", "600", "--segment", scratch.path]);
    const decoder = new TextDecoder();
    let said = "";
    for await (const chunk of launched.stderr) {
      said += decoder.decode(chunk);
      if (said.includes("counting for")) break;
    }
  });
  afterAll(async () => {
    launched.kill("SIGTERM");
    await launched.exited;
    scratch[Symbol.dispose]();
  });

  async function top(...args: string[]): Promise<{ stdout: string; status: number }> {
    await using child = start(["top", "--segment", scratch.path, "--interval", "0.3", ...args]);
    const [stdout, status] = await Promise.all([child.stdout.text(), child.exited]);
    return { stdout, status };
  }

  test("--once prints one plain table", async () => {
    // On a machine that is busy with something else either may do nothing for all of an interval, or seem to be stopped.
    const { stdout, status } = await eventually(async () => {
      const one = await top("--once");
      const isAtWork = /^ {2}serve +high +running/m.test(one.stdout) && !/^ {2}train +best +stopped/m.test(one.stdout);
      return isAtWork ? one : undefined;
    });
    expect(stdout).toMatch(/^rigel top: 1 launch, 2 clients, over 0\.3 s\n\nNVIDIA H200 \(simulated\) \| policy slo/);
    expect(stdout).toMatch(/^ {2}serve +high +running +[1-9]/m);
    // It may be held for all of the interval: policy slo learns what the other takes alone.
    expect(stdout).toMatch(/^ {2}train +best +(running|idle) +\d/m);
    expect(stdout).not.toContain("\u001b");
    expect(status).toBe(0);
  });

  test("--once --json prints one document", async () => {
    // Either may be held for all of an interval: policy slo learns what the other takes alone.
    const working = new Set<string>();
    while (working.size < 2) {
      const { stdout } = await top("--once", "--json");
      const document = z
        .object({ schema: z.literal(1), interval_s: z.literal(0.3), segments: z.array(statsSchema) })
        .parse(JSON.parse(stdout));
      const clients = document.segments[0]?.clients ?? [];
      // In the order in which they attached.
      expect(clients.map(({ name }) => name).toSorted()).toEqual(["serve", "train"]);
      for (const { name, rates: own } of clients) if ((own?.launches_per_s ?? 0) > 0) working.add(name);
    }
    expect([...working].toSorted()).toEqual(["serve", "train"]);
  });

  test("in a pipe goes on until nobody reads, and then ends by itself", async () => {
    const command = `"$0" "$@" | head -n 20`;
    const program = [...commandLine(), "top", "--segment", scratch.path];
    const child = Bun.spawn(["bash", "-c", `${command}; echo "\${PIPESTATUS[0]}"`, ...program, "--interval", "0.1"], {
      env: plainEnvironment(),
      stdout: "pipe",
      stderr: "inherit",
    });
    const text = await child.stdout.text();
    expect(text.match(/^rigel top: 1 launch/gm)?.length).toBeGreaterThan(1);
    expect(text.trimEnd().split("\n").at(-1)).toBe("0");
  });

  test("of an empty folder says so", async () => {
    using empty = new Scratch();
    await using child = start(["top", "--once", "--interval", "0.1", "--segment", empty.path]);
    expect(await child.stdout.text()).toContain(`no live launch of this user in ${empty.path}.`);
    expect(await child.exited).toBe(0);
  });

  test("goes by COLUMNS where that is a width, and by its own where it is none", async () => {
    using empty = new Scratch();
    const columns = async (width: string): Promise<string> => {
      const args = ["top", "--once", "--interval", "0.1", "--segment", empty.path];
      await using child = start(args, { env: { COLUMNS: width } });
      return await child.stdout.text();
    };
    const [usual, few] = [await columns(""), await columns("20")];
    expect(few.split("\n").every((line) => line.length <= 20)).toBe(true);
    expect(few).not.toBe(usual);
    expect([await columns("-5"), await columns("wide")]).toEqual([usual, usual]);
  });

  test("refuses an interval that makes no sense", async () => {
    await using child = start(["top", "--interval", "0"]);
    expect(await child.stderr.text()).toContain("Expected a number from 0.1 to 3600.");
    expect(await child.exited).toBe(2);
  });

  /** `rigel top` in a terminal of its own. */
  function inTerminal(env: Record<string, string | undefined> = {}) {
    let seen = "";
    const changed = { resolve: (): void => undefined };
    const args = ["top", "--segment", scratch.path, "--interval", "0.1"];
    const child = Bun.spawn([...commandLine(), ...args], {
      env: { ...plainEnvironment(), NO_COLOR: undefined, TERM: "xterm-256color", ...env },
      terminal: {
        cols: 80,
        rows: 24,
        data: (_, bytes) => {
          seen += new TextDecoder().decode(bytes);
          changed.resolve();
        },
      },
    });
    const { terminal: pty } = child;
    if (!pty) throw new Error("no terminal");
    /** The picture in place, line by line. */
    const picture = (): string[] => Bun.stripANSI(seen.slice(seen.lastIndexOf("\u001b[H"))).split(/\r+\n/);
    return {
      child,
      pty,
      picture,
      all: () => seen,
      /** Waits until a picture fulfils a condition; the last of what the program has written may come after its end. */
      until: async (condition: (lines: string[]) => boolean): Promise<string[]> => {
        while (!condition(picture())) {
          const { promise, resolve } = Promise.withResolvers<void>();
          changed.resolve = resolve;
          await promise;
        }
        return picture();
      },
    };
  }
  const LEAVE = "\u001b[?7h\u001b[?25h\u001b[?1049l";

  test("in a terminal updates in place, obeys keys and sizes, and gives the terminal back", async () => {
    const { child, pty, until, all } = inTerminal();
    const before = pty.localFlags;
    expect((await until(running))[0]).toBe("rigel top: 1 launch, 2 clients, over 0.1 s");
    expect(pty.localFlags).not.toBe(before);
    pty.write("h");
    await until((lines) => lines.some((line) => line.includes("Ctrl-C     quit")));
    pty.write("hs\u001b[B");
    await until(
      (lines) => lines.some((line) => line.startsWith("> serve")) && (lines.at(-1) ?? "").includes("s sort (name)"),
    );
    // One of class high is never held back; the other goes on when the key is pressed again.
    pty.write("p");
    await until((lines) => (lines.at(-1) ?? "").startsWith("serve is of class high"));
    pty.write("\u001b[Bp");
    await until((lines) => lines.some((line) => /^> train +best +paused/.test(line)));
    pty.write("p");
    await until((lines) => lines.some((line) => /^> train +best +(running|idle)/.test(line)));
    pty.resize(40, 8);
    await until((lines) => lines.length <= 8 && lines.every((line) => Bun.stringWidth(line) <= 40) && running(lines));
    expect(all()).toStartWith("\u001b[?1049h");
    pty.write("q");
    expect(await child.exited).toBe(0);
    await until(() => all().endsWith(LEAVE));
    expect(pty.localFlags).toBe(before);
  });

  test.each<["SIGTERM" | "SIGQUIT" | "SIGINT" | "\u0003", number]>([
    ["SIGTERM", 143],
    ["SIGQUIT", 131],
    ["SIGINT", 0],
    ["\u0003", 0],
  ])("gives the terminal back on %j", async (how, status) => {
    const { child, pty, until, all } = inTerminal();
    const before = pty.localFlags;
    await until((lines) => lines.some((line) => line.includes("serve")));
    if (how === "\u0003") pty.write(how);
    else child.kill(how);
    expect(await child.exited).toBe(status);
    await until(() => all().endsWith(LEAVE));
    expect(pty.localFlags).toBe(before);
  });

  test("shows that a line was cut, and nothing of what was there before", async () => {
    const { child, pty, until, all } = inTerminal();
    pty.resize(30, 8);
    await until((lines) => isNarrow(lines) && running(lines));
    pty.write("h");
    await until((lines) => isNarrow(lines) && lines.some((line) => line.includes("q, Ctrl-C")));
    pty.write("h");
    await until((lines) => isNarrow(lines) && running(lines) && (lines.at(-1) ?? "").startsWith("q quit"));
    pty.write("q");
    await child.exited;
    await until(() => all().endsWith(LEAVE));
    const shown = shownOn(30, 8, all().slice(all().indexOf("\u001b[H")));
    expect(shown).toEqual([
      "rigel top: 1 launch, 2 client…",
      "",
      "NVIDIA H200 (simulated) | pol…",
      expect.stringMatching(/^ {2}CLIENT +CLASS/),
      expect.stringMatching(/^ {2}(serve|train) /),
      expect.stringMatching(/^ {2}(serve|train) /),
      "q quit  s sort (attached)  up…",
      "",
    ]);
  });

  test("has no colour where that is not wanted", async () => {
    const { child, pty, until, all } = inTerminal({ NO_COLOR: "1" });
    await until((lines) => lines.some((line) => line.includes("serve")));
    pty.write("q");
    await child.exited;
    // What moves the cursor is no colour.
    expect(all()).not.toMatch(/\u001b\[[\d;]*m/);
  });

  test("writes line by line in a terminal that cannot do more", async () => {
    const { child, all, until } = inTerminal({ TERM: "dumb" });
    await until(() => (all().match(/rigel top: 1 launch/g)?.length ?? 0) > 1);
    expect(all()).not.toContain("\u001b");
    child.kill("SIGINT");
    await child.exited;
  });
});
