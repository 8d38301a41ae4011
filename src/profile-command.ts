/** profile-command.ts: the command lines of `rigel import` and `rigel profile`. */

import { Command, InvalidArgumentError, Option } from "commander";
import { once } from "node:events";
import { RigelError } from "./errors.ts";
import { TOOLS, type Tool } from "./import-detect.ts";
import { importProfiles, importText } from "./import.ts";
import { diffProfiles, diffText } from "./profile-diff.ts";
import { viewHtml } from "./profile-html.ts";
import { viewProfile, viewText } from "./profile-show.ts";
import { WholeFile } from "./profile-write.ts";

const IMPORT_EXAMPLES = `
The tool may be named first (${TOOLS.join(", ")}); without, it is found out from the file.

Examples:
  nsys stats --report cuda_gpu_trace --format csv train.nsys-rep > train.csv
  rigel import nsys train.csv -o train-profile.csv
  rigel import train.csv --metrics ncu.csv -o train-profile.csv   what bounds each kernel, from ncu --csv
  rigel import torch trace.json.gz --request 3 -o step.csv        the fourth ProfilerStep alone
  rigel import trace.json --json                                  only read and report`;

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
    .option("--request-gap <ms>", "a new request begins where nothing ran for so long", positiveNumber)
    .option("--request <index>", "keep one request alone, counted from 0", wholeNumber)
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

/** Adds `rigel profile` with what can be done with a profile. */
export function addProfileCommand(program: Command): void {
  const profile = program.command("profile").description("look at and compare profiles");
  profile
    .command("show")
    .description("what a profile's time goes to, and its longest kernels")
    .argument("<file>", "a profile, Rigel's or Orion's")
    .option("--json", "print as JSON")
    .option("--html <file>", "write a page that needs nothing else to be looked at")
    .option("--top <count>", "how many of the longest kernels", wholeNumber, 10)
    .addHelpText("after", SHOW_EXAMPLES)
    .action(runShow);
  profile
    .command("diff")
    .description("which kernels B lacks, has besides, or has of another count or duration, by name and shape")
    .argument("<a>", "the profile that is expected")
    .argument("<b>", "the profile that is there")
    .option("--json", "print as JSON, all differences")
    .option("--threshold <percent>", "change of a mean duration that is told", positiveNumber, 10)
    .option("--per-request", "compare counts for each request")
    .option("--exit-code", "end with status 1 if kernels are missing, new or of another count")
    .addHelpText("after", DIFF_EXAMPLES)
    .action(runDiff);
}

async function runShow(path: string, flags: { json?: true; html?: string; top: number }): Promise<void> {
  const view = await viewProfile(path, flags.top);
  if (flags.html !== undefined) {
    const file = new WholeFile(flags.html);
    try {
      await file.write(viewHtml(view));
      await file.finish();
    } finally {
      await file.discard();
    }
  }
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
  if (!process.stdout.write(chunk)) await once(process.stdout, "drain");
}

function positiveNumber(text: string): number {
  const value = Number(text);
  if (text.trim() === "" || !Number.isFinite(value) || value <= 0)
    throw new InvalidArgumentError("Expected a number above 0.");
  return value;
}

function wholeNumber(text: string): number {
  if (!/^\d{1,9}$/.test(text)) throw new InvalidArgumentError("Expected a whole number from 0.");
  return Number(text);
}
