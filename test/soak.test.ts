/** soak.test.ts: the mechanics of `bun run soak`, not what it measures: how fast things are depends on the machine. */

import { expect, test } from "bun:test";
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { slopeOf } from "../src/bench-stats.ts";
import { defaultSegmentFolder } from "../src/plan.ts";
import { environmentOf, living } from "../src/proc.ts";
import { verdictOf } from "../src/soak.ts";
import { plainEnvironment, root } from "./rigel.ts";

const soak = (...args: string[]) => started("soak.ts", ...args);

function started(program: string, ...args: string[]) {
  return Bun.spawn([process.execPath, join(root, "src", program), ...args], {
    env: plainEnvironment(),
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
}

/** What a soak has in the folder of segments. */
function kept(pid: number): string[] {
  return readdirSync(defaultSegmentFolder(process.env)).filter((name) => name.startsWith(`rigel-soak-${pid}-`));
}

const latency = z.object({ count: z.int().positive(), p99_ms: z.number().positive() });
const reportSchema = z.object({
  interrupted: z.literal(false),
  high: z.object({ without: latency, with: latency, p99_ratio: z.number().positive() }),
  requests: z.object({ sent: z.int().positive(), answered: z.int(), errors: z.record(z.string(), z.int()) }),
  event_streams: z.object({ opened: z.int(), lost: z.int(), silent: z.int(), events: z.int() }),
  server_rss: z.object({
    slope_bytes_per_s: z.number(),
    samples: z.array(z.object({ at_s: z.number(), bytes: z.int().positive() })).min(2),
  }),
  windows: z.array(z.object({ way: z.enum(["with", "without"]), from_s: z.number(), to_s: z.number() })),
});

test("a soak of half a minute: every request is answered, every stream lives, memory is watched, nothing is left", async () => {
  await using child = soak("--seconds", "30", "--json");
  const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text()]);
  expect(await child.exited, stderr).toBe(0);
  const { requests, event_streams: streams, windows, server_rss: rss } = reportSchema.parse(JSON.parse(stdout));
  expect(windows.map(({ way }) => way)).toEqual(["without", "with", "with", "without"]);
  expect(requests).toMatchObject({ answered: requests.sent, errors: {} });
  expect(streams).toMatchObject({ opened: 200, lost: 0, silent: 0 });
  expect(streams.events).toBeGreaterThanOrEqual(200);
  const ats = rss.samples.map(({ at_s }) => at_s);
  expect(ats).toEqual(ats.toSorted((a, b) => a - b));
  expect(kept(child.pid)).toEqual([]);
});

test("a wrong option ends a soak, and the benchmarks beside it, with status 2; help with 0", async () => {
  for (const [program, ...args] of [
    ["soak.ts", "--seconds", "0"],
    ["soak.ts", "--nope"],
    ["soak.ts", "--streams", "1.5", "--help"],
    ["bench-hotpath.ts", "--calls", "0"],
    ["bench-in-place.ts", "--nope"],
    ["bench-simulate.ts", "--rounds", "x"],
    ["bench-verdict.ts"],
  ] as const) {
    await using child = started(program, ...args);
    const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text()]);
    expect({ status: await child.exited, stdout }, `${program}: ${stderr}`).toEqual({ status: 2, stdout: "" });
    expect(stderr).toStartWith("error: ");
  }
  await using help = soak("--help");
  expect(await help.stdout.text()).toStartWith("Usage: bun run soak");
  expect(await help.exited).toBe(0);
});

test("Ctrl-C in the middle ends what a soak has started, and nothing of it is left", async () => {
  await using child = soak("--seconds", "600", "--json");
  const own = (): string[] =>
    living().flatMap(({ pid, name }) =>
      environmentOf(pid)["RIGEL_SOAK"]?.startsWith(`${child.pid}-`) ? `${name} ${pid}` : [],
    );
  let stderr = "";
  let sent = false;
  const decoder = new TextDecoder();
  for await (const chunk of child.stderr) {
    stderr += decoder.decode(chunk, { stream: true });
    // child.killed says whether it has ended.
    if (!sent && stderr.includes("both clients run")) {
      sent = true;
      // The server, the launch and its two clients.
      expect(own().length).toBeGreaterThanOrEqual(4);
      child.kill("SIGINT");
    }
  }
  expect(stderr).toContain("SIGINT: ending what was started");
  expect(JSON.parse(await child.stdout.text())).toMatchObject({ interrupted: true, windows: [] });
  expect(await child.exited, stderr).toBe(130);
  expect(own()).toEqual([]);
  expect(kept(child.pid)).toEqual([]);
});

function fails(p99_ratio: number | null, check: boolean, answered = 9, lost = 0, silent = 0): boolean {
  const measured = { high: { p99_ratio }, requests: { sent: 9, answered }, event_streams: { lost, silent } };
  return verdictOf(measured, check).failed;
}

test("a soak fails by its requests and streams, and with --check by its p99, too: also where there is none", () => {
  expect([fails(1.02, true), fails(1.03, true), fails(null, true)]).toEqual([false, true, true]);
  expect([fails(1.03, false), fails(null, false)]).toEqual([false, false]);
  expect([fails(1, false, 8), fails(1, false, 9, 1), fails(1, false, 9, 0, 1)]).toEqual([true, true, true]);
});

test("a slope is that of the line through its points", () => {
  expect(
    slopeOf([
      [0, 5],
      [1, 7],
      [3, 11],
    ]),
  ).toBeCloseTo(2);
  expect(
    slopeOf([
      [0, 1],
      [1, 4],
      [2, 1],
    ]),
  ).toBeCloseTo(0);
  expect(slopeOf([[1, 2]])).toBeNull();
  expect(slopeOf([])).toBeNull();
});
