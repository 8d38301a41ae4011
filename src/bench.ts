/**
 * bench.ts: `rigel bench`: runs pairs of programs in every way of sharing a GPU, and says what each way costs and gives.
 *
 * Ratios are taken within a round, as hosts drift by more than what is to be seen. A program that fails ends its run and no
 * other; Ctrl-C ends the benchmark and what was measured so far is reported. Without a GPU the same runs on the simulated
 * one, with recorded profiles for programs, and says so wherever a number is shown.
 */

import { mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { cpus, tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { type Command, Option } from "commander";
import packageJson from "../package.json" with { type: "json" };
import { between, whole } from "./arguments.ts";
import {
  type Failure,
  type Job,
  type Load,
  type Timing,
  anewJobs,
  failureOf,
  gpuTimeJob,
  inTime,
  soloJob,
} from "./bench-jobs.ts";
import { liveJobs } from "./bench-live.ts";
import {
  type Pair,
  type Program,
  type Way,
  allWays,
  choosePairs,
  choosePolicies,
  chooseWays,
  isLive,
} from "./bench-matrix.ts";
import { readDocuments } from "./bench-from.ts";
import { overviewPicture } from "./bench-overview.ts";
import { type BenchResult, type Shown, documentOf, markdown, shownOf, togetherOf } from "./bench-report.ts";
import { page } from "./bench-page.ts";
import { Interrupted, RunFailed, Runner } from "./bench-run.ts";
import { ALONE, ARRIVALS, type Arrivals } from "./bench-stats.ts";
import { type Config, policySchema } from "./config.ts";
import { type Device, Devices } from "./device.ts";
import { RigelError, reason } from "./errors.ts";
import { Guard } from "./guard.ts";
import { Interrupt, SIGNAL_STATUS } from "./interrupt.ts";
import { progress } from "./log.ts";
import { Mps } from "./mps.ts";
import { Native } from "./native.ts";
import { checkApart, checkOutput, writeOutput } from "./output.ts";
import { defaultSegmentFolder } from "./plan.ts";
import { allowedProcessors } from "./proc.ts";

interface Flags {
  pairs?: string;
  ways?: string;
  policies?: string;
  policyJson: string[];
  rounds?: number;
  duration?: number;
  lead?: number;
  window?: number;
  learn?: number;
  copies?: number;
  pin?: number;
  rate: number;
  arrivals: Arrivals;
  seed: number;
  live?: true;
  anew?: true;
  solo?: true;
  device: Config["device"];
  dryRun?: true;
  json?: string;
  html?: string;
  markdown?: string;
  svg?: string;
  from?: [string, ...string[]];
}

/** What a benchmark without --pairs may take. */
const DEFAULT_LIMIT_s = 600;

const EXAMPLES = `
Examples:
  rigel bench                                          as many pairs as fit ten minutes, the ways in turn while they run
  rigel bench --anew --pairs bert+gpt2-train           programs started anew for every way
  rigel bench --solo --pairs all                       what Rigel costs each program with nothing beside it
  rigel bench --pairs resnet50+resnet50-train --ways "time slicing;rigel priority" --rounds 1 --html report.html
  rigel bench --policies none,gentle --policy-json 'gentle={"name":"priority","inflight":2}'
  rigel bench --from first.json second.json --svg pairs.svg   of two runs, as on two GPUs of a host, one table and picture

Pairs are a high and one or more best-effort programs:
  high         resnet50, bert; resnet50-graph, bert-graph: the same as one CUDA graph; gpt2-decode;
               resnet50-bytes: images made of bytes first; resnet50-announced: the same, said to be coming before that;
               resnet50-mixed, bert-mixed, bert-mixed-graph: batches of three sizes by chance;
               resnet50-served, bert-served, bert-mixed-served: requests that come over a connection;
               bert-texts: texts of 16 lengths by chance;
               gpt2-stream: decoding without graphs, each token read back (best with --rate 10)
  best-effort  resnet50-train, bert-train, gpt2-train, mobilenet-train, gpt2-train-graph
  --pairs bert-served is that one with each best-effort one, --pairs all each high program so, and
  resnet50 and resnet50-served with resnet50-train+gpt2-train.
On a machine without a GPU those run that a profile was recorded of: resnet50, bert, and all best-effort ones but
bert-train and gpt2-train-graph.

Ways: alone; time slicing; MPS; MPS, client priority; alone, Rigel; and for each policy "rigel NAME" and
"rigel NAME, MPS". All but the first are compared with "alone" in the same round.

The programs need python3 with torch, torchvision and transformers. Nothing is downloaded; weights are random.`;

/** Adds the command. `device` parses what --device takes. */
export function addBench(program: Command, device: (text: string) => Config["device"]): void {
  program
    .command("bench")
    .description("measure latency and throughput of pairs of programs in every way of sharing the GPU")
    .option(
      "--pairs <names>",
      "pairs, or high programs for all pairs of each, separated by commas; or all (default: as many as fit ten minutes)",
    )
    .option(
      "--ways <names>",
      "ways, separated by semicolons (default: every way there is here; where they take turns on a GPU, those that can, without Rigel's under MPS)",
    )
    .option(
      "--policies <names>",
      "policies to run under Rigel, separated by commas (default: the default one; with --anew, and simulated, priority too)",
    )
    .option("--policy-json <name={...}>", "what a policy's configuration is; may be repeated", collect, [])
    .option("--rounds <count>", "rounds; each runs every way once (default: 3; simulated: 1)", whole(1, 1000))
    .option(
      "--duration <seconds>",
      "seconds measured for a way and round (default: 2.5; with --anew 7; simulated: 2), with --solo in all (60; simulated: 4)",
      between(0.001, 1e6),
    )
    .option(
      "--lead <seconds>",
      "seconds for programs to start and warm up (default: 20; with --anew, --solo 12; simulated: 3)",
      between(0.001, 1e6),
    )
    .option(
      "--window <seconds>",
      "seconds of a window where ways take turns, or nearly, as windows divide --duration (default: 2.5; simulated: 2)",
      between(0.001, 600),
    )
    .option(
      "--learn <seconds>",
      "seconds that policy slo has to find its settings before anything is counted, where ways take turns (default: 20)",
      between(0.001, 600),
    )
    .option("--rate <per second>", "requests a second; with --solo, of all copies together", between(0.001, 1e6), 60)
    .addOption(
      new Option("--arrivals <kind>", "how requests arrive; closed: one user, who asks again; with --solo, uniform")
        .choices(ARRIVALS)
        .default("poisson"),
    )
    .option(
      "--seed <number>",
      "seed of the arrivals; with --solo, of the intervals' bootstrap, and of which requests go past Rigel",
      whole(0, 0xffff_ffff),
      1,
    )
    .option(
      "--live",
      "start programs once, and let the ways take turns; a way that decides how they start has programs of its own, all at once " +
        "(the default, but on the simulated GPU)",
    )
    .option("--anew", "start programs anew for every way of every round (the default on the simulated GPU)")
    .option(
      "--solo",
      "instead: each high program alone; evenly spaced requests go to bare and governed copies in turn, and one of each two " +
        "that a governed copy gets past Rigel",
    )
    .option(
      "--copies <count>",
      "with --solo: copies of each kind, bare and governed (default: 4; simulated: 1)",
      whole(1, 1000),
    )
    .option(
      "--pin <processor>",
      "with --solo: of each kind the first copy runs on this processor only, the next on the next, so that what processors " +
        "differ is not between bare and governed",
      whole(0, 100_000),
    )
    .option("--device <device>", "auto, simulated, a device index, or a UUID", device, "auto")
    .option("--dry-run", "show what would run and how long it would take, with --json - as JSON; write no file")
    .option("--json <file>", "write everything measured as JSON; - is standard output")
    .option("--markdown <file>", "write the table as Markdown")
    .option("--html <file>", "write a page with plots")
    .option("--svg <file>", "write a picture: all pairs at a glance, a line each")
    .option(
      "--from <files...>",
      "instead: the table, page and picture of what --json wrote before, of several files together; measures nothing",
    )
    .addHelpText("after", EXAMPLES)
    .action(runBench);
}

function collect(text: string, previous: string[]): string[] {
  return [...previous, text];
}

/** Before minutes are spent on what could not be written down. */
async function checkOutputs({ json, html, markdown: md, svg, from }: Flags): Promise<void> {
  const files = [
    ["--json", json === "-" ? undefined : json],
    ["--markdown", md],
    ["--html", html],
    ["--svg", svg],
  ] as const;
  await checkApart(
    files.map(([option, file]) => ({ option, file })),
    from,
  );
  for (const [option, file] of files) if (file !== undefined) await checkOutput(option, file);
}

/** Where requests alternate one by one, what else decides when they come would be without effect. */
function checkSolo(flags: Flags, command: Command): void {
  for (const name of ["live", "anew"] as const)
    if (flags[name])
      throw new RigelError(
        "command",
        `rigel bench: expected either --${name} or --solo: alone there are no ways to compare`,
      );
  const given = (name: keyof Flags): boolean => command.getOptionValueSource(name) === "cli";
  if (given("rounds"))
    throw new RigelError(
      "command",
      "rigel bench: expected no --rounds with --solo: --duration says how long it measures",
    );
  if (given("svg"))
    throw new RigelError("command", "rigel bench: expected no --svg with --solo: it is a picture of pairs");
  if (given("window"))
    throw new RigelError("command", "rigel bench: expected no --window with --solo: requests alternate one by one");
  if (given("learn"))
    throw new RigelError("command", "rigel bench: expected no --learn with --solo: each program has the GPU to itself");
  for (const name of ["ways", "policies", "policyJson"] as const)
    if (given(name))
      throw new RigelError(
        "command",
        `rigel bench: expected no --${name === "policyJson" ? "policy-json" : name} with --solo: each program has the GPU to itself, under priority`,
      );
  if (given("arrivals") && flags.arrivals !== "uniform")
    throw new RigelError(
      "command",
      `rigel bench: expected no --arrivals ${flags.arrivals} with --solo: its requests are evenly spaced`,
    );
}

function checkPin(first: number, copies: number, solo: boolean): void {
  if (!solo) throw new RigelError("command", "rigel bench: expected --pin with --solo only");
  const allowed = new Set(allowedProcessors());
  if (Array.from({ length: copies }, (_, copy) => first + copy).some((processor) => !allowed.has(processor)))
    throw new RigelError(
      "command",
      `rigel bench: --pin ${first}: expected ${copies} processors from there on, one for each copy of a kind; there are ` +
        [...allowed].join(" "),
    );
  if (!Bun.which("taskset")) throw new RigelError("command", "rigel bench: --pin needs taskset (util-linux)");
}

/** What else is given says how to measure. */
function checkFrom(command: Command): void {
  const read = new Set(["--from", "--json", "--markdown", "--html", "--svg"]);
  for (const { long } of command.options.filter(
    (option) => command.getOptionValueSource(option.attributeName()) === "cli",
  ))
    if (long !== undefined && !read.has(long))
      throw new RigelError("command", `rigel bench: expected no ${long} with --from, which measures nothing`);
}

async function showDocuments(flags: Flags, from: [string, ...string[]], command: Command): Promise<void> {
  checkFrom(command);
  await checkOutputs(flags);
  const shown = await readDocuments(from);
  const json = (): string => JSON.stringify(togetherOf(shown));
  print(flags.json === "-" ? json() : markdown(shown));
  if (!(await write(flags, shown, json))) process.exitCode = 1;
}

async function runBench(flags: Flags, command: Command): Promise<void> {
  if (flags.from) return await showDocuments(flags, flags.from, command);
  if (flags.live && flags.anew) throw new RigelError("command", "rigel bench: expected either --live or --anew");
  if (flags.solo) checkSolo(flags, command);
  else if (flags.copies !== undefined)
    throw new RigelError("command", "rigel bench: expected --copies with --solo only");
  await checkOutputs(flags);
  const native = await Native.load();
  const state = join(defaultSegmentFolder(process.env), `rigel-bench-sim-${process.getuid?.() ?? 0}-${process.pid}`);
  const simulation = { state, preset: "h200", mps: false } as const;
  const device = await new Devices(native.files, simulation).choose(flags.device, "--device");
  const { simulated } = device;
  const { solo = false } = flags;
  const live = flags.live ?? !(simulated || solo || flags.anew);
  const usual = usualTiming({ simulated, solo, live });
  const timing: Timing = {
    rounds: flags.rounds ?? usual.rounds,
    duration_s: flags.duration ?? usual.duration_s,
    lead_s: flags.lead ?? usual.lead_s,
    window_s: flags.window ?? usual.window_s,
    learn_s: flags.learn ?? usual.learn_s,
    copies: flags.copies ?? (simulated ? 1 : 4),
    pin: flags.pin,
  };
  if (timing.pin !== undefined) checkPin(timing.pin, timing.copies, solo);
  for (const name of ["window", "learn"] as const)
    if (flags[name] !== undefined && !live)
      throw new RigelError("command", `rigel bench: expected --${name} where ways take turns (--live)`);
  const load: Load = { rate_per_s: flags.rate, arrivals: solo ? "uniform" : flags.arrivals, seed: flags.seed };
  const policies = choosePolicies(flags.policies, flags.policyJson, live && !simulated ? [] : ["priority"]);
  const hasDaemon = Bun.which("nvidia-cuda-mps-control") !== null;
  const there = allWays(policies, { mps: simulated || hasDaemon, clientPriority: !simulated && hasDaemon });
  let ways = flags.ways === undefined && live ? usualWays(there, simulated) : chooseWays(flags.ways, there);
  const candidates = choosePairs(flags.pairs, simulated);
  const notes: string[] = [];
  if (simulated)
    notes.push("simulated: the GPU is a model, and the programs are replays of profiles recorded on an H200");
  else if (!hasDaemon) notes.push("nvidia-cuda-mps-control is not on PATH: the ways with MPS are left out");

  // Before there is anything that a signal could leave behind.
  using interrupt = new Interrupt();
  const scratch = scratchFolder();
  // Whatever ends this process: nobody has the first in its environment, programs are watched where they are started.
  using _ = new Guard(`RIGEL_BENCH_SCRATCH=${scratch}`, [scratch, state]);
  const segmentFolder = resolve(defaultSegmentFolder(process.env));
  const runner = new Runner({ native, device, simulation, scratch, segmentFolder, interrupt });
  const daemon = new Daemon(scratch, device);
  const bed = {
    runner,
    native,
    simulated,
    load,
    environment: (mps: boolean) => (simulated ? {} : daemon.environment(mps)),
  };
  const jobsOf = (pairs: readonly Pair[]): Job[] => {
    const highs = [...new Set(pairs.map(({ high }) => high))];
    const pairNames = (high: Program): string =>
      pairs
        .filter((pair) => pair.high === high)
        .map(({ name }) => name)
        .join(",");
    if (solo) return highs.map((high) => soloJob(bed, pairNames(high), high, policySchema.parse({ name: "priority" })));
    const gpuTimes = highs.map((high) => gpuTimeJob(bed, pairNames(high), high));
    const inTurn = pairs.flatMap((pair) => (live ? liveJobs(bed, pair, ways) : []));
    const anew: Job[] = [];
    for (let round = 0; round < timing.rounds; round++)
      for (const pair of pairs) for (const way of anewWays(ways, live)) anew.push(...anewJobs(bed, pair, way, round));
    return [...gpuTimes, ...inTurn, ...anew];
  };
  try {
    if (ways.some((way) => way.mps) && !simulated && !solo && !flags.dryRun)
      try {
        await daemon.start(interrupt);
      } catch (thrown) {
        if (flags.ways !== undefined || !(thrown instanceof RigelError)) throw thrown;
        ways = ways.filter((way) => !way.mps);
        notes.push(`the ways with MPS are left out: ${thrown.message}`);
      }
    const pairs = flags.pairs === undefined ? fitting(candidates, jobsOf, timing) : candidates;
    const jobs = jobsOf(pairs);
    progress(`${device.name}: ${pairs.map(({ name }) => name).join(", ")}`);
    for (const note of notes) progress(`note: ${note}`);
    progress(`${jobs.length} runs, about ${duration(total_s(jobs, timing))}`);
    if (flags.dryRun) {
      const runs = jobs.map((job) => ({ title: job.title, seconds: Math.round(job.seconds(timing)) }));
      if (flags.json === "-")
        print(JSON.stringify({ schema: 1, dry_run: true, device, seconds: total_s(jobs, timing), runs, notes }));
      else print(runs.map(({ title, seconds }) => `${title} (${seconds} s)`).join("\n"));
      return;
    }
    const result: BenchResult = {
      started: new Date().toISOString(),
      device,
      driver: simulated ? null : driverVersion(device),
      versions: { rigel: packageJson.version, bun: Bun.version },
      host: hostOf(),
      options: { ...timing, ...load, live, solo },
      policies: Object.fromEntries(policies),
      pairs: pairs.map(({ name, high, best }) => ({ name, high: high.title, best: best.map(({ title }) => title) })),
      runs: jobs.length,
      done: 0,
      gpu_times: [],
      measurements: [],
      solo: [],
      loops: [],
      failures: [],
      notes,
    };
    await runJobs(jobs, timing, result, interrupt, flags);
    const document = documentOf(result);
    const shown = shownOf(document);
    const json = (): string => JSON.stringify(document);
    // First: files may fail.
    print(flags.json === "-" ? json() : markdown(shown));
    const wrote = await write(flags, shown, json);
    for (const { title, problem } of result.failures) progress(`failed: ${title}: ${problem}`);
    const ok = wrote && result.failures.length === 0;
    process.exitCode = interrupt.signal ? SIGNAL_STATUS[interrupt.signal] : ok ? 0 : 1;
  } finally {
    await daemon.stop();
    rmSync(scratch, { recursive: true, force: true });
    rmSync(state, { force: true });
  }
}

/** Those that take turns where no option says which: of Rigel's in time slices, as under MPS each has to find its settings once more. */
export function usualWays(there: readonly Way[], simulated: boolean): Way[] {
  return there.filter((way) => isLive(way) && (simulated || !(way.mps && way.policy)));
}

/** What is measured where no option says so. */
export function usualTiming(how: {
  simulated: boolean;
  solo: boolean;
  live: boolean;
}): Pick<Timing, "rounds" | "duration_s" | "lead_s" | "window_s" | "learn_s"> {
  const turns = { window_s: how.simulated ? 2 : 2.5, learn_s: 20 };
  if (how.simulated) return { rounds: 1, duration_s: how.solo ? 4 : 2, lead_s: 3, ...turns };
  if (how.solo) return { rounds: 1, duration_s: 60, lead_s: 12, ...turns };
  return how.live
    ? { rounds: 3, duration_s: 2.5, lead_s: 20, ...turns }
    : { rounds: 3, duration_s: 7, lead_s: 12, ...turns };
}

/** With --live, what is left to be started anew, and what it is compared with: all where none of them take turns. */
function anewWays(ways: readonly Way[], live: boolean): Way[] {
  const left = live && ways.some(({ together }) => together) ? ways.filter((way) => !isLive(way)) : [...ways];
  return live && left.length > 0 ? ways.filter((way) => way.name === ALONE || left.includes(way)) : left;
}

/** The first pairs that take no longer than ten minutes together; one at least. */
function fitting(pairs: readonly Pair[], jobsOf: (pairs: readonly Pair[]) => Job[], timing: Timing): Pair[] {
  let count = 1;
  while (count < pairs.length && total_s(jobsOf(pairs.slice(0, count + 1)), timing) <= DEFAULT_LIMIT_s) count++;
  return pairs.slice(0, count);
}

function total_s(jobs: readonly Job[], timing: Timing): number {
  return jobs.reduce((sum, job) => sum + job.seconds(timing), 0);
}

async function runJobs(
  jobs: readonly Job[],
  timing: Timing,
  result: BenchResult,
  interrupt: Interrupt,
  flags: Flags,
): Promise<void> {
  const kept = flags.json === "-" ? undefined : flags.json;
  let told = false;
  for (const [index, job] of jobs.entries()) {
    if (interrupt.signal) return;
    const fail = (failure: Failure): void => {
      result.failures.push(failure);
      progress(`[${index + 1}/${jobs.length}] ${failure.title}: FAILED: ${failure.problem}`);
      for (const line of failure.output) progress(`  ${line}`);
    };
    try {
      const found = await inTime(job, timing, () => interrupt.signal !== undefined);
      result.measurements.push(...(found.measurements ?? []));
      if (found.gpu_time) result.gpu_times.push({ ...found.gpu_time, pairs: job.pair.split(",") });
      if (found.solo) result.solo.push(found.solo);
      result.loops.push(...(found.loops ?? []));
      for (const failure of found.failures ?? []) fail(failure);
      for (const note of found.notes ?? []) result.notes.push(`${job.title}: ${note}`);
      Object.assign(result.versions, found.versions);
      const late = found.late_s > 0 ? ` (LATE by ${found.late_s.toFixed(1)} s: raise --lead)` : "";
      if (late) result.notes.push(`${job.title}: a program was ready ${found.late_s.toFixed(1)} s late`);
      const left_s = total_s(jobs.slice(index + 1), timing);
      const left = index + 1 < jobs.length ? `; about ${duration(left_s)} left` : "";
      progress(`[${index + 1}/${jobs.length}] ${job.title}: ${found.said}${late}${left}`);
    } catch (thrown) {
      if (thrown instanceof Interrupted) return;
      if (!(thrown instanceof RunFailed) && !(thrown instanceof RigelError)) throw thrown;
      fail({ title: job.title, ...failureOf(thrown) });
    }
    result.done = index + 1;
    // What has been measured is not lost, however this ends.
    const problem =
      kept === undefined ? undefined : await tryToWrite("--json", kept, JSON.stringify(documentOf(result)));
    if (problem !== undefined && !told) progress(`${problem}; it is tried again after each run`);
    told ||= problem !== undefined;
  }
}

/** False if a file could not be written. */
async function write(flags: Flags, shown: Shown, json: () => string): Promise<boolean> {
  const outputs: [string, string | undefined, () => string][] = [
    ["--json", flags.json === "-" ? undefined : flags.json, json],
    ["--markdown", flags.markdown, () => `${markdown(shown)}\n`],
    ["--html", flags.html, () => page(shown)],
    ["--svg", flags.svg, () => overviewPicture(shown.rows, `Pairs that share ${shown.of[0].device.name}`)],
  ];
  let ok = true;
  for (const [option, file, content] of outputs) {
    if (file === undefined) continue;
    const problem = await tryToWrite(option, file, content());
    progress(problem ?? `wrote ${file}`);
    ok &&= problem === undefined;
  }
  return ok;
}

/** Why it could not be written, if so. */
async function tryToWrite(option: string, file: string, text: string): Promise<string | undefined> {
  try {
    await writeOutput(option, file, text);
    return undefined;
  } catch (thrown) {
    if (thrown instanceof RigelError) return thrown.message;
    throw thrown;
  }
}

function duration(seconds: number): string {
  return seconds < 90 ? `${Math.ceil(seconds)} s` : `${Math.ceil(seconds / 60)} min`;
}

function print(text: string): void {
  process.stdout.write(`${text}\n`);
}

function driverVersion({ uuid }: Device): string | null {
  if (!Bun.which("nvidia-smi")) return null;
  const { stdout, exitCode } = Bun.spawnSync(
    ["nvidia-smi", `--id=${uuid}`, "--query-gpu=driver_version", "--format=csv,noheader"],
    { stderr: "ignore" },
  );
  return exitCode === 0 ? stdout.toString().trim() : null;
}

function hostOf(): BenchResult["host"] {
  const processors = cpus();
  return {
    processor: processors[0]?.model ?? "unknown",
    processors: processors.length,
    kernel: readFileSync("/proc/sys/kernel/osrelease", "utf8").trim(),
  };
}

/** An MPS control daemon of the benchmark's own, and the environment in which programs find it, or none at all. */
class Daemon {
  readonly #device: Device;
  readonly #none: string;
  #mps: Mps | undefined;

  constructor(scratch: string, device: Device) {
    this.#device = device;
    this.#none = join(scratch, "no-mps");
    mkdirSync(this.#none);
  }

  environment(mps: boolean): Record<string, string> {
    return { CUDA_MPS_PIPE_DIRECTORY: (mps ? this.#mps?.sharing.pipe_directory : null) ?? this.#none };
  }

  async start(interrupt: Interrupt): Promise<void> {
    const own = { mode: "mps", daemon: "private", pipe_directory: null } as const;
    this.#mps = await Mps.open(
      own,
      [{ mps: true, hidden: false, sm_percent: undefined, device: this.#device }],
      "--ways",
      interrupt,
      "name ways without MPS",
    );
  }

  async stop(): Promise<void> {
    await this.#mps?.[Symbol.asyncDispose]();
  }
}

/** For what the runs write; removed at the end. */
function scratchFolder(): string {
  try {
    return mkdtempSync(join(tmpdir(), "rigel-bench-"));
  } catch (thrown) {
    throw new RigelError(
      "machine",
      `no folder can be made in ${tmpdir()} (${reason(thrown)}); set TMPDIR to a folder that exists and can be written to`,
      { cause: thrown },
    );
  }
}
