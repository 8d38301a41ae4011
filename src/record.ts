/**
 * record.ts: `rigel profile -- command`: runs a program under the library, waits until it is past its warm-up, and records what
 * it asks of the GPU for some requests: a profile.
 *
 * The program goes through four stretches: warm-up, in which launches are told but not timed, until requests launch the same
 * and take as long as those before them; some requests in which nothing is recorded, to compare with; the recorded ones; and
 * the end, at which the program is stopped or let run. Whatever ends it early, what was recorded until then is written.
 */

import { join, resolve } from "node:path";
import type { Config } from "./config.ts";
import { RigelError, namingOptions } from "./errors.ts";
import { Interrupt, SIGNAL_STATUS, onEnd } from "./interrupt.ts";
import { launch } from "./launch.ts";
import { progress } from "./log.ts";
import type { Native } from "./native.ts";
import { WholeFile, checkApart } from "./output.ts";
import { type Plan, defaultSegmentFolder, plan, simulationState } from "./plan.ts";
import { RECORDED_HEADER, factsLine, recordedRow } from "./profile-write.ts";
import type { Gemm, Operation } from "./profile.ts";
import { type End, type Rhythm, median, repetition, requestsBy, rhythmOf, settled } from "./record-rhythm.ts";
import { type GpuRecord, type Launch, type Moment, type Request, rowsOf, typical } from "./record-rows.ts";
import { ENTRY, type Entry, LEVEL, type Mechanism, Recording, SOURCE } from "./recording.ts";
import type { Segment } from "./segment.ts";

export interface RecordOptions {
  command: string[];
  /** Where the profile goes; without it to `print`. */
  out?: string;
  print?: (text: string) => Promise<void>;
  /** Record so many requests or iterations, or for so long. */
  requests: number;
  duration_s?: number;
  /** How long to wait for the end of warm-up. */
  settle_s: number;
  /** Record from the first launch on, warm-up and all. */
  fromStart: boolean;
  /** Write every request, not one that stands for all. */
  all: boolean;
  letRun: boolean;
  mechanism: Mechanism;
  device: Config["device"];
  preset: Config["simulated"]["preset"];
  segmentFolder?: string;
  start_timeout_s: number;
}

/** What `--json` prints. Fields are public: they may be added, never renamed. */
export interface RecordSummary {
  schema: 1;
  out: string | null;
  device: string;
  /** How times were taken. */
  mechanism: "cupti" | "events" | null;
  /** Why not CUPTI, if events. */
  why: string | null;
  /** What tells one request from the next. */
  requests_by: Rhythm["by"] | null;
  /** Recorded, whole ones. */
  requests: number;
  /** Of those, how many launched what most of them did. */
  alike: number;
  operations: number;
  kernels: number;
  /** GPU time of what is in the profile. */
  gpu_ms: number;
  /** Launches before recording began. */
  dropped: { launches: number; requests: number; seconds: number; why: string };
  /** What recording costs: medians of requests, or means of iterations of a loop, before and while it was on. */
  overhead: { without_ms: number; with_ms: number; ratio: number; requests: [number, number] } | null;
  /** Time between two events with nothing between them, which was taken off each time. */
  event_ns: number;
  notes: string[];
}

const LOOK_ms = 10;
/** Launches that are looked back on for a repetition. */
const REMEMBERED = 200_000;
/** Shorter spells of repetition are layers of a model, not iterations. */
const LEAST_REPEATED_ns = 1e9;
/** How long it takes at most until all times are there. */
const TIMES_ms = 5000;
const WITHOUT_AT_LEAST = 10;
const WITHOUT_AT_LEAST_ms = 300;
const WITHOUT_AT_MOST_ms = 10_000;
/** Requests that tell the rhythm of a recording that has ended. */
const FEW = 2;
const RHYTHM_EVERY_ms = 100;
/** A rhythm is believed once it has been the same for so long. */
const LASTING_ms = 1000;

const TYPES: Record<number, string> = {
  0: "fp32",
  1: "fp64",
  2: "fp16",
  3: "int8",
  4: "c32",
  5: "c64",
  14: "bf16",
  28: "fp8",
  29: "fp8",
};

type Stage = "warm-up" | "without" | "recording" | "timing" | "done";

/** Follows one program through its stretches. */
class Recorder {
  stage: Stage = "warm-up";
  rhythm: Rhythm | undefined;
  readonly #recording: Recording;
  readonly #options: RecordOptions;
  readonly #segment: () => Segment | undefined;
  // Warm-up: what was launched (kinds) and where requests ended.
  #tokens: number[] = [];
  #begins: number[] = [];
  #ends: End[] = [];
  #launches = 0;
  #firstLaunch_ns = 0;
  #lastLaunch_ns = 0;
  #requests = 0;
  #looked_ms = 0;
  /** The rhythm that was steady when last looked at, and since when: launches of one request. */
  #seen: { by: Rhythm["by"]; size: number; since_ms: number } | undefined;
  dropped: RecordSummary["dropped"] = {
    launches: 0,
    requests: 0,
    seconds: 0,
    why: "recorded from the first launch on",
  };
  // The stretch without.
  #began_ms = 0;
  #launchedAtBegin = 0;
  without_ns: number[] = [];
  // The recording.
  readonly moments: Moment[] = [];
  readonly times = new Map<number, number>();
  readonly gpu: GpuRecord[] = [];
  readonly gemms = new Map<number, Gemm>();
  #timedLaunches = 0;
  #timedEnds = 0;
  #recordingSince_ms: number | undefined;
  #asked = 0;

  constructor(recording: Recording, options: RecordOptions, segment: () => Segment | undefined) {
    this.#recording = recording;
    this.#options = options;
    this.#segment = segment;
    recording.wanted = options.mechanism;
    recording.level = options.fromStart ? LEVEL.timed : LEVEL.log;
    if (options.fromStart) this.stage = "recording";
  }

  /** Takes in what has come, and moves on to the next stretch when it is time. */
  look(final = false): void {
    this.#recording.drain((entry) => this.#take(entry), final);
    const now_ms = performance.now();
    if (final) return;
    if (this.stage === "warm-up" && now_ms - this.#looked_ms >= RHYTHM_EVERY_ms) {
      this.#looked_ms = now_ms;
      this.#endWarmUp();
    } else if (this.stage === "without") this.#endWithout(now_ms);
    else if (this.stage === "recording") this.#endRecording(now_ms);
    else if (this.stage === "timing" && (this.#timesAreThere() || now_ms - this.#began_ms > TIMES_ms)) {
      this.#recording.level = LEVEL.quiet;
      if (this.#recording.read("in_force") < LEVEL.timed || now_ms - this.#began_ms > 2 * TIMES_ms) {
        this.#recording.drain((entry) => this.#take(entry));
        this.stage = "done";
      }
    }
  }

  #take({ type, flag, kind, words }: Entry): void {
    const [a, b, c, d, e, really] = words;
    if (type === ENTRY.launch)
      this.#takeLaunch({ number: a, begin_ns: b, end_ns: c, stream: d, gemm: e }, kind, really, flag);
    else if (type === ENTRY.time) this.times.set(a, b);
    else if (type === ENTRY.gpu)
      this.gpu.push({
        correlation: a,
        kind: this.#recording.kind(kind),
        start_ns: b,
        end_ns: c,
        stream: d,
        graph: e,
      });
    else if (type === ENTRY.gemm)
      this.gemms.set(a, { m: b, n: c, k: d, batch: e, type: TYPES[kind - 1] ?? `type ${kind - 1}` });
    else if (type === ENTRY.wait && this.moments.length > 0)
      this.moments.push({ what: "wait", all: flag === 1, begin_ns: b, end_ns: c });
    else if (type === ENTRY.request) this.#takeEnd(flag, kind, b, c);
  }

  #takeLaunch(
    call: Omit<Launch, "token" | "kind" | "ran" | "timed">,
    token: number,
    really: number,
    flag: number,
  ): void {
    this.#launches++;
    this.#firstLaunch_ns ||= call.begin_ns;
    this.#lastLaunch_ns = call.begin_ns;
    if (this.stage === "warm-up") {
      this.#tokens.push(token);
      this.#begins.push(call.begin_ns);
      return;
    }
    if ((flag & 2) === 0) return;
    this.#timedLaunches++;
    this.moments.push({
      what: "launch",
      launch: {
        ...call,
        token,
        timed: (flag & 1) === 1,
        kind: this.#recording.kind(token),
        ran: this.#recording.kind(really > 0 ? really - 1 : token),
      },
    });
  }

  #takeEnd(source: number, level: number, at_ns: number, latency_ns: number): void {
    if (this.stage === "warm-up") this.#ends.push({ source, position: this.#tokens.length, at_ns, latency_ns });
    else if (level === LEVEL.timed) {
      const end = { source, position: this.#timedLaunches, at_ns, latency_ns };
      this.moments.push({ what: "end", end });
      if (this.#isRequest(source)) this.#timedEnds++;
    } else if (this.stage === "without" && this.#isRequest(source)) this.without_ns.push(latency_ns);
  }

  #isRequest(source: number): boolean {
    return this.rhythm?.by === "reports"
      ? source === SOURCE.reported
      : this.rhythm?.by === "waits" && source !== SOURCE.reported;
  }

  #endWarmUp(): void {
    const waited_s = this.#firstLaunch_ns === 0 ? 0 : (this.#lastLaunch_ns - this.#firstLaunch_ns) / 1e9;
    const late = waited_s > this.#options.settle_s;
    const rhythm = rhythmOf(this.#tokens, this.#ends);
    const steady = rhythm && this.#isSteady(rhythm) && this.#lasts(rhythm);
    if (!steady && !late) {
      this.#forget();
      return;
    }
    const hasReports = this.#ends.some(({ source }) => source === SOURCE.reported);
    this.rhythm = rhythm ?? { by: hasReports ? "reports" : "waits", period: 0 };
    const { by, period } = this.rhythm;
    const requests =
      by === "repetition" ? Math.floor(this.#launches / period) : this.#requestsSoFar(by).length + this.#requests;
    this.dropped = {
      launches: this.#launches,
      requests,
      seconds: Math.round(waited_s * 1000) / 1000,
      why: steady
        ? by === "repetition"
          ? `warm-up: then every ${period} launches repeat and take as long as those before`
          : "warm-up: then requests launch the same and take as long as those before"
        : `no steady state in ${this.#options.settle_s} s: ` +
          (rhythm ? "requests go on getting faster or slower" : "what requests launch goes on changing"),
    };
    progress(
      `${requests} ${by === "repetition" ? "iterations" : "requests"} in ${waited_s.toFixed(1)} s are left out ` +
        `(${this.dropped.why}); now as many without recording, to compare with`,
    );
    this.#tokens = [];
    this.#begins = [];
    this.#ends = [];
    this.stage = "without";
    this.#recording.level = LEVEL.quiet;
    this.#began_ms = performance.now();
    this.#launchedAtBegin = this.#work();
  }

  #requestsSoFar(by: "reports" | "waits") {
    return requestsBy(
      this.#tokens,
      this.#ends.filter(({ source }) => (source === SOURCE.reported) === (by === "reports")),
    );
  }

  #isSteady({ by, period }: Rhythm): boolean {
    if (by !== "repetition") return settled(this.#requestsSoFar(by).map(({ end }) => end.latency_ns));
    const { length } = repetition(this.#tokens) ?? { length: 0 };
    const begin = (back: number): number => this.#begins[this.#begins.length - 1 - back] ?? 0;
    const spans = Array.from(
      { length: Math.min(20, Math.floor((length - 1) / period)) },
      (_, index) => begin(index * period) - begin((index + 1) * period),
    ).toReversed();
    return begin(0) - begin(length - 1) >= LEAST_REPEATED_ns && (spans.length < 10 || settled(spans));
  }

  /**
   * Whether it has been so for a while. Programs upload their parameters one by one and try out kernels: each piece is waited for, is
   * like the one before, and is no request. What requests launch by then differs from what they will.
   */
  #lasts(rhythm: Rhythm): boolean {
    const { by, period } = rhythm;
    const sizes =
      by === "repetition"
        ? [period]
        : this.#requestsSoFar(by)
            .slice(-20)
            .map(({ end, from }) => end.position - from);
    const size = median(sizes);
    const now_ms = performance.now();
    const same = this.#seen?.by === by && size <= this.#seen.size * 1.25 && size >= this.#seen.size * 0.8;
    if (!this.#seen || !same) this.#seen = { by, size, since_ms: now_ms };
    return now_ms - this.#seen.since_ms >= LASTING_ms;
  }

  /** Keeps what a repetition may be found in. */
  #forget(): void {
    if (this.#tokens.length < 2 * REMEMBERED) return;
    const cut = this.#tokens.length - REMEMBERED;
    this.#tokens = this.#tokens.slice(cut);
    this.#begins = this.#begins.slice(cut);
    const kept = this.#ends.filter(({ position }) => position > cut);
    this.#requests += this.#ends.length - kept.length;
    this.#ends = kept.map((end) => ({ ...end, position: end.position - cut }));
  }

  /** Launches, graphs, copies and memsets of the program so far. */
  #work(): number {
    const segment = this.#segment();
    if (!segment) return 0;
    return segment.slots().reduce((sum, slot) => {
      const { launches, graph_launches, copies, memsets } = segment.read(slot).usage.counters;
      return sum + launches + graph_launches + copies + memsets;
    }, 0);
  }

  #endWithout(now_ms: number): void {
    const wanted = Math.max(WITHOUT_AT_LEAST, Math.min(this.#options.requests, 100));
    const { period = 0 } = this.rhythm ?? {};
    const spent_ms = now_ms - this.#began_ms;
    if (spent_ms < WITHOUT_AT_LEAST_ms) return;
    if (this.rhythm?.by === "repetition") {
      const iterations = (this.#work() - this.#launchedAtBegin) / period;
      if (iterations < wanted && spent_ms < WITHOUT_AT_MOST_ms) return;
      // They are counted, not told one by one.
      if (iterations > 0)
        this.without_ns = Array.from({ length: Math.floor(iterations) }, () => (spent_ms * 1e6) / iterations);
    } else if (this.without_ns.length < wanted && spent_ms < WITHOUT_AT_MOST_ms) return;
    this.stage = "recording";
    this.#recording.level = LEVEL.timed;
    const { requests, duration_s } = this.#options;
    progress(duration_s === undefined ? `recording ${requests} requests` : `recording for ${duration_s} s`);
  }

  #endRecording(now_ms: number): void {
    if (this.#recordingSince_ms === undefined) {
      if (this.#recording.read("in_force") < LEVEL.timed) return;
      this.#recordingSince_ms = now_ms;
    }
    const { requests, duration_s, fromStart } = this.#options;
    if (duration_s !== undefined) {
      if (now_ms - this.#recordingSince_ms < duration_s * 1000) return;
    } else if (fromStart && !this.rhythm) {
      // Asked for only where a count has to be known.
      if (now_ms - this.#looked_ms < RHYTHM_EVERY_ms) return;
      this.#looked_ms = now_ms;
      this.rhythm = this.ownRhythm();
      if (this.rhythm) this.#timedEnds = this.#endsSoFar();
      return;
    } else if (this.rhythm?.by === "repetition") {
      if (this.#timedLaunches < (requests + 2) * this.rhythm.period) return;
    } else if (this.#timedEnds < requests + 1) return;
    this.#asked = this.#timedLaunches;
    this.#began_ms = now_ms;
    this.stage = "timing";
  }

  #endsSoFar(): number {
    return this.moments.filter((moment) => moment.what === "end" && this.#isRequest(moment.end.source)).length;
  }

  /** The rhythm of what was recorded. `least`: as for rhythmOf. */
  ownRhythm(least?: number): Rhythm | undefined {
    const tokens = this.moments.flatMap((moment) => (moment.what === "launch" ? [moment.launch.token] : []));
    return rhythmOf(
      tokens,
      this.moments.flatMap((moment) => (moment.what === "end" ? [moment.end] : [])),
      least,
    );
  }

  #timesAreThere(): boolean {
    const had =
      this.#recording.read("mechanism") === 2 ? new Set(this.gpu.map(({ correlation }) => correlation)) : this.times;
    return had.size >= this.#asked - this.#recording.read("untimed");
  }

  /** What a reader should know about what is missing. */
  notes(): string[] {
    const lost = (field: string, what: string): string[] => {
      const count = this.#recording.read(field);
      return count > 0 ? [`${count} ${what}`] : [];
    };
    return [
      ...lost("lost", "entries were lost because the recording was full: launches are missing"),
      ...lost("untimed", "launches were not timed: too many were unfinished at once, or their context was not current"),
      ...lost("dropped", "records were dropped by CUPTI"),
      ...lost("kinds_lost", "launches are missing: there are more kinds of kernels than a recording has room for"),
      ...lost("others", "further processes of the program use the GPU; theirs are not in the profile"),
    ];
  }
}

/**
 * Runs the program and writes its profile. The exit status is the program's where it failed by itself. No summary: it was interrupted
 * before a request had been recorded, and nothing was written.
 */
export async function record(
  native: Native,
  options: RecordOptions,
): Promise<{ summary: RecordSummary | undefined; exitStatus: number }> {
  await checkApart([{ option: "--output", file: options.out }]);
  if (options.out !== undefined) await new WholeFile(options.out).check();
  const folder = resolve(options.segmentFolder ?? defaultSegmentFolder(process.env));
  const own = `${process.getuid?.() ?? 0}-${process.pid}`;
  let recording: Recording | undefined;
  // Before there is anything to remove.
  using _ = onEnd(() => recording?.remove());
  recording = Recording.create(native, join(folder, `rigel-record-${own}`), true);
  const { path } = recording;
  const planned = await namingOptions(
    OPTIONS,
    async () => await planOf(options, native, path, simulationState(folder)),
  );
  progress(`${planned.device.name}, ${planned.device.uuid}`);
  using interrupt = new Interrupt();
  let segment: Segment | undefined;
  const recorder = new Recorder(recording, options, () => segment);
  const timer = setInterval(() => recorder.look(), LOOK_ms);
  let exitStatus: number;
  let notes: string[];
  try {
    const outcome = await namingOptions(
      OPTIONS,
      async () =>
        await launch(planned, native, {
          segmentFolder: folder,
          start_timeout_s: options.start_timeout_s,
          interrupt,
          started: (made) => (segment = made),
          files: [path],
          over: () => recorder.stage === "done" && !options.letRun,
        }),
    );
    exitStatus = interrupt.signal ? SIGNAL_STATUS[interrupt.signal] : outcome.exitStatus;
    const problem = outcome.report.clients[0]?.attach_problem;
    notes = problem ? [problem] : [];
  } finally {
    clearInterval(timer);
  }
  recorder.look(true);
  try {
    return { summary: await write(recorder, recording, options, notes), exitStatus };
  } catch (thrown) {
    if (!interrupt.signal || !(thrown instanceof TooLittle)) throw thrown;
    progress("interrupted before a whole request was recorded; nothing is written");
    return { summary: undefined, exitStatus };
  }
}

/** What the user gave for fields of its configuration. */
const OPTIONS = { "command.command[0]": "the command", "command.command": "the command", device: "--device" };

async function planOf(options: RecordOptions, native: Native, recording: string, state: string): Promise<Plan> {
  const name = "program";
  const config: Config = {
    file: "rigel profile",
    clients: [{ name, class: "high", isolation: "shared", command: options.command, env: { RIGEL_RECORD: recording } }],
    policy: { name: "none", preempt: true },
    sharing: "auto",
    device: options.device,
    simulated: { preset: options.preset, mps: false },
    warmup_s: 0,
    hang_s: 0,
    recorder: true,
    compare: false,
    notes: [],
    statedKernels: new Map(),
    fieldNames: [{ client: "command", profile: "command", iterations: "command", arrivals: "command" }],
  };
  return await plan(config, native, state);
}

/** There is nothing that could be written. */
class TooLittle extends RigelError {
  constructor(message: string) {
    super("command", message);
  }
}

async function write(
  recorder: Recorder,
  recording: Recording,
  options: RecordOptions,
  further: string[],
): Promise<RecordSummary> {
  const { moments, times, gpu, gemms, dropped, without_ns } = recorder;
  const mechanism = ([null, "events", "cupti"] as const)[recording.read("mechanism")] ?? null;
  const why = recording.text("why") || null;
  if (!moments.some(({ what }) => what === "launch"))
    throw new TooLittle(
      further.length > 0
        ? `the program was no client of Rigel, so that nothing was recorded: ${further.join("; ")}`
        : dropped.launches > 0 || recorder.stage !== "warm-up"
          ? "the program ended before anything was recorded; let it run longer, or record less (--requests)"
          : "the program ended during its warm-up, before a steady state was seen; let it run longer, or record it from its " +
            "first launch on (--from-start)",
    );
  const recorded = {
    moments,
    times,
    gpu,
    gemms,
    event_ns: recording.read("event_ns"),
    cupti: mechanism === "cupti",
    whole: options.fromStart,
    kinds: recording.counts().map(({ kind }) => kind),
    device: recording.text("device"),
    sms: recording.read("sms"),
  };
  const rhythm = recorder.ownRhythm(FEW) ?? recorder.rhythm ?? anyEnd(moments);
  const rows = rowsOf(recorded, rhythm);
  // What was still under way when recording ended is not whole.
  const whole = rows.requests.filter(({ left_out }) => left_out === 0);
  const all = whole.length > 0 ? whole : rows.requests;
  const { requests, fromStart } = options;
  const wanted = options.duration_s !== undefined ? all : fromStart ? all.slice(0, requests) : all.slice(-requests);
  const notes = [...recorder.notes(), ...further];
  const inWanted = (of: (request: Request) => number): number =>
    wanted.reduce((total, request) => total + of(request), 0);
  const estimated = inWanted((request) => request.estimated);
  const leftOut = inWanted((request) => request.left_out);
  if (estimated > 0) notes.push(`${estimated} launches have the time of others of their kind`);
  if (leftOut > 0) notes.push(`${leftOut} launches have no time and are left out`);
  if (rows.unseen > 0)
    notes.push(`${rows.unseen} operations of the GPU belong to no call that was seen and are left out`);
  if (wanted.length === 0)
    throw new TooLittle(
      `no whole request was recorded (${moments.length} launches and waits were); let the program run longer, or record ` +
        "for a time (--duration)",
    );
  const one = typical(wanted, mechanism === "events");
  const every = wanted.flatMap((request, index) => request.rows.map((row) => ({ ...row, request: index })));
  const operations = options.all ? every : one.rows;
  // Of a loop all iterations, as single ones are long where the host waits.
  const with_ns = (rhythm.by === "repetition" ? rows.requests : wanted).map(({ latency_ns }) => latency_ns);
  const overhead = without_ns.length > 0 ? compare(without_ns, with_ns, rhythm.by === "repetition") : null;
  const summary: RecordSummary = {
    schema: 1,
    out: options.out ?? null,
    device: recorded.device,
    mechanism,
    why: mechanism === "events" ? why : null,
    requests_by: rhythm.by,
    requests: wanted.length,
    alike: one.alike,
    operations: operations.length,
    kernels: operations.filter(({ kind }) => kind === "kernel").length,
    gpu_ms: operations.reduce((sum, { duration_ns }) => sum + duration_ns, 0) / 1e6,
    dropped,
    overhead,
    event_ns: recorded.event_ns,
    notes,
  };
  await writeProfile(operations, summary, options);
  return summary;
}

/** Where no rhythm is seen, whatever has ended is a request. */
function anyEnd(moments: readonly Moment[]): Rhythm {
  const reported = moments.some((moment) => moment.what === "end" && moment.end.source === SOURCE.reported);
  return { by: reported ? "reports" : "waits", period: 0 };
}

/** Of iterations that were only counted the mean is known, so that of the recorded ones is compared with it. */
function compare(
  without_ns: readonly number[],
  with_ns: readonly number[],
  counted: boolean,
): RecordSummary["overhead"] {
  const middle = counted ? mean : median;
  const [before, during] = [middle(without_ns), middle(with_ns)];
  return {
    without_ms: before / 1e6,
    with_ms: during / 1e6,
    ratio: before > 0 ? during / before : 0,
    requests: [without_ns.length, with_ns.length],
  };
}

function mean(values: readonly number[]): number {
  return values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);
}

async function writeProfile(
  operations: readonly Operation[],
  summary: RecordSummary,
  options: RecordOptions,
): Promise<void> {
  const { overhead, mechanism, event_ns, dropped } = summary;
  const facts = new Map<string, string>([
    ["device", summary.device],
    ["tool", "rigel"],
    ["times", mechanism === "cupti" ? "CUPTI" : `timing events, ${event_ns} ns taken off each`],
    ["gaps", "host"],
    ["requests", String(summary.requests)],
    ["requests_by", summary.requests_by ?? ""],
    ...(options.all ? [] : [["alike", String(summary.alike)] as const]),
    ["dropped", `${dropped.launches} launches, ${dropped.requests} requests; ${dropped.why}`],
    ...(overhead ? [["slowdown", overhead.ratio.toFixed(3)] as const] : []),
    ...(overhead && !options.all ? [["iteration_ms", overhead.without_ms.toFixed(4)] as const] : []),
    ["command", options.command.join(" ")],
  ]);
  const head = `${factsLine(facts, 2)}${RECORDED_HEADER}`;
  if (options.out === undefined) {
    await options.print?.(head + operations.map(recordedRow).join(""));
    return;
  }
  await using file = new WholeFile(options.out);
  await file.write(head);
  for (const operation of operations) await file.write(recordedRow(operation));
  await file.finish();
}

/** The summary as people read it. */
export function recordText(summary: RecordSummary): string {
  const { out, device, mechanism, why, requests, alike, operations, kernels, gpu_ms, overhead, requests_by, event_ns } =
    summary;
  const how =
    mechanism === "cupti"
      ? "CUPTI"
      : `timing events round each launch, ${event_ns} ns taken off each${why === null ? "" : ` (not CUPTI: ${why})`}`;
  const by = { reports: "as the program reports them", waits: "ended by its waits", repetition: "by what repeats" };
  return [
    `${out ?? "standard output"}: ${operations} operations, ${kernels} kernels, ${gpu_ms.toFixed(3)} ms on ${device}`,
    `times: ${how}`,
    `${requests} requests recorded, ${requests_by === null ? "" : by[requests_by]}; ${alike} of them launch the same`,
    `left out: ${summary.dropped.launches} launches in ${summary.dropped.seconds} s (${summary.dropped.why})`,
    overhead
      ? `recording made requests ${overhead.ratio.toFixed(3)} times as long: ${overhead.with_ms.toFixed(3)} ms against ` +
        `${overhead.without_ms.toFixed(3)} ms before (${requests_by === "repetition" ? "means" : "medians"} of ${overhead.requests[1]} and ${overhead.requests[0]})`
      : "what recording costs was not measured: there was no stretch without it",
    ...summary.notes.map((note) => `note: ${note}`),
  ].join("\n");
}
