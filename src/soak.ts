/**
 * soak.ts: `bun run soak`: what a busy server costs a latency-critical client, and whether the server grows.
 *
 * The demo's pair runs on the simulated GPU under policy priority beside `rigel serve`, in windows without load and with it in turn:
 * many event streams, and requests at a steady rate whether or not earlier ones were answered. The latencies are those that the
 * high client itself wrote down, each by when it fell due. Clients have processors of their own where there are two or more, as a
 * latency-critical program has: else the ratio says how they and the load compete for one. Everything is on 127.0.0.1, in a folder of its own, and bounded: the
 * time, the windows, the streams, the requests under way. However it ends, no process and no file of it stays.
 */

import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { between, standalone, whole } from "./arguments.ts";
import { logSchema } from "./bench-run.ts";
import {
  type Latency,
  type Sample,
  type Window,
  ascending,
  latencyOf,
  quantile,
  schedule,
  slopeOf,
  spread,
  within,
} from "./bench-stats.ts";
import { RigelError, reason } from "./errors.ts";
import { generator } from "./random.ts";
import { Guard } from "./guard.ts";
import { SIGNAL_STATUS } from "./interrupt.ts";
import { progress } from "./log.ts";
import { Native } from "./native.ts";
import { defaultSegmentFolder } from "./plan.ts";
import { allowedProcessors, resident_bytes } from "./proc.ts";
import { ahead, commandLine } from "./self.ts";
import { SoakLoad } from "./soak-load.ts";

const EXAMPLES = `
Examples:
  bun run soak                          ten minutes, a table
  bun run soak --seconds 120 --json     two minutes, one JSON document
  bun run soak --check                  exit status 1 if the high client's p99 grew by more than 2% with load

Of the processors, the clients get the first ones (before all other programs where that may be, as for root), server and load the last one,
or two of more than three; --together lets all run on all: then the ratio shows how they compete for them.`;

/** With --check, how much of its p99 without load the high client may have with it. */
const LIMIT = 1.02;
const HIGH = { name: "resnet50-infer", profile: "h200-resnet50-infer-bs4.csv", rate_per_s: 60 };
const BEST_EFFORT = { name: "resnet50-train", profile: "h200-resnet50-train-bs64.csv" };
/** Longest part of the time in one way, and what of it is not counted, as streams open and close in it. */
const WINDOW_s = 10;
const SETTLE_PART = 0.1;
/** How long clients and server may take to start, and to end. */
const START_s = 60;
const END_ms = 20_000;
const SAMPLE_ms = 1000;
/** How many runs are put together to see how much chance there is in a ratio. */
const DRAWS = 200;

type Way = "without" | "with";
const WAYS: readonly Way[] = ["without", "with"];

interface Options {
  seconds: number;
  streams: number;
  rate: number;
  json?: true;
  check?: true;
  together?: true;
}

/** Settles at the first signal; its reason is that one's name. */
const over = new AbortController();

/** What a soak has measured. */
interface Measured {
  windows: Window[];
  requests: readonly Sample[];
  load: SoakLoad;
  /** The processors of the clients, and of server and load; null: all on all. */
  processors: Processors | null;
  /** Seconds as in the windows. */
  rss: [at_s: number, bytes: number][];
}

async function soak(native: Native, options: Options): Promise<Measured> {
  const scratch = mkdtempSync(join(defaultSegmentFolder(process.env), `rigel-soak-${process.pid}-`));
  const mark = `RIGEL_SOAK=${process.pid}-${Date.now()}`;
  using guard = new Guard(mark, [scratch]);
  const children: Child[] = [];
  const processors = options.together ? null : processorsOf();
  const start = (name: "serve" | "launch", args: string[]): Child => {
    const child = startChild(scratch, name, args, mark, prefixOf(name, processors));
    guard.watch(child.process.pid);
    children.push(child);
    return child;
  };
  try {
    if (processors) await moveTo(processors.load);
    for (const folder of ["segments", "run", "cache"]) mkdirSync(join(scratch, folder), { mode: 0o700 });
    const segments = join(scratch, "segments");
    const server = start("serve", ["serve", "--port", "0", "--json", "--segment", segments]);
    const url = await until(server, "rigel serve has not begun to listen", () => addressIn(server.output()));
    const log = join(scratch, "high.log");
    const start_ms = Date.now() + 2000;
    const config = join(scratch, "soak.json");
    writeFileSync(config, JSON.stringify(configOf(native, options, start_ms, log)));
    const launch = start("launch", ["launch", config, "--json", "--segment", segments]);
    await until(launch, "the clients have not begun", async () => {
      const working = await workingClients(url);
      return (working === 2 && Date.now() >= start_ms) || undefined;
    });

    const from_s = (Date.now() - start_ms) / 1000;
    const each_s = Math.min(WINDOW_s, options.seconds / 4);
    const windows = schedule(WAYS, {
      rounds: Math.floor(options.seconds / (2 * each_s)),
      cycles: 1,
      window_s: each_s * (1 - SETTLE_PART),
      settle_s: () => each_s * SETTLE_PART,
    }).map((window) => shifted(window, from_s));
    progress(`both clients run; ${windows.length} windows of ${each_s.toFixed(1)} s`);
    const load = new SoakLoad(url, options);
    const rss: Measured["rss"] = [];
    const sample = (): void => {
      const bytes = resident_bytes(server.process.pid);
      if (bytes !== undefined) rss.push([(Date.now() - start_ms) / 1000, bytes]);
    };
    sample();
    const timer = setInterval(sample, SAMPLE_ms);
    const done: Window[] = [];
    try {
      for (const [index, window] of windows.entries()) {
        if (over.signal.aborted) break;
        if (window.way === "with") await load.start();
        await sleepUntil(start_ms + window.to_s * 1000, [server, launch]);
        if (window.way === "with") await load.stop();
        if (!over.signal.aborted) done.push(window);
        progress(
          `window ${index + 1} of ${windows.length}, ${window.way} load: ${load.answered} requests answered so far, server ${megabytes(rss.at(-1)?.[1] ?? null)} MB`,
        );
      }
    } finally {
      clearInterval(timer);
      await load.stop();
    }
    sample();
    // The clients end after the request that they are in, and write down what they have measured.
    launch.process.kill("SIGTERM");
    await ended(launch, END_ms);
    return { windows: done, requests: requestsIn(log, launch), load, processors, rss };
  } finally {
    for (const child of children.toReversed()) {
      child.process.kill("SIGTERM");
      await ended(child, END_ms);
      guard.forget(child.process.pid);
    }
    rmSync(scratch, { recursive: true, force: true });
  }
}

/** Lists as taskset takes them. */
interface Processors {
  clients: string;
  load: string;
}

/** Who runs where; null where there is one processor, or no taskset. */
function processorsOf(): Processors | null {
  const all = allowedProcessors();
  if (all.length < 2 || Bun.which("taskset") === null) return null;
  const at = all.length - (all.length > 3 ? 2 : 1);
  return { clients: all.slice(0, at).join(","), load: all.slice(at).join(",") };
}

/** What a child is started through. Whatever else the machine does, in both kinds of windows, is not to decide. */
function prefixOf(name: "serve" | "launch", processors: Processors | null): string[] {
  if (!processors) return [];
  if (name === "serve") return ["taskset", "-c", processors.load];
  return [...ahead(), "taskset", "-c", processors.clients];
}

/** This process, which makes the load, with all its threads. */
async function moveTo(processors: string): Promise<void> {
  const moved = Bun.spawn(["taskset", "-acp", processors, String(process.pid)], {
    stdout: "ignore",
    stderr: "inherit",
  });
  if ((await moved.exited) !== 0) throw new RigelError("command", `taskset cannot move to processors ${processors}`);
}

/** The demo's pair under priority; the high client writes its latencies down. A launch of this ends by itself, whatever happens here. */
function configOf({ files }: Native, { seconds }: Options, start_ms: number, log: string): object {
  const profile = join(files.profiles, HIGH.profile);
  const paced = ["--rate", String(HIGH.rate_per_s), "--start-at", (start_ms / 1000).toFixed(6)];
  const command = [files.replay, "--profile", profile, ...paced, "--log", log];
  return {
    device: "simulated",
    duration_s: START_s + seconds + 60,
    policy: { name: "priority" },
    simulated: { preset: "h200", mps: true },
    clients: [
      { name: HIGH.name, class: "high", command },
      {
        name: BEST_EFFORT.name,
        class: "best-effort",
        replay: { profile: join(files.profiles, BEST_EFFORT.profile) },
      },
    ],
  };
}

interface Child {
  name: string;
  process: ReturnType<typeof Bun.spawn>;
  /** What it has printed so far. */
  output: () => string;
  errors: () => string;
}

function startChild(scratch: string, name: string, args: string[], mark: string, prefix: readonly string[]): Child {
  const [stdout, stderr] = [join(scratch, `${name}.out`), join(scratch, `${name}.err`)];
  const [variable = "", value] = mark.split("=");
  const child = Bun.spawn([...prefix, ...commandLine(), ...args], {
    env: {
      ...process.env,
      NO_COLOR: "1",
      XDG_RUNTIME_DIR: join(scratch, "run"),
      XDG_STATE_HOME: join(scratch, "state"),
      // What it learns of durations is not the user's.
      XDG_CACHE_HOME: join(scratch, "cache"),
      [variable]: value,
    },
    // Out of reach of the terminal's Ctrl-C, which is for this process to pass on.
    detached: true,
    stdin: "ignore",
    stdout: Bun.file(stdout),
    stderr: Bun.file(stderr),
  });
  return { name, process: child, output: () => textOf(stdout), errors: () => textOf(stderr) };
}

function textOf(path: string): string {
  try {
    return readFileSync(path, "utf8");
  } catch {
    return "";
  }
}

/** Throws if a child that is needed has ended. */
function mustLive({ name, process: { exitCode, signalCode }, errors }: Child): void {
  if (exitCode === null && signalCode === null) return;
  const last = errors().trimEnd().split("\n").slice(-8).join("\n");
  throw new RigelError("command", `rigel ${name} ended early (${signalCode ?? `status ${exitCode}`}):\n${last}`);
}

/** Polls until a condition gives something. */
async function until<T>(child: Child, otherwise: string, condition: () => T | undefined | Promise<T | undefined>) {
  const limit_ms = performance.now() + START_s * 1000;
  for (;;) {
    const found = await condition();
    if (found !== undefined) return found;
    if (over.signal.aborted) throw new Interrupted();
    mustLive(child);
    if (performance.now() > limit_ms) throw new RigelError("command", `${otherwise} within ${START_s} s`);
    await Bun.sleep(50);
  }
}

/** Ctrl-C before anything was measured. */
class Interrupted extends Error {}

const addressSchema = z.object({ url: z.string() });

function addressIn(text: string): string | undefined {
  return text.includes("\n") ? addressSchema.parse(JSON.parse(text)).url : undefined;
}

const clientsSchema = z.object({ clients: z.array(z.object({ launches: z.int() })) });

async function workingClients(url: string): Promise<number> {
  const { clients } = clientsSchema.parse(await (await fetch(`${url}/v1/clients`)).json());
  return clients.filter(({ launches }) => launches > 0).length;
}

/** Until a time of Date.now(), a signal, or the end of a child. */
async function sleepUntil(at_ms: number, children: readonly Child[]): Promise<void> {
  while (Date.now() < at_ms && !over.signal.aborted) {
    for (const child of children) mustLive(child);
    await Bun.sleep(Math.max(0, Math.min(100, at_ms - Date.now())));
  }
}

async function ended({ process: child }: Child, patience_ms: number): Promise<void> {
  const timer = setTimeout(() => child.kill("SIGKILL"), patience_ms);
  await child.exited;
  clearTimeout(timer);
}

function shifted(window: Window, by_s: number): Window {
  return {
    ...window,
    from_s: window.from_s + by_s,
    counted_s: window.counted_s + by_s,
    to_s: window.to_s + by_s,
  };
}

function requestsIn(log: string, launch: Child): Measured["requests"] {
  try {
    return logSchema.parse(JSON.parse(readFileSync(log, "utf8"))).requests;
  } catch (thrown) {
    const last = launch.errors().trimEnd().split("\n").slice(-8).join("\n");
    throw new RigelError("command", `the high client left no latencies (${reason(thrown)}):\n${last}`, {
      cause: thrown,
    });
  }
}

/** What share of the p99 without load that with it is, in 95% of runs put together of these pairs, drawn with repetition. */
function intervalOf(
  pairs: readonly { with: readonly number[]; without: readonly number[] }[],
): { low: number; high: number } | null {
  const complete = pairs.filter((pair) => pair.with.length > 0 && pair.without.length > 0);
  if (complete.length < 2) return null;
  const random = generator(1);
  const ratios = Array.from({ length: DRAWS }, () => {
    const drawn = complete.flatMap(() => complete[Math.floor(random() * complete.length)] ?? []);
    const p99 = (way: Way): number => quantile(ascending(drawn.flatMap((pair) => pair[way])), 0.99);
    return p99("with") / p99("without");
  });
  const sorted = ascending(ratios);
  return { low: quantile(sorted, 0.025), high: quantile(sorted, 0.975) };
}

/** What is printed with --json. */
function reportOf({ windows, requests, load, processors, rss }: Measured, options: Options) {
  const samplesOf = (window: Window) => within(requests, window, 0);
  const all = (way: Way): Latency | null =>
    latencyOf(windows.filter((window) => window.way === way).flatMap(samplesOf)) ?? null;
  const high = { without: all("without"), with: all("with") };
  const ratio = (of: (latency: Latency) => number): number | null =>
    high.with && high.without ? of(high.with) / of(high.without) : null;
  const measured = windows.map((window) => ({ ...window, latency: latencyOf(samplesOf(window)) ?? null }));
  const rounds = [...new Set(windows.map(({ round }) => round))].map((round) => {
    const p99_ms = (way: Way): number =>
      measured.find((window) => window.round === round && window.way === way)?.latency?.p99_ms ?? Number.NaN;
    return p99_ms("with") / p99_ms("without");
  });
  const latencies = (round: number, way: Way): number[] =>
    windows
      .filter((window) => window.round === round && window.way === way)
      .flatMap((window) => samplesOf(window).map(([, latency_ms]) => latency_ms));
  const pairs = [...new Set(windows.map(({ round }) => round))].map((round) => ({
    with: latencies(round, "with"),
    without: latencies(round, "without"),
  }));
  const answers = ascending(load.answers_ms);
  const bytes = rss.map(([, value]) => value);
  // What the first load made grow stays, so it begins after that.
  const quiet = windows.filter(({ way, round }) => way === "without" && round > 0);
  return {
    schema: 1,
    policy: "priority",
    seconds: options.seconds,
    streams: options.streams,
    rate_per_s: options.rate,
    interrupted: over.signal.aborted,
    processors,
    high: {
      name: HIGH.name,
      ...high,
      p50_ratio: ratio(({ p50_ms }) => p50_ms),
      p99_ratio: ratio(({ p99_ms }) => p99_ms),
      /** In which 95% of such runs would have it: drawn anew from these pairs of windows. */
      p99_ratio_interval: intervalOf(pairs),
      /** Of each pair of windows by itself: what else the machine did hits few of them. */
      p99_ratio_rounds: spread(rounds),
    },
    requests: {
      sent: load.sent,
      answered: load.answered,
      errors: Object.fromEntries(load.errors),
      /** Due, but too many were under way. */
      unsent: load.unsent,
      p50_ms: answers.length > 0 ? quantile(answers, 0.5) : null,
      p99_ms: answers.length > 0 ? quantile(answers, 0.99) : null,
    },
    event_streams: { opened: load.opened, lost: load.lost, silent: load.silent, events: load.events },
    server_rss: {
      first_bytes: bytes[0] ?? null,
      last_bytes: bytes.at(-1) ?? null,
      peak_bytes: bytes.length > 0 ? bytes.reduce((a, b) => Math.max(a, b)) : null,
      slope_bytes_per_s: slopeOf(rss),
      /** Of what was sampled in windows without load alone, where what streams and answers need is not in it. */
      quiet_slope_bytes_per_s: slopeOf(
        rss.filter(([at_s]) => quiet.some(({ counted_s, to_s }) => at_s >= counted_s && at_s < to_s)),
      ),
      samples: rss.map(([at_s, value]) => ({ at_s: Math.round(at_s * 1000) / 1000, bytes: value })),
    },
    windows: measured,
  };
}
type Report = ReturnType<typeof reportOf>;

function number(value: number | null | undefined, digits: number): string {
  return value?.toFixed(digits) ?? "-";
}

function megabytes(bytes: number | null): string {
  return number(bytes === null ? null : bytes / 1e6, 1);
}

function kibibytes(bytes: number | null): string {
  return number(bytes === null ? null : bytes / 1024, 1);
}

function textOfReport({
  high,
  processors,
  requests,
  event_streams: streams,
  server_rss: rss,
  windows,
}: Report): string {
  const latency = (way: Way): string => {
    const of = high[way];
    return `${way.padEnd(7)} load  p50 ${number(of?.p50_ms, 3)} ms, p99 ${number(of?.p99_ms, 3)} ms (${of?.count ?? 0} requests)`;
  };
  const rounds = high.p99_ratio_rounds;
  const interval = high.p99_ratio_interval;
  const failed = Object.entries(requests.errors).map(([what, count]) => `  ${count} x ${what}`);
  return [
    `${high.name}, policy priority, ${windows.length} windows; ` +
      (processors
        ? `clients on processors ${processors.clients}, server and load on ${processors.load}`
        : "all on all processors"),
    ...WAYS.map((way) => `  ${latency(way)}`),
    `  ratio         p50 ${number(high.p50_ratio, 3)}, p99 ${number(high.p99_ratio, 3)} (${number(interval?.low, 2)} to ${number(interval?.high, 2)} by chance); p99 by pairs of windows: median ${number(rounds?.median, 3)}, ${number(rounds?.min, 3)} to ${number(rounds?.max, 3)}`,
    `requests        ${requests.answered} of ${requests.sent} answered, ${requests.unsent} not sent in time, p50 ${number(requests.p50_ms, 1)} ms, p99 ${number(requests.p99_ms, 1)} ms`,
    ...failed,
    `event streams   ${streams.opened} opened, ${streams.lost} lost, ${streams.silent} silent, ${streams.events} events`,
    `server's RSS    ${megabytes(rss.first_bytes)} MB at first, ${megabytes(rss.last_bytes)} at last, ${megabytes(rss.peak_bytes)} at most; ` +
      `${kibibytes(rss.slope_bytes_per_s)} KiB/s, in the windows without load ${kibibytes(rss.quiet_slope_bytes_per_s)} KiB/s`,
  ].join("\n");
}

/** What is wrong with what was measured, and whether it fails: a ratio does with --check alone, as it depends on how fast the machine is. */
export function verdictOf(
  {
    high: { p99_ratio },
    requests,
    event_streams: streams,
  }: {
    high: Pick<Report["high"], "p99_ratio">;
    requests: Pick<Report["requests"], "sent" | "answered">;
    event_streams: Pick<Report["event_streams"], "lost" | "silent">;
  },
  check: boolean,
): { problems: string[]; failed: boolean } {
  const slow =
    p99_ratio === null
      ? "the p99 with load over that without is not known: one of them is of no request"
      : p99_ratio <= LIMIT
        ? undefined
        : `the p99 with load is ${p99_ratio.toFixed(3)} of that without, above ${LIMIT}`;
  const broken =
    requests.answered < requests.sent || streams.lost > 0 || streams.silent > 0
      ? "not every request was answered, or not every stream stayed alive"
      : undefined;
  return {
    problems: [slow, broken].filter((problem) => problem !== undefined),
    failed: (check && slow !== undefined) || broken !== undefined,
  };
}

if (import.meta.main) {
  const options = standalone("bun run soak")
    .description("what a busy `rigel serve` costs a latency-critical client, and whether the server grows")
    .option("--seconds <seconds>", "how long to measure", between(4, 3600), 600)
    .option("--streams <count>", "event streams open with load", whole(1, 150), 100)
    .option("--rate <per second>", "requests a second with load", between(1, 1000), 200)
    .option("--json", "print as JSON; progress is on standard error")
    .option("--check", `exit status 1 if the p99 with load is above ${LIMIT} of that without`)
    .option("--together", "leave it to the system which processors clients, server and load run on")
    .addHelpText("after", EXAMPLES)
    .parse()
    .opts<Options>();
  for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"] as const)
    process.on(signal, () => {
      if (!over.signal.aborted) progress(`${signal}: ending what was started`);
      over.abort(signal);
    });
  try {
    const report = reportOf(await soak(await Native.load(), options), options);
    process.stdout.write(`${options.json ? JSON.stringify(report, null, 2) : textOfReport(report)}\n`);
    const { problems, failed } = verdictOf(report, options.check ?? false);
    for (const problem of problems) progress(problem);
    if (failed) process.exitCode = 1;
  } catch (thrown) {
    if (!(thrown instanceof Interrupted)) {
      if (!(thrown instanceof RigelError)) throw thrown;
      for (const line of thrown.message.split("\n")) progress(line);
      process.exitCode = thrown.exitStatus;
    }
  }
  if (over.signal.aborted)
    process.exitCode = SIGNAL_STATUS[z.enum(["SIGINT", "SIGTERM", "SIGHUP"]).parse(over.signal.reason)];
}
