/** profile-command.ts: the command lines of `rigel import` and `rigel profile` with what it can do with a profile. */

import { Command, Option } from "commander";
import { once } from "node:events";
import { above0, whole } from "./arguments.ts";
import type { Config } from "./config.ts";
import { RigelError } from "./errors.ts";
import { TOOLS, type Tool } from "./import-detect.ts";
import { importProfiles, importText } from "./import.ts";
import { diffProfiles, diffText } from "./profile-diff.ts";
import { viewHtml } from "./profile-html.ts";
import { Native } from "./native.ts";
import { viewProfile, viewText } from "./profile-show.ts";
import { checkApart, writeOutput } from "./output.ts";
import { record, recordText } from "./record.ts";
import { MECHANISMS, type Mechanism } from "./recording.ts";

const IMPORT_EXAMPLES = `
The tool may be named first (${TOOLS.join(", ")}); without, it is found out from the file.

Examples:
  nsys stats --report cuda_gpu_trace --format csv train.nsys-rep > train.csv
  rigel import nsys train.csv -o train-profile.csv
  rigel import train.csv --metrics ncu.csv -o train-profile.csv   what bounds each kernel, from ncu --csv
  rigel import torch trace.json.gz --request 3 -o step.csv        the fourth ProfilerStep alone
  rigel import trace.json --json                                  only read and report
  rigel import train-profile.csv --format orion -o kernels.csv    Orion's form of a profile of Rigel's`;

const RECORD_EXAMPLES = `
A command after -- is run and recorded: every kernel, graph, copy and memset, once the program is past its warm-up. What is
written is one request (or training iteration) that stands for all, to be replayed; with --all, every one.

Examples:
  rigel profile -o train.csv -- python train.py           20 iterations, then the program is stopped
  rigel profile --duration 10 --all -o all.csv -- ./serve  every request of 10 s
  rigel profile --let-run -o train.csv -- python train.py  the program goes on to its end
  rigel profile show train.csv                             what is in it
  rigel profile diff yesterday.csv train.csv               what has changed`;

const SHOW_EXAMPLES = `
Examples:
  rigel profile show train-profile.csv
  rigel profile show train-profile.csv --html train.html`;

const DIFF_EXAMPLES = `
Examples:
  rigel profile diff expected.csv captured.csv
  rigel profile diff before.csv after.csv --threshold 5 --exit-code`;

interface ImportFlags {
  output?: string;
  json?: true;
  format: "rigel" | "orion";
  skipBad?: true;
  device?: string;
  requestGap?: number;
  request?: number;
  metrics?: string[];
}

/** Adds `rigel import`. */
export function addImportCommand(program: Command): void {
  program
    .command("import")
    .description("make a profile from what nsys, ncu, torch.profiler or Orion recorded")
    .argument("<files...>", "exported files, gzipped or not, after the tool's name or without it")
    .option("-o, --output <file>", "where the profile goes (default: standard output)")
    .option("--json", "print the summary as JSON; without -o, read and report only")
    .addOption(new Option("--format <format>", "of the profile").choices(["rigel", "orion"]).default("rigel"))
    .option("--skip-bad", "leave bad rows out and say which, rather than refuse the file")
    .option("--device <device>", "of several GPUs in a recording, the one to keep: its name or index")
    .option("--request-gap <ms>", "a new request begins where nothing ran for so long", above0)
    .option("--request <index>", "keep one request alone, counted from 0", whole(0, 999_999_999))
    .option("--metrics <files...>", "pages of ncu with metrics of the same kernels (name and shape)")
    .addHelpText("after", IMPORT_EXAMPLES)
    .action(runImport);
}

async function runImport(names: string[], flags: ImportFlags): Promise<void> {
  const tool: Tool | undefined = TOOLS.find((name) => name === names[0]);
  const files = tool === undefined ? names : names.slice(1);
  if (files.length === 0)
    throw new RigelError("command", `rigel import ${tool}: expected the files to import; see rigel import --help`);
  const summary = await importProfiles({
    ...(tool !== undefined && { tool }),
    files,
    ...(flags.output !== undefined && { out: flags.output }),
    format: flags.format,
    skipBad: flags.skipBad ?? false,
    ...(flags.device !== undefined && { device: flags.device }),
    ...(flags.requestGap !== undefined && { request_gap_ns: flags.requestGap * 1e6 }),
    ...(flags.request !== undefined && { request: flags.request }),
    metrics: flags.metrics ?? [],
    ...(!flags.json && { print: write }),
  });
  if (flags.json) await write(`${JSON.stringify(summary, null, 2)}\n`);
  else process.stderr.write(`${importText(summary)}\n`);
}

interface RecordFlags {
  output?: string;
  requests: number;
  duration?: number;
  settle: number;
  fromStart?: true;
  all?: true;
  letRun?: true;
  times: Mechanism;
  device: Config["device"];
  preset: Config["simulated"]["preset"];
  segment?: string;
  startTimeout: number;
  json?: true;
}

async function runRecord(command: string[], flags: RecordFlags, given: Command): Promise<void> {
  if (command.length === 0)
    throw new RigelError(
      "command",
      "rigel profile: expected show, diff, or -- and the command to record; see rigel profile --help",
    );
  if (flags.duration !== undefined && given.getOptionValueSource("requests") === "cli")
    throw new RigelError("command", "rigel profile: expected either --requests or --duration, got both");
  if (flags.json && flags.output === undefined)
    throw new RigelError(
      "command",
      "rigel profile --json: expected -o with it, as the profile goes to standard output",
    );
  const native = await Native.load();
  const { summary, exitStatus } = await record(native, {
    command,
    ...(flags.output !== undefined && { out: flags.output }),
    ...(flags.duration !== undefined && { duration_s: flags.duration }),
    ...(flags.segment !== undefined && { segmentFolder: flags.segment }),
    requests: flags.requests,
    settle_s: flags.settle,
    fromStart: flags.fromStart ?? false,
    all: flags.all ?? false,
    letRun: flags.letRun ?? false,
    mechanism: flags.times,
    device: flags.device,
    preset: flags.preset,
    start_timeout_s: flags.startTimeout,
    print: write,
  });
  process.exitCode = exitStatus;
  if (!summary) return;
  if (flags.json) await write(`${JSON.stringify(summary, null, 2)}\n`);
  else process.stderr.write(`${recordText(summary)}\n`);
}

/** Adds `rigel profile` with what can be done with a profile. `deviceSelector` reads what --device is given. */
export function addProfileCommand(program: Command, deviceSelector: (text: string) => Config["device"]): void {
  // Options after the name of a command are that command's: `show` and `diff` have some of the same names.
  const profile = program
    .enablePositionalOptions()
    .command("profile")
    .enablePositionalOptions()
    .description("record what a program asks of the GPU; look at and compare profiles")
    .argument("[command...]", "after --: the program to record and its arguments")
    .option("-o, --output <file>", "where the profile goes (default: standard output)")
    .option(
      "--requests <count>",
      "requests or iterations to record, once it is past its warm-up",
      whole(1, 999_999),
      20,
    )
    .option("--duration <seconds>", "record for so long instead", above0)
    .option("--settle <seconds>", "how long to wait for the end of its warm-up", above0, 60)
    .option("--from-start", "record from the first launch on, warm-up and all")
    .option("--all", "write every request, not one that stands for all")
    .option("--let-run", "do not stop the program after that")
    .addOption(
      new Option("--times <how>", "where durations come from: CUPTI, or events round each launch")
        .choices(MECHANISMS)
        .default("auto"),
    )
    .option("--device <device>", "auto, simulated, a device index, or a UUID", deviceSelector, "auto")
    .addOption(new Option("--preset <gpu>", "of the simulated GPU").choices(["h200", "a100", "l4"]).default("h200"))
    .option("--segment <folder>", "folder for the shared-memory files (default: /dev/shm)")
    .option("--start-timeout <seconds>", "how long to wait for its first work", above0, 120)
    .option("--json", "print a summary as JSON; needs -o")
    .addHelpText("after", RECORD_EXAMPLES)
    .action(runRecord);
  profile
    .command("show")
    .description("what a profile's time goes to, and its longest kernels")
    .argument("<file>", "a profile, Rigel's or Orion's")
    .option("--json", "print as JSON")
    .option("--html <file>", "write a page that needs nothing else to be looked at")
    .option("--top <count>", "how many of the longest kernels", whole(0, 999_999_999), 10)
    .addHelpText("after", SHOW_EXAMPLES)
    .action(runShow);
  profile
    .command("diff")
    .description("which kernels B lacks, has besides, or has of another count or duration, by name and shape")
    .argument("<a>", "the profile that is expected")
    .argument("<b>", "the profile that is there")
    .option("--json", "print as JSON, all differences")
    .option("--threshold <percent>", "change of a mean duration that is told", above0, 10)
    .option("--per-request", "compare counts for each request")
    .option("--exit-code", "end with status 1 if kernels are missing, new or of another count")
    .addHelpText("after", DIFF_EXAMPLES)
    .action(runDiff);
}

async function runShow(path: string, flags: { json?: true; html?: string; top: number }): Promise<void> {
  await checkApart([{ option: "--html", file: flags.html }], [path]);
  const view = await viewProfile(path, flags.top);
  if (flags.html !== undefined) await writeOutput("--html", flags.html, viewHtml(view));
  const coloured = (process.stdout.isTTY ?? false) && !process.env["NO_COLOR"];
  await write(flags.json ? `${JSON.stringify(view, null, 2)}\n` : `${viewText(view, coloured)}\n`);
}

interface DiffFlags {
  json?: true;
  threshold: number;
  perRequest?: true;
  exitCode?: true;
}

async function runDiff(a: string, b: string, flags: DiffFlags): Promise<void> {
  const difference = await diffProfiles(a, b, {
    threshold: flags.threshold / 100,
    perRequest: flags.perRequest ?? false,
  });
  await write(flags.json ? `${JSON.stringify(difference, null, 2)}\n` : `${diffText(difference)}\n`);
  if (flags.exitCode && (difference.launches_missing > 0 || difference.launches_new > 0)) process.exitCode = 1;
}

async function write(chunk: string | Uint8Array): Promise<void> {
  // What goes wrong with it is told by whoever listens to its errors (cli.ts).
  if (!process.stdout.write(chunk)) await once(process.stdout, "drain").catch(() => {});
}
