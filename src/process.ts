/**
 * process.ts: one client as a process group: started, read line by line, signalled, stopped, and looked at from outside.
 *
 * Each client has a session of its own, so that a signal reaches everything it started and the terminal's Ctrl-C comes
 * from Rigel alone. Only ever signals groups that it started itself.
 */

import { readdirSync, readFileSync } from "node:fs";
import { constants } from "node:os";
import { RigelError, reason } from "./errors.ts";

export interface Command {
  name: string;
  argv: string[];
  env: Record<string, string | undefined>;
  cwd: string;
  /** Standard output is a result that the launcher reports itself, not something to show. */
  hideOutput: boolean;
}

/** How a process ended. */
export interface Exit {
  /** As a shell would give it: 128 + n for signal n. */
  status: number;
  /** In words, for messages. */
  text: string;
}

const GRACE_ms = 5000;
/** Longest line that is kept together. */
const LINE_LIMIT = 65_536;

export class ClientProcess {
  readonly name: string;
  readonly pid: number;
  readonly startedAt_ms = performance.now();
  /** Set once it has ended. */
  exit: (Exit & { at_ms: number }) | undefined;
  /** Rigel asked it to end before it had. */
  stopped = false;
  readonly ended: Promise<void>;
  readonly #output: Promise<unknown>;

  constructor(command: Command, show: (line: string) => void) {
    this.name = command.name;
    const child = start(command);
    this.pid = child.pid;
    const streams = [child.stderr, ...(child.stdout ? [child.stdout] : [])];
    this.#output = Promise.all(streams.map((stream) => eachLine(stream, show)));
    this.ended = child.exited.then(() => {
      this.exit = { ...describe(child.exitCode, child.signalCode), at_ms: performance.now() };
    });
  }

  /** Sends a signal to the whole group. Nothing happens if it is gone. */
  signal(signal: NodeJS.Signals): void {
    try {
      process.kill(-this.pid, signal);
    } catch (thrown) {
      if (!(thrown instanceof Error && "code" in thrown && thrown.code === "ESRCH")) throw thrown;
    }
  }

  /** Asks the group to end, then makes it. Returns once the client and its output have ended. */
  async stop(first: NodeJS.Signals = "SIGTERM"): Promise<void> {
    if (!this.exit) {
      this.stopped = true;
      this.signal(first);
      await within(GRACE_ms, this.ended);
    }
    // Also for what the client left behind in its group.
    this.signal("SIGKILL");
    await this.ended;
    // A process that left the group may hold the pipe open for ever.
    await within(1000, this.#output);
  }

  /** The processes of the client's session, and how many of them have `library` mapped. */
  inspect(library: string): { processes: number; mapped: number } {
    const pids = readdirSync("/proc").filter((entry) => /^\d+$/.test(entry) && sessionOf(entry) === this.pid);
    // A library that has been built anew since is still mapped, as `… (deleted)`.
    const entry = new RegExp(` ${RegExp.escape(library)}( \\(deleted\\))?$`, "m");
    return { processes: pids.length, mapped: pids.filter((pid) => entry.test(maps(pid))).length };
  }
}

function start({ name, argv, env, cwd, hideOutput }: Command) {
  try {
    return Bun.spawn(argv, {
      env,
      cwd,
      detached: true,
      stdin: "ignore",
      stdout: hideOutput ? "ignore" : "pipe",
      stderr: "pipe",
    });
  } catch (thrown) {
    throw new RigelError("command", `${name}: ${argv[0]} cannot be started: ${reason(thrown)}`, { cause: thrown });
  }
}

function describe(code: number | null, signal: NodeJS.Signals | number | null): Exit {
  if (signal !== null) {
    const number = typeof signal === "number" ? signal : constants.signals[signal];
    return { status: 128 + number, text: `was killed by ${typeof signal === "number" ? `signal ${signal}` : signal}` };
  }
  return { status: code ?? 1, text: `ended with status ${code ?? "unknown"}` };
}

/** Waits for a promise, but no longer than so many milliseconds. */
async function within(limit_ms: number, promise: Promise<unknown>): Promise<void> {
  const { promise: elapsed, resolve } = Promise.withResolvers<void>();
  const timer = setTimeout(resolve, limit_ms);
  await Promise.race([promise, elapsed]);
  clearTimeout(timer);
}

async function eachLine(stream: ReadableStream<Uint8Array<ArrayBuffer>>, show: (line: string) => void): Promise<void> {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const chunk of stream) {
    const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) show(visible(line));
    if (rest.length > LINE_LIMIT) {
      show(visible(rest));
      rest = "";
    }
  }
  rest += decoder.decode();
  if (rest !== "") show(visible(rest));
}

/** Of a line that a progress bar has overwritten, what would still be seen. */
function visible(line: string): string {
  const text = line.endsWith("\r") ? line.slice(0, -1) : line;
  return text.slice(text.lastIndexOf("\r") + 1);
}

function sessionOf(pid: string): number | undefined {
  const stat = read(`/proc/${pid}/stat`);
  // The second field is the command in parentheses and may hold anything; the session is the fourth after it.
  const fields = stat.slice(stat.lastIndexOf(")") + 2).split(" ");
  return fields[3] === undefined ? undefined : Number(fields[3]);
}

function maps(pid: string): string {
  return read(`/proc/${pid}/maps`);
}

/** A file of /proc, or nothing if the process is gone or belongs to somebody else. */
function read(path: string): string {
  try {
    return readFileSync(path, "utf8");
  } catch {
    return "";
  }
}
