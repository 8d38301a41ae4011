/**
 * cli.ts: the command line: arguments in, report out, and the one place where errors are caught.
 *
 * Standard output carries the result alone (a table, or with --json one document); everything else goes to standard error.
 */

// Before what follows opens any itself.
import { givenFiles } from "./given-files.ts";
import { realpathSync, renameSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { Command, CommanderError, Option } from "commander";
import packageJson from "../package.json" with { type: "json" };
import { above0, deviceSelector, whole } from "./arguments.ts";
import { addBench } from "./bench.ts";
import { addCalibrateCommand } from "./calibrate-command.ts";
import { type Config, POLICIES, filesRead, readConfig } from "./config.ts";
import { Devices } from "./device.ts";
import { writableSegmentFolder } from "./discover.ts";
import { clearDurations, durationsFolder, durationsText, keptDurations } from "./durations.ts";
import { addDoctor } from "./doctor.ts";
import { RigelError, reason } from "./errors.ts";
import { addHangs } from "./hangs-command.ts";
import { onEnd } from "./interrupt.ts";
import { setElsewhere, withPlaces } from "./json.ts";
import { launch } from "./launch.ts";
import { launchPage } from "./launch-page.ts";
import { printable, progress, quoted } from "./log.ts";
import { sizeText } from "./memory.ts";
import { Native } from "./native.ts";
import { PART, checkApart, checkOutput, whyNot, writeOutput } from "./output.ts";
import { folderProblem, removeIfPossible, statAt } from "./path.ts";
import { type Plan, plan, simulationFolder, simulationState } from "./plan.ts";
import { addImportCommand, addProfileCommand } from "./profile-command.ts";
import { shared, table } from "./report.ts";
import { addSimulateCommand } from "./simulate-command.ts";
import { addTrace } from "./trace-command.ts";
import { addContexts } from "./contexts.ts";
import { addTop } from "./top.ts";
import { addRunCommands } from "./run-command.ts";
import { addServe } from "./serve.ts";

interface LaunchFlags {
  json?: true;
  compare?: boolean;
  dryRun?: true;
  duration?: number;
  inflight?: number;
  policy?: Config["policy"]["name"];
  device?: Config["device"];
  sharing?: Config["sharing"];
  mps?: "on" | "off";
  segment?: string;
  trace?: string;
  startTimeout: number;
  html?: string;
  base?: string;
  status?: string;
}

const EXAMPLES = `
Examples:
  rigel launch                                the demo: two recorded programs on one GPU, compared
  rigel launch jobs.json --duration 60        run what jobs.json says for a minute
  rigel launch jobs.json --compare --json     each client alone, together, and governed, as one JSON document
  rigel launch jobs.json --dry-run            check everything and show what would run

A configuration:
  { "duration_s": 60,
    "clients": [
      { "name": "serve", "class": "high", "command": ["python", "serve.py"] },
      { "name": "train", "class": "best-effort", "command": ["python", "train.py"] } ] }`;

const INFO_EXAMPLES = `
Examples:
  rigel info
  rigel info --json | jq -r .library           the library that clients load`;

const DURATIONS_EXAMPLES = `
Examples:
  rigel durations                             every kernel that is known, by device and program
  rigel durations --json | jq '.files[].kernels[].name'
  rigel durations --clear                     start from nothing`;

function commandLine(): Command {
  const program = new Command("rigel")
    .description("GPU sharing for one latency-critical job and any number of best-effort jobs.")
    .version(packageJson.version)
    .enablePositionalOptions()
    .exitOverride();
  program
    .command("launch")
    .description("run the clients of a configuration together on one GPU and report what each got")
    .argument("[config]", "configuration file, Rigel's or Orion's; - is standard input (default: the demo)")
    .option("--json", "print the report as JSON")
    .option("--compare", "run each client alone, then together ungoverned, then governed")
    .option("--no-compare", "only the governed run, whatever the configuration says")
    .option("--dry-run", "check everything and show what would run")
    .option("--duration <seconds>", "count for so long", above0)
    .option("--inflight <launches>", "launches a best-effort client may have unfinished; 0: no limit", whole(0, 4096))
    .addOption(new Option("--policy <name>", "who may launch when").choices(POLICIES))
    .option("--device <device>", "auto, simulated, a device index, or a UUID", deviceSelector)
    .addOption(
      new Option("--sharing <mode>", "how the clients are on the GPU together").choices(["auto", "time-slice", "mps"]),
    )
    .addOption(
      new Option("--mps <switch>", "processes share the simulated device side by side, not in time slices").choices([
        "on",
        "off",
      ]),
    )
    .option("--segment <folder>", "folder for the shared-memory file (default: /dev/shm)")
    .option("--trace <file>", "at the end, write what the clients did last as a trace for Perfetto")
    .option("--html <file>", "write the report as a page too, with plots second by second under policy slo")
    .option("--base <folder>", "where relative paths in the configuration begin (default: the folder that it is in)")
    .option("--status <file>", "when the launch has ended, write its exit status there")
    .option("--start-timeout <seconds>", "how long to wait for every client's first work", above0, 120)
    .addHelpText("after", EXAMPLES)
    .action(runLaunch);
  addImportCommand(program);
  addProfileCommand(program, deviceSelector);
  addSimulateCommand(program);
  addCalibrateCommand(program, deviceSelector);
  program
    .command("info")
    .description("show the versions, where the native parts are, and the GPUs that programs would see")
    .option("--json", "print as JSON")
    .addHelpText("after", INFO_EXAMPLES)
    .action(runInfo);
  program
    .command("durations")
    .description("show how long kernels take and requests wait for them, as launches have learned it, or forget it")
    .option("--json", "print as JSON")
    .option("--clear", "remove what is kept")
    .addHelpText("after", DURATIONS_EXAMPLES)
    .action(runDurations);
  addDoctor(program, deviceSelector);
  addTop(program);
  addContexts(program);
  addBench(program, deviceSelector);
  addRunCommands(program, deviceSelector, givenFiles);
  addServe(program);
  addTrace(program);
  addHangs(program);
  return program;
}

async function runLaunch(file: string | undefined, flags: LaunchFlags): Promise<void> {
  const status = { option: "--status", file: flags.status };
  // Whatever else is wrong, that says so.
  await checkApart([status], [file]);
  const leftStatus = flags.status === undefined ? undefined : await leaveStatus(flags.status);
  const outputs = [status, { option: "--html", file: flags.html }, { option: "--trace", file: flags.trace }];
  await checkApart(outputs, [file]);
  const native = await Native.load();
  const problem = flags.base === undefined ? undefined : folderProblem(flags.base);
  if (problem) throw new RigelError("command", `--base: ${problem}, got ${flags.base || '""'}`);
  const base = flags.base === undefined ? undefined : resolve(flags.base);
  const config = overridden(await readConfig(file ?? join(native.files.profiles, "demo.json"), base), flags);
  const read = filesRead(config);
  await checkApart([status], read).catch((thrown) => {
    // Not even to say that.
    leftStatus?.();
    throw thrown;
  });
  await checkApart(outputs, read);
  // Clients may run in other folders.
  const segmentFolder = writableSegmentFolder(flags.segment);
  const planned = await plan(config, native, simulationState(segmentFolder));
  if (flags.mps !== undefined && !planned.device.simulated)
    planned.notes.push("--mps has no effect on a real GPU; use --sharing");
  if (flags.mps === "off" && planned.device.simulated && config.sharing === "mps")
    planned.notes.push('--mps off has no effect, as sharing is "mps"');
  if (flags.trace !== undefined && !config.recorder)
    throw new RigelError("config", `--trace: expected a configuration whose recorder is on, got ${config.file}`);
  if (flags.html !== undefined) await checkOutput("--html", flags.html);
  if (flags.trace !== undefined) await checkOutput("--trace", flags.trace);
  if (flags.dryRun) {
    print(flags.json ? JSON.stringify(planDocument(planned), null, 2) : planText(planned));
    return;
  }
  progress(`${planned.device.name}, ${planned.device.uuid}`);
  for (const note of planned.notes) progress(`note: ${note}`);
  const { report, exitStatus } = await launch(planned, native, {
    segmentFolder,
    start_timeout_s: flags.startTimeout,
    trace: flags.trace === undefined ? undefined : resolve(flags.trace),
  });
  process.exitCode = exitStatus;
  print(flags.json ? JSON.stringify(report, null, 2) : table(report));
  if (flags.html !== undefined) await writeOutput("--html", flags.html, await launchPage(report));
}

/** However the launch ends, unless it is killed, or was asked to end before Rigel had been loaded. Returns what gives that up. */
async function leaveStatus(file: string): Promise<() => void> {
  // As it was named: resolve() takes what ends in a slash for a file.
  await checkOutput("--status", file);
  const path = resolve(file);
  // Before there are clients, and once they have ended, a signal would end this process without it.
  onEnd(() => {});
  const leave = (status: number): void => {
    // A device or a pipe is written as it is; a file appears whole, or not at all.
    const there = statAt(path);
    const isFile = there?.isFile() ?? true;
    const to = there && isFile ? realpathSync(path) : path;
    const part = isFile ? to + PART : to;
    try {
      writeFileSync(part, `${status}\n`, { mode: there && isFile ? there.mode & 0o777 : 0o600 });
      if (isFile) renameSync(part, to);
    } catch (thrown) {
      if (isFile) removeIfPossible(part);
      progress(`--status: ${path} cannot be written (${whyNot(thrown)})`);
      process.exitCode = status || 1;
    }
  };
  process.on("exit", leave);
  return () => process.off("exit", leave);
}

function overridden(config: Config, flags: LaunchFlags): Config {
  /** What an option says in place of a field, or what the field says. */
  const either = <T>(field: string, option: T | undefined, configured: T): T => {
    if (option === undefined) return configured;
    setElsewhere(config.file, field);
    return option;
  };
  const { policy, simulated } = config;
  const mps = flags.mps === undefined ? undefined : flags.mps === "on";
  return {
    ...config,
    compare: either("compare", flags.compare, config.compare),
    duration_s: either("duration_s", flags.duration, config.duration_s),
    device: either("device", flags.device, config.device),
    sharing: either("sharing", flags.sharing, config.sharing),
    policy: {
      ...policy,
      name: either("policy.name", flags.policy, policy.name),
      inflight: either("policy.inflight", flags.inflight, policy.inflight),
    },
    simulated: { ...simulated, mps: either("simulated.mps", mps, simulated.mps) },
  };
}

function planDocument({ config, device, sharing, phases, notes, clients }: Plan): object {
  return {
    schema: 1,
    dry_run: true,
    device,
    policy: config.policy,
    sharing,
    mps: sharing.mode === "mps",
    duration_s: config.duration_s ?? null,
    clients,
    phases: phases.map(({ mode, policy, clients: together }) => ({
      mode,
      policy,
      clients: together.map(({ name }) => name),
    })),
    notes,
  };
}

function planText({ config, device, sharing, phases, notes, clients }: Plan): string {
  const lines = [
    `device   ${device.name} ${device.uuid}`,
    `sharing  ${shared(sharing)}`,
    `ends     ${config.duration_s === undefined ? "with the clients" : `after ${config.duration_s} s`}`,
    ...clients.flatMap(({ name, class: kind, argv, cwd, env, memory_bytes }) => [
      `client   ${name} (${kind})`,
      `  run    ${argv.map(quoted).join(" ")}`,
      `  in     ${cwd}`,
      ...(memory_bytes === undefined ? [] : [`  memory at most ${sizeText(memory_bytes)}`]),
      ...Object.entries(env).map(([key, value]) => `  with   ${key}=${quoted(value)}`),
    ]),
    ...phases.map(
      ({ mode, policy, clients: together }) =>
        `phase    ${mode}: ${together.map(({ name }) => name).join(" + ")}, policy ${policy}`,
    ),
    ...notes.map((note) => `note     ${note}`),
  ];
  return lines.map(printable).join("\n");
}

function runDurations(flags: { json?: true; clear?: true }): void {
  const folder = durationsFolder();
  if (flags.clear) {
    const { removed, problems } = clearDurations(folder);
    print(flags.json ? JSON.stringify({ schema: 1, folder, removed }, null, 2) : `${removed.length} files removed`);
    if (problems.length > 0) throw new RigelError("cache", problems.join("\n"));
    return;
  }
  const kept = keptDurations(folder);
  print(flags.json ? JSON.stringify(kept, null, 2) : durationsText(kept));
}

async function runInfo(flags: { json?: true }): Promise<void> {
  const native = await Native.load();
  const state = simulationState(simulationFolder(native, process.env));
  const devices = new Devices(native.files, { state, preset: "h200", mps: false });
  const info = {
    schema: 1,
    version: packageJson.version,
    bun: Bun.version,
    platform: `${process.platform} ${process.arch}`,
    library: native.files.interposer,
    library_version: native.version,
    devices: await devices.real(),
    simulated: await devices.simulated(),
  };
  if (flags.json) {
    print(JSON.stringify(info, null, 2));
    return;
  }
  const gpus = info.devices.map(({ index, name, uuid }) => `${index} ${name} ${uuid}`);
  print(
    [
      `rigel     ${info.version} (Bun ${info.bun}, ${info.platform})`,
      `library   ${info.library} (${info.library_version})`,
      `replay    ${native.files.replay}`,
      `simulator ${native.files.simulator}`,
      ...(gpus.length > 0 ? gpus : ["none"]).map((gpu) => `GPU       ${gpu}`),
      `simulated ${info.simulated.name} ${info.simulated.uuid}`,
    ].join("\n"),
  );
}

/** Where a disk is full, over quota or read-only: wherever Rigel was writing, that is no bug in it. */
function noRoom(thrown: unknown): boolean {
  return thrown instanceof Error && "code" in thrown && /^(ENOSPC|EDQUOT|EROFS)$/.test(String(thrown.code));
}

/** Where the folder that Rigel was called in has been removed. */
function noCurrentFolder(thrown: unknown): boolean {
  return thrown instanceof Error && "syscall" in thrown && thrown.syscall === "uv_cwd";
}

function print(text: string): void {
  process.stdout.write(`${text}\n`);
}

// As a shell would. Without it no program is found, neither by Rigel nor by its clients.
process.env["PATH"] ??= "/usr/local/bin:/usr/bin:/bin";

// Whoever read what Rigel says has gone (`rigel … | head`), or there is no room for it: a launch goes on to its end, unseen.
process.stderr.on("error", () => {});
process.stdout.on("error", (error) => {
  if ("code" in error && error.code === "EPIPE") return;
  progress(`standard output cannot be written (${reason(error)})`);
  process.exitCode = 1;
});

try {
  await commandLine().parseAsync();
} catch (thrown) {
  if (thrown instanceof CommanderError) {
    // Commander has printed its message; help and version are no errors.
    process.exitCode = thrown.exitCode === 0 ? 0 : 2;
  } else if (thrown instanceof RigelError) {
    for (const line of withPlaces(thrown.message).split("\n")) progress(line);
    process.exitCode = thrown.exitStatus;
  } else if (noRoom(thrown)) {
    progress(reason(thrown));
    process.exitCode = 1;
  } else if (noCurrentFolder(thrown)) {
    progress("the current folder is no more; change to one that exists");
    process.exitCode = 1;
  } else {
    console.error(thrown);
    process.exitCode = 70;
  }
}
