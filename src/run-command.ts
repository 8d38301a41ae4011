/**
 * run-command.ts: `rigel run`, `ps`, `set`, `pause` and `resume` on the command line.
 */

import { type Command, Option } from "commander";
import { above0, upTo } from "./arguments.ts";
import type { Config } from "./config.ts";
import {
  type Changed,
  LONGEST_PAUSE_s,
  changeClient,
  changePolicy,
  clientChange,
  findClient,
  pauseClient,
  policyChange,
} from "./control.ts";
import { Segments, segmentFolder, writableSegmentFolder } from "./discover.ts";
import { RigelError } from "./errors.ts";
import { progress } from "./log.ts";
import { Native } from "./native.ts";
import { processTable } from "./process-table.ts";
import { run } from "./run.ts";
import { readingOf, statsOf } from "./stats.ts";
import { seconds } from "./trace-command.ts";

const RUN_EXAMPLES = `
Examples:
  rigel run --class high -- python serve.py
  rigel run --class best-effort --memory 30% -- python train.py
  rigel run --class best-effort --name nightly --device 1 -- ./job.sh

What runs already on the GPU, by \`rigel launch\` or an earlier \`rigel run\`, is joined. A signal to \`rigel run\` reaches the command,
whose exit status it has. If \`rigel run\` itself is killed the command goes on, as a client.`;

const SET_EXAMPLES = `
Examples:
  rigel set train class=high                          a client, from its next work on
  rigel set train memory=20GiB weight=2               memory=none: no limit
  rigel set policy name=slo target.p99_over_alone=1.1
  rigel set policy name=priority inflight=4 min_share=0.1

A client keeps what was set for as long as its segment is there, also in processes that start later. \`policy\` changes every segment,
or that of --segment-id. What \`rigel run\` gave a process before it started stays: its priority under MPS.`;

const PAUSE_EXAMPLES = `
Examples:
  rigel pause train               until \`rigel resume train\`
  rigel pause train --for 60      or for a minute

Its launches wait, and where that is possible it is taken off the GPU in the middle of what it does. A pause ends by itself when the
program is asked to end through Rigel, when the launch ends, or when its segment has been removed.`;

interface Where {
  segment?: string;
}

/** Adds the commands. `givenFiles`: what `rigel run` has been given open, besides the first three. */
export function addRunCommands(
  program: Command,
  deviceSelector: (text: string) => Config["device"],
  givenFiles: () => number[],
): void {
  program
    .command("run")
    .description("run one command as a client of what already runs on the GPU")
    .addOption(
      new Option("--class <class>", "whose requests matter").choices(["high", "best-effort"]).makeOptionMandatory(true),
    )
    .option("--name <name>", "name of the client (default: the command's, and a number)")
    .option("--memory <size>", "most device memory it may have: 40GiB, 30%, or bytes")
    .option("--weight <weight>", "its part of GPU time under policy fair", above0)
    .option("--device <device>", "auto, simulated, a device index, or a UUID", deviceSelector)
    .addOption(new Option("--preset <gpu>", "of the simulated GPU").choices(["h200", "a100", "l4"]).default("h200"))
    .option("--segment <folder>", "folder of the shared-memory files (default: /dev/shm)")
    .option("--hang <time>", "tell when it waits for longer, and keep what shows that: 60s, 500ms", seconds, 60)
    .option("--no-hang", "do not look whether it hangs")
    .option("-v, --verbose", "say what is joined, and when the command has attached")
    .argument("<command...>", "the command and its arguments, after --")
    .passThroughOptions()
    .addHelpText("after", RUN_EXAMPLES)
    .action(async (command: string[], flags: RunFlags, own: Command) => {
      const native = await Native.load();
      process.exitCode = await run(command, native, {
        ...flags,
        preset: own.getOptionValueSource("preset") === "default" ? undefined : flags.preset,
        folder: writableSegmentFolder(flags.segment),
        verbose: flags.verbose ?? false,
        files: givenFiles(),
      });
    });
  program
    .command("ps")
    .description("list the clients that run on this machine")
    .option("--all", "those that have ended too, while their segment is there")
    .option("--json", "print as JSON")
    .option("--segment <folder>", "folder of the shared-memory files (default: /dev/shm)")
    .addHelpText("after", "\nExamples:\n  rigel ps\n  rigel ps --json | jq '.segments[].clients[] | .name'")
    .action(async (flags: Where & { json?: true; all?: true }) => {
      const all = new Segments(await Native.load(), segmentFolder(flags.segment))
        .live()
        .map((segment) => statsOf(readingOf(segment)));
      const segments = flags.all
        ? all
        : all.map((stats) => ({ ...stats, clients: stats.clients.filter(({ state }) => state === "live") }));
      print(flags.json ? JSON.stringify({ schema: 1, segments }, null, 2) : processTable(segments));
    });
  program
    .command("set")
    .description("change a client's class, memory or weight, or the policy, while they run")
    .argument("<client>", "name of the client, segment:name, or `policy`")
    .argument("<settings...>", "class=, memory=, weight=; or fields of policy")
    .option("--segment-id <id>", "of `rigel ps`: only there")
    .option("--segment <folder>", "folder of the shared-memory files (default: /dev/shm)")
    .option("--json", "print what was changed as JSON")
    .addHelpText("after", SET_EXAMPLES)
    .action(async (client: string, settings: string[], flags: Where & { segmentId?: string; json?: true }) => {
      const native = await Native.load();
      const all = new Segments(native, segmentFolder(flags.segment)).live();
      const wanted = flags.segmentId;
      const segments = all.filter(({ id }) => wanted === undefined || id === wanted);
      if (segments.length === 0)
        throw new RigelError(
          "command",
          `rigel set: nothing runs ${wanted === undefined ? "here" : `in ${wanted}`}; \`rigel ps\` shows what does`,
        );
      const values = fieldsOf(settings);
      const changed =
        client === "policy"
          ? changePolicy(segments, policyChange(values, "rigel set"), native)
          : [changeClient(findClient(client, segments), clientChange(values, "rigel set"))];
      printChanged(changed, flags.json);
    });
  program
    .command("pause")
    .description("hold a client's best-effort work back")
    .argument("<client>", "name of the client, or segment:name")
    .option("--for <seconds>", "resume by itself after so long", upTo(LONGEST_PAUSE_s))
    .option("--segment <folder>", "folder of the shared-memory files (default: /dev/shm)")
    .option("--json", "print what was changed as JSON")
    .addHelpText("after", PAUSE_EXAMPLES)
    .action(async (client: string, flags: Where & { for?: number; json?: true }) => {
      const found = findClient(client, new Segments(await Native.load(), segmentFolder(flags.segment)).live());
      printChanged([pauseClient(found, flags.for ?? Number.POSITIVE_INFINITY)], flags.json);
    });
  program
    .command("resume")
    .description("let a client go on that was paused")
    .argument("<client>", "name of the client, or segment:name")
    .option("--segment <folder>", "folder of the shared-memory files (default: /dev/shm)")
    .option("--json", "print what was changed as JSON")
    .addHelpText("after", "\nExample:\n  rigel resume train")
    .action(async (client: string, flags: Where & { json?: true }) => {
      const found = findClient(client, new Segments(await Native.load(), segmentFolder(flags.segment)).live());
      printChanged([pauseClient(found, 0)], flags.json);
    });
}

interface RunFlags extends Where {
  class: "high" | "best-effort";
  name?: string;
  memory?: string;
  weight?: number;
  device?: Config["device"];
  preset: Config["simulated"]["preset"];
  hang: number | false;
  verbose?: true;
}

/** `a=1 b.c=x` as an object; what reads as JSON is that, anything else text. */
function fieldsOf(settings: readonly string[]): Record<string, unknown> {
  // Without a prototype, so that __proto__ is a field like any other, which there is not.
  const values: Record<string, unknown> = Object.create(null);
  for (const setting of settings) {
    const at = setting.indexOf("=");
    if (at <= 0) throw new RigelError("command", `rigel set: expected FIELD=VALUE, got ${setting}`);
    const path = setting.slice(0, at);
    const [field = ""] = path.split(".", 1);
    const inner = path.slice(field.length + 1);
    const value = valueOf(setting.slice(at + 1));
    const outer = values[field];
    const within = typeof outer === "object" && outer !== null ? outer : {};
    const isPart = field.length < path.length;
    if (Object.hasOwn(values, field) && (!isPart || outer !== within || Object.hasOwn(within, inner)))
      throw new RigelError("command", `rigel set: ${path} is given twice`);
    values[field] = isPart ? { ...within, [inner]: value } : value;
  }
  return values;
}

function valueOf(text: string): unknown {
  return /^(-?(0|[1-9]\d*)(\.\d+)?(e[-+]?\d+)?|true|false|null)$/i.test(text) ? JSON.parse(text.toLowerCase()) : text;
}

function printChanged(changed: readonly Changed[], json: true | undefined): void {
  for (const note of new Set(changed.flatMap(({ notes }) => notes))) progress(`note: ${note}`);
  print(json ? JSON.stringify({ schema: 1, changed }, null, 2) : changed.map(({ text }) => text).join("\n"));
}

function print(text: string): void {
  process.stdout.write(`${text}\n`);
}
