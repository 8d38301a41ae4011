/**
 * trace-command.ts: `rigel trace`: writes what clients did last as a trace for Perfetto.
 */

import { resolve } from "node:path";
import { type Command, InvalidArgumentError } from "commander";
import { liveSegments } from "./discover.ts";
import { RigelError } from "./errors.ts";
import { progress } from "./log.ts";
import { Native } from "./native.ts";
import { printTrace, writeTrace } from "./trace.ts";

interface TraceFlags {
  output: string;
  last?: number;
  segment?: string;
  json?: true;
}

const EXAMPLES = `
Examples:
  rigel trace -o trace.json                   the last operations of every client; open it at https://ui.perfetto.dev
  rigel trace train --last 10s -o train.json  what happened to train in the last ten seconds
  rigel trace 4711 -o rank1.json              one process
  rigel trace -o - | gzip > trace.json.gz     Perfetto reads that too
  rigel launch jobs.json --trace trace.json   at the end of a launch

A client keeps its last 4096 operations, also when it is killed, until its launch ends.`;

/** Adds `rigel trace`. */
export function addTrace(program: Command): void {
  program
    .command("trace")
    .description("write what clients launched and waited for last as a trace for Perfetto")
    .argument("[client]", "a client's name, or a process number (default: all)")
    .option("-o, --output <file>", "where to; - is standard output", "trace.json")
    .option("--last <time>", "only the last so many seconds: 10s, 500ms", seconds)
    .option("--segment <path>", "a segment file, or the folder of those (default: /dev/shm)")
    .option("--json", "print what was written as JSON")
    .addHelpText("after", EXAMPLES)
    .action(runTrace);
}

async function runTrace(client: string | undefined, flags: TraceFlags): Promise<void> {
  const segments = liveSegments(await Native.load(), flags.segment)();
  const toStdout = flags.output === "-";
  if (toStdout && flags.json)
    throw new RigelError("command", "--json: expected a file with it (-o), as the trace goes to standard output");
  const path = toStdout ? "standard output" : resolve(flags.output);
  const options = { client, last_s: flags.last };
  const summary = toStdout ? await printTrace(segments, options) : await writeTrace(segments, path, options);
  if (!summary) {
    // Where there is no room for it, that has been said already.
    if (process.exitCode === undefined) progress(`${path}: closed by whoever read it, before the end of the trace`);
    return;
  }
  if (flags.json) {
    process.stdout.write(`${JSON.stringify(summary, null, 2)}\n`);
    return;
  }
  for (const { name, pid, events, recorded } of summary.clients)
    progress(`${name} (${pid}): ${events} events, of ${recorded} operations recorded`);
  progress(`${path}: ${summary.events} events; open it at https://ui.perfetto.dev`);
}

/** A time such as 10s, 500ms or 2m, in seconds; a plain number is seconds. */
export function seconds(text: string): number {
  const [, number, unit = "s"] = /^(\d+(?:\.\d+)?)(ms|s|m)?$/.exec(text) ?? [];
  const value = Number(number) * { ms: 0.001, s: 1, m: 60 }[unit === "ms" || unit === "m" ? unit : "s"];
  if (!(value > 0)) throw new InvalidArgumentError("Expected a time above 0, such as 10s, 500ms or 2m.");
  return value;
}
