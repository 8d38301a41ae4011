/**
 * pictures.ts: `bun run pictures`: makes the pictures of README.md and docs/ from what really runs here: a trace, `rigel top`, the
 * dashboard, and the page of a launch whose load and neighbours change. `bun run pictures trace` makes that of the trace alone.
 *
 * Everything in them has been measured while they were made. Takes about four minutes; needs Chromium. Writes src/pictures/.
 */

import { chmodSync, mkdirSync, mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { z } from "zod";
import { Browser } from "./chromium.ts";
import { Segments } from "./discover.ts";
import { GpuShares } from "./gpu-share.ts";
import { progress } from "./log.ts";
import { Native } from "./native.ts";
import { ahead, commandLine } from "./self.ts";
import { readingOf, statsOf } from "./stats.ts";
import { svgOf } from "./terminal-svg.ts";
import { render } from "./top-view.ts";
import { type Part, showTrace } from "./trace-picture.ts";

const OUT = join(import.meta.dir, "pictures");
/** So much of the past is in the picture of the dashboard. */
const HISTORY_s = 90;
const LIMIT_bytes = 300_000;
/** Requests a second, and for how long: what the page of a launch shows. */
const LOAD: readonly [per_s: number, seconds: number][] = [
  [60, 30],
  [120, 25],
  [60, 45],
];
/** When a second best-effort client comes, and how long it stays. */
const GUEST_s = { at: 70, stays: 15 };
/** The demo has run for so long when its trace is taken. */
const TRACED_s = 5;
/** So much of it is shown, from before a request. */
const SHOWN_us = 20_000;
const LEAD_us = 4000;
/** Launches of a request that is shown. */
const WHOLE = 200;
/** What is looked at of a trace's events. */
const traceEventSchema = z.object({
  ph: z.string(),
  cat: z.string().optional(),
  id: z.string().optional(),
  pid: z.int(),
  ts: z.number().default(0),
  dur: z.number().default(0),
});
type TraceEvent = z.infer<typeof traceEventSchema>;
const traceSchema = z.object({ traceEvents: z.array(traceEventSchema) });
/** Before launches: what else the machine does is not to be in the pictures. */
const FIRST = ahead();

const native = await Native.load();
mkdirSync(OUT, { recursive: true });
const scratch = mkdtempSync(join(tmpdir(), "rigel-pictures-"));
try {
  chmodSync(scratch, 0o700);
  const env = { ...process.env, NO_COLOR: "1", XDG_RUNTIME_DIR: scratch };
  await traced(env);
  if (process.argv[2] !== "trace") await others(env);
} finally {
  rmSync(scratch, { recursive: true, force: true });
}

/** All but that of a trace. */
async function others(env: Record<string, string | undefined>): Promise<void> {
  progress(`the demo, for ${HISTORY_s} s: rigel top and the dashboard`);
  const config = join(native.files.profiles, "demo.json");
  await using launch = Bun.spawn(
    [
      ...FIRST,
      ...commandLine(),
      "launch",
      config,
      "--no-compare",
      "--policy",
      "slo",
      "--mps",
      "off",
      "--duration",
      "3600",
      "--segment",
      scratch,
    ],
    { env, stdin: "ignore", stdout: "ignore", stderr: "pipe" },
  );
  const launched = launch.stderr.text();
  await using server = Bun.spawn([...commandLine(), "serve", "--port", "0", "--json", "--segment", scratch], {
    env,
    stdin: "ignore",
    stdout: "pipe",
    stderr: "ignore",
  });
  const { value: line } = await server.stdout.getReader().read();
  const { url } = z.object({ url: z.string() }).parse(JSON.parse(new TextDecoder().decode(line)));
  await using browser = await Browser.open();
  const tab = await browser.tab();
  await tab.scheme("light");
  await tab.resize(1280, 800);
  await tab.goto(url);
  await Bun.sleep(HISTORY_s * 1000);
  await save(tab, "dashboard.png");
  await tab.resize(390, 844, true);
  // The next second draws everything in its new size.
  await Bun.sleep(1500);
  await save(tab, "dashboard-phone.png", { width: 390, height: 844 });

  const segments = new Segments(native, scratch).live();
  const gpus = new GpuShares(native);
  const before = segments.map((segment) => readingOf(segment, gpus));
  await Bun.sleep(1000);
  const stats = segments.map((segment, index) => statsOf(readingOf(segment, gpus), before[index]));
  const [first] = stats;
  const view = {
    segments: stats,
    folder: scratch,
    interval_s: 1,
    sort: "attached" as const,
    selected: first ? `${first.segment.id} ${first.clients[0]?.name}` : undefined,
    help: false,
    notice: "",
  };
  writeFileSync(
    join(OUT, "top.svg"),
    svgOf(render(view, { width: 99, height: 10, colour: true, keys: true }), "rigel top beside the demo"),
  );
  launch.kill("SIGTERM");
  await launched;
  server.kill("SIGTERM");
  await server.exited;

  const whole_s = LOAD.reduce((sum, [, seconds]) => sum + seconds, 0);
  progress(`a launch of ${whole_s} s with a step in its load, and a client that comes and goes`);
  await tab.resize(1280, 800);
  await tab.goto(`file://${await settling(native, whole_s, env)}`);
  await tab.until(`document.querySelectorAll("canvas").length === 5`);
  // Plots take the width of the page a moment later.
  await Bun.sleep(1000);
  await save(tab, "settle.png", { width: 1280, height: 550 });
}

/** A moment of the demo in which requests take best-effort work off the GPU, as Chromium's own viewer of traces shows it. */
async function traced(env: Record<string, string | undefined>): Promise<void> {
  progress(`a trace of the demo, after ${TRACED_s} s`);
  const path = join(scratch, "trace.json");
  const options = { env, stdin: "ignore", stdout: "ignore", stderr: "pipe" } as const;
  const where = ["--segment", scratch];
  const how = ["--no-compare", "--policy", "priority", "--mps", "off", "--duration", "3600"];
  await using launch = Bun.spawn(
    [...FIRST, ...commandLine(), "launch", join(native.files.profiles, "demo.json"), ...how, ...where],
    options,
  );
  const said = launch.stderr.text();
  await Bun.sleep(TRACED_s * 1000);
  await using trace = Bun.spawn([...commandLine(), "trace", "-o", path, ...where], options);
  if ((await trace.exited) !== 0) throw new Error(await trace.stderr.text());
  launch.kill("SIGTERM");
  await said;
  const { traceEvents } = traceSchema.parse(JSON.parse(readFileSync(path, "utf8")));
  const spans = traceEvents.filter(({ ph }) => ph === "X").length;
  await using browser = await Browser.open();
  const tab = await browser.tab();
  await tab.scheme("light");
  await tab.resize(1200, 600);
  await showTrace(tab, path, spans, busiest(traceEvents));
  await save(tab, "trace.png", { width: 1200, height: 285 });
}

/** The part of it that has most time in which work was off the GPU for a request. */
function busiest(events: readonly TraceEvent[]): Part {
  const ends = new Map(events.flatMap(({ ph, id, ts }) => (ph === "e" && id !== undefined ? [[id, ts]] : [])));
  // Where the machine keeps a program waiting between its launches, they are several requests.
  const requests = events
    .flatMap(({ ph, id, ts, pid }) =>
      ph === "b" && id !== undefined ? [{ pid, from_us: ts, to_us: ends.get(id) ?? ts }] : [],
    )
    .filter(({ pid, from_us, to_us }) => {
      const launches = events.filter((one) => one.pid === pid && one.cat === "launch" && one.ts >= from_us);
      return launches.filter(({ ts }) => ts <= to_us).length >= WHOLE;
    });
  const off = events.flatMap(({ cat, ts, dur }) => (cat === "suspension" ? [{ from_us: ts, to_us: ts + dur }] : []));
  const parts = off.map(({ from_us }) => ({ from_us: from_us - LEAD_us, to_us: from_us - LEAD_us + SHOWN_us }));
  const inside = (part: Part): number =>
    off.reduce((sum, one) => sum + requests.reduce((some, request) => some + shared_us(part, one, request), 0), 0);
  const [best] = parts.toSorted((x, y) => inside(y) - inside(x));
  if (!best) throw new Error("nothing was taken off the GPU");
  return best;
}

/** What all of these have of the time. */
function shared_us(...parts: Part[]): number {
  const from_us = Math.max(...parts.map((part) => part.from_us));
  return Math.max(0, Math.min(...parts.map((part) => part.to_us)) - from_us);
}

/** Runs that launch; the file of its page. */
async function settling({ files }: Native, duration_s: number, env: Record<string, string | undefined>) {
  const profile = (name: string): string => join(files.profiles, `h200-${name}.csv`);
  const gaps = LOAD.flatMap(([per_s, seconds]) => Array.from({ length: per_s * seconds }, () => 1 / per_s));
  // It goes on from its beginning, should the launch take longer.
  writeFileSync(join(scratch, "gaps.json"), JSON.stringify(gaps));
  const config = join(scratch, "settle.json");
  const clients = [
    { name: "serve", class: "high", replay: { profile: profile("resnet50-infer-bs4"), arrivals: "gaps.json" } },
    { name: "train", class: "best-effort", replay: { profile: profile("resnet50-train-bs64") } },
  ];
  writeFileSync(config, JSON.stringify({ device: "simulated", duration_s, clients }));
  const page = join(scratch, "settle.html");
  const options = { env, stdin: "ignore", stdout: "ignore", stderr: "inherit" } as const;
  const where = ["--segment", scratch];
  await using launch = Bun.spawn([...FIRST, ...commandLine(), "launch", config, "--html", page, ...where], options);
  await Bun.sleep(GUEST_s.at * 1000);
  const job = ["run", "--class", "best-effort", "--name", "guest", "--device", "simulated", ...where, "--"];
  await using guest = Bun.spawn(
    [...FIRST, ...commandLine(), ...job, files.replay, "--profile", profile("bert-train-bs8x128")],
    options,
  );
  await Bun.sleep(GUEST_s.stays * 1000);
  guest.kill("SIGTERM");
  await guest.exited;
  if ((await launch.exited) !== 0) throw new Error("the launch has failed");
  return page;
}

async function save(
  tab: Awaited<ReturnType<Browser["tab"]>>,
  name: string,
  part?: { width: number; height: number },
): Promise<void> {
  const path = join(OUT, name);
  writeFileSync(path, await tab.screenshot(part));
  const { size } = statSync(path);
  progress(`${path}: ${(size / 1000).toFixed(0)} kB`);
  if (size > LIMIT_bytes) throw new Error(`${path} has ${size} bytes, expected at most ${LIMIT_bytes}`);
}
