/**
 * launches.ts: launches that are asked for through the server: checked, started as processes of their own, found again, stopped.
 *
 * Each is `rigel launch config.json --json` in a session of its own, so nothing of it depends on the server that started it: one that
 * is killed and started again finds its launches by what lies in their folders, which this user alone can look into:
 *   config.json   what was asked for
 *   launch.json   when, which process runs it, how it ended (recordSchema); written by the server alone
 *   report.json   standard output: the report, once it has ended
 *   log.txt       standard error
 *   status        its exit status, once it has ended by itself
 */

import {
  closeSync,
  existsSync,
  openSync,
  readFileSync,
  readSync,
  readdirSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from "node:fs";
import { randomUUID } from "node:crypto";
import { dirname, isAbsolute, join } from "node:path";
import { z } from "zod";
import { configOf } from "./config.ts";
import { RigelError, reason } from "./errors.ts";
import { folderProblem, homeFolder, makeFolder, statAt } from "./path.ts";
import { checkDepth } from "./json.ts";
import type { Native } from "./native.ts";
import { plan, simulationState } from "./plan.ts";
import { bootId, commandOf, living, startedAt_ticks } from "./proc.ts";
import { commandLine } from "./self.ts";
import { folderOfOwn } from "./serve-access.ts";
import { type Issue, RequestError } from "./serve-error.ts";

/** So many launches that have ended are kept, the latest ones. */
const KEPT = 50;
/** How much of the end of standard error is read for its last lines. */
const TAIL_bytes = 65_536;
const TAIL_lines = 50;
/** What errors of `configOf` and `plan` call the configuration. */
const BODY = "body";
/** The first request to end is Ctrl-C, the second kills the clients (interrupt.ts), the third the launcher (guard.ts). */
const SIGNALS = ["SIGINT", "SIGTERM", "SIGKILL"] as const;

const ID = /^\d{8}T\d{6}-[0-9a-f]{8}$/;

const publicSchema = z.object({
  id: z.string().regex(ID),
  /**
   * `ended`: its report is there, or it was asked to end before it had one. `failed`: it ended by itself without a report; its
   * standard error says why.
   */
  state: z.enum(["running", "ended", "failed"]),
  asked_at: z.iso.datetime(),
  ended_at: z.iso.datetime().nullable(),
  /** Of the launcher, and `segment.creator_pid` in /v1/stats; may be another process's once it has ended. */
  pid: z.int().positive().nullable(),
  /** As of `rigel launch`; null while it runs, and where it was killed while no server looked on. */
  exit_status: z.int().nullable(),
  /** How often it was asked to end. */
  stops: z.int().nonnegative(),
  /** Where it runs: relative paths begin there. */
  cwd: z.string(),
  clients: z.array(z.object({ name: z.string(), class: z.enum(["high", "best-effort"]) })),
});

/** A launch as the server shows it. */
export const launchSchema = publicSchema.extend({
  /** The folder with its files. */
  folder: z.string(),
});
export type Launch = z.infer<typeof launchSchema>;

export const launchDetailSchema = launchSchema.extend({
  /** What `rigel launch --json` prints; null until it has ended. */
  report: z.record(z.string(), z.unknown()).nullable(),
  /** The last lines of standard error; one that has lost its beginning begins with an ellipsis. */
  stderr: z.array(z.string()),
});
export type LaunchDetail = z.infer<typeof launchDetailSchema>;

const recordSchema = publicSchema.extend({
  /** When the process began, and which start of the machine that was: with its number they tell it from others. */
  started_ticks: z.string().nullable(),
  boot: z.string(),
});
type LaunchRecord = z.infer<typeof recordSchema>;

/** `rigel/launches` in XDG_STATE_HOME, or in ~/.local/state. */
export function launchesFolder(environment: Record<string, string | undefined> = process.env): string {
  const xdg = environment["XDG_STATE_HOME"];
  const base = xdg?.startsWith("/") ? xdg : join(homeFolder(environment) ?? "/", ".local", "state");
  return join(base, "rigel", "launches");
}

export class Launches {
  readonly #native: Native;
  readonly #folder: string;
  readonly #segmentFolder: string;
  /** Those whose end this server will see. */
  readonly #own = new Set<string>();
  /** How many configurations have been looked at. */
  #checks = 0;

  /** `folder` is made when it is needed; launches make their segments in `segmentFolder`. */
  constructor(native: Native, folder: string, segmentFolder: string) {
    this.#native = native;
    this.#folder = folder;
    this.#segmentFolder = segmentFolder;
  }

  /** Checks a configuration as `rigel launch` does, and starts it. Throws RequestError with what is wrong with which field. */
  async start(body: unknown): Promise<LaunchDetail> {
    const { config, cwd } = separated(body);
    const base = cwd ?? homeFolder() ?? "/";
    const clients = await this.#check(config, cwd, base);
    const home = dirname(dirname(this.#folder));
    try {
      makeFolder(home);
    } catch (thrown) {
      throw new RigelError(
        "machine",
        `${home} cannot be made (${reason(thrown)}); set XDG_STATE_HOME to a folder of your own that can be written to`,
        { cause: thrown },
      );
    }
    folderOfOwn(dirname(this.#folder), "XDG_STATE_HOME");
    folderOfOwn(this.#folder, "XDG_STATE_HOME");
    this.#prune();
    const asked_at = new Date().toISOString();
    const id = `${asked_at.slice(0, 19).replaceAll(/[-:]/g, "")}-${randomUUID().slice(0, 8)}`;
    const folder = join(this.#folder, id);
    folderOfOwn(folder, "XDG_STATE_HOME");
    const file = join(folder, "config.json");
    writeFileSync(file, `${JSON.stringify(config, null, 2)}\n`, { mode: 0o600 });
    const fresh: LaunchRecord = {
      id,
      state: "running",
      asked_at,
      ended_at: null,
      pid: null,
      exit_status: null,
      stops: 0,
      cwd: base,
      clients,
      started_ticks: null,
      boot: bootId(),
    };
    // Written before as well: whoever ends this server in between, the next one finds the launch by its command line.
    this.#write(fresh);
    this.#own.add(id);
    try {
      const child = this.#spawn(folder, file, base);
      this.#write({ ...fresh, pid: child.pid, started_ticks: startedAt_ticks(child.pid) ?? null });
      void child.exited.then((status) => {
        this.#own.delete(id);
        const record = this.#read(id);
        if (record) this.#settle({ ...record, exit_status: status });
      });
    } catch (thrown) {
      this.#own.delete(id);
      rmSync(folder, { recursive: true, force: true });
      throw new RigelError("machine", `the launch cannot be started: ${reason(thrown)}`, { cause: thrown });
    }
    return this.get(id);
  }

  /** Those there are, the latest first. */
  list(): Launch[] {
    return this.#ids().flatMap((id) => {
      const record = this.#current(id);
      return record ? [this.#shown(record)] : [];
    });
  }

  /** One of them. Throws RequestError if there is none with this id. */
  get(id: string): LaunchDetail {
    const record = this.#known(id);
    const folder = join(this.#folder, id);
    return {
      ...this.#shown(record),
      report: record.state === "running" ? null : reportIn(folder),
      stderr: lastLines(join(folder, "log.txt")),
    };
  }

  /** Asks one to end, the harder the more often it was asked before. Nothing happens to one that has ended. */
  stop(id: string): LaunchDetail {
    const record = this.#known(id);
    if (record.state === "running" && record.pid !== null) {
      const signal = SIGNALS[Math.min(record.stops, SIGNALS.length - 1)] ?? "SIGKILL";
      this.#write({ ...record, stops: record.stops + 1 });
      try {
        process.kill(record.pid, signal);
      } catch {
        // It has just ended.
      }
    }
    return this.get(id);
  }

  /** Finds out everything that can be found wrong without starting a client. */
  async #check(config: unknown, cwd: string | undefined, base: string): Promise<Launch["clients"]> {
    try {
      checkDepth(config, BODY);
      const problem = folderProblem(base);
      if (problem) throw new RigelError("config", `${BODY}: cwd: ${problem}, got ${base}`);
      const checked = configOf(config, BODY, cwd);
      const clients = checked.clients.map((client) => ({ ...client, cwd: client.cwd ?? base }));
      // Several may be checked at once.
      const state = `${simulationState(this.#segmentFolder)}-${++this.#checks}`;
      await plan({ ...checked, clients }, this.#native, state);
      return clients.map(({ name, class: kind }) => ({ name, class: kind }));
    } catch (thrown) {
      if (thrown instanceof RigelError && (thrown.exitStatus === 2 || thrown.code === "device")) throw refused(thrown);
      throw thrown;
    }
  }

  #spawn(folder: string, file: string, base: string) {
    const [stdout, stderr] = [join(folder, "report.json"), join(folder, "log.txt")].map((path) =>
      openSync(path, "wx", 0o600),
    );
    try {
      const status = join(folder, "status");
      const options = ["--json", "--base", base, "--segment", this.#segmentFolder, "--status", status];
      const child = Bun.spawn([...commandLine(), "launch", file, ...options], {
        cwd: base,
        env: { ...process.env },
        detached: true,
        stdin: "ignore",
        stdout: stdout ?? "ignore",
        stderr: stderr ?? "ignore",
      });
      child.unref();
      return child;
    } finally {
      for (const opened of [stdout, stderr]) if (opened !== undefined) closeSync(opened);
    }
  }

  #ids(): string[] {
    if (!existsSync(this.#folder)) return [];
    folderOfOwn(this.#folder, "XDG_STATE_HOME");
    return readdirSync(this.#folder)
      .filter((name) => ID.test(name))
      .toSorted()
      .toReversed();
  }

  #known(id: string): LaunchRecord {
    const record = this.#ids().includes(id) ? this.#current(id) : undefined;
    if (!record)
      throw new RequestError(
        404,
        "no_launch",
        `there is no launch ${JSON.stringify(id)}; /v1/launches lists those there are`,
      );
    return record;
  }

  /** What is written down of a launch, brought up to date with what its process does. */
  #current(id: string): LaunchRecord | undefined {
    const record = this.#read(id);
    if (record?.state !== "running" || this.#own.has(id)) return record;
    if (record.pid === null) {
      const file = join(this.#folder, id, "config.json");
      const found = living().find(({ pid }) => commandOf(pid).includes(` launch ${file} `));
      const started_ticks = found && startedAt_ticks(found.pid);
      if (found && started_ticks !== undefined) return this.#write({ ...record, pid: found.pid, started_ticks });
    } else if (record.boot === bootId() && startedAt_ticks(record.pid) === record.started_ticks) return record;
    return this.#settle(record);
  }

  /** Writes down how a launch has ended. */
  #settle(record: LaunchRecord): LaunchRecord {
    const folder = join(this.#folder, record.id);
    const state = record.stops > 0 || reportIn(folder) !== null ? "ended" : "failed";
    const files = ["report.json", "log.txt"].map((name) => statAt(join(folder, name)));
    const last_ms = Math.max(...files.map((found) => found?.mtimeMs ?? 0)) || Date.now();
    const exit_status = record.exit_status ?? statusIn(folder);
    return this.#write({ ...record, state, exit_status, ended_at: new Date(last_ms).toISOString() });
  }

  #read(id: string): LaunchRecord | undefined {
    try {
      const text = readFileSync(join(this.#folder, id, "launch.json"), "utf8");
      return recordSchema.safeParse(JSON.parse(text)).data;
    } catch {
      // Of another version, or removed by hand.
      return undefined;
    }
  }

  #write(record: LaunchRecord): LaunchRecord {
    const path = join(this.#folder, record.id, "launch.json");
    writeFileSync(`${path}.new`, `${JSON.stringify(record, null, 2)}\n`, { mode: 0o600 });
    renameSync(`${path}.new`, path);
    return record;
  }

  #shown(record: LaunchRecord): Launch {
    return { ...publicSchema.parse(record), folder: join(this.#folder, record.id) };
  }

  /** Makes room for one more. */
  #prune(): void {
    const ended = this.#ids().filter((id) => this.#current(id)?.state !== "running");
    for (const id of ended.slice(KEPT - 1)) rmSync(join(this.#folder, id), { recursive: true, force: true });
  }
}

/** A configuration, and the `cwd` beside its clients, which is the server's own field. */
function separated(body: unknown): { config: unknown; cwd: string | undefined } {
  if (typeof body !== "object" || body === null || Array.isArray(body) || !("cwd" in body))
    return { config: body, cwd: undefined };
  const { cwd, ...config } = body;
  if (typeof cwd !== "string" || !isAbsolute(cwd) || cwd.includes("\0"))
    throw refused(
      new RigelError("config", `${BODY}: cwd: expected the absolute path of a folder, got ${JSON.stringify(cwd)}`),
    );
  return { config, cwd };
}

/** An error with one line for each problem, as `rigel launch` prints it, as what a request is answered with. */
function refused(error: RigelError): RequestError {
  const issues = error.message.split("\n").map((line): Issue => {
    const text = line.startsWith(`${BODY}: `) ? line.slice(BODY.length + 2) : undefined;
    const [, path, message] = /^((?:[\w-]+|\[\d+\])(?:\.[\w-]+|\[\d+\])*): (.*)$/s.exec(text ?? "") ?? [];
    return path === undefined || message === undefined ? { path: "", message: text ?? line } : { path, message };
  });
  const [first] = issues;
  const where = first?.path ? `${first.path}: ` : "";
  const more = issues.length > 1 ? `, and ${issues.length - 1} more` : "";
  return new RequestError(422, "invalid", `the launch cannot be started: ${where}${first?.message}${more}`, issues);
}

/** The report of a launch; null if it has left none, or only a part of one. */
function reportIn(folder: string): LaunchDetail["report"] {
  try {
    return launchDetailSchema.shape.report.parse(JSON.parse(readFileSync(join(folder, "report.json"), "utf8")));
  } catch {
    return null;
  }
}

/** What a launch has ended with; null if it could not say so. */
function statusIn(folder: string): number | null {
  try {
    return z.coerce
      .number()
      .int()
      .parse(readFileSync(join(folder, "status"), "utf8").trim() || undefined);
  } catch {
    return null;
  }
}

function lastLines(path: string): string[] {
  if (!existsSync(path)) return [];
  const file = openSync(path, "r");
  try {
    const bytes = Buffer.alloc(TAIL_bytes);
    const from = Math.max(0, statSync(path).size - TAIL_bytes);
    const text = bytes.toString("utf8", 0, readSync(file, bytes, 0, TAIL_bytes, from));
    // The first line may have lost its beginning, within a letter too.
    const shown = from > 0 ? text.replace(/^\uFFFD*(?=[^\n])/, "…") : text;
    const lines = shown.trimEnd().split("\n");
    return lines.filter((line) => line !== "").slice(-TAIL_lines);
  } finally {
    closeSync(file);
  }
}
