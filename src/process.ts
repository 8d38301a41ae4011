/**
 * process.ts: one client as a process group: started, read line by line, signalled, stopped, and looked at from outside.
 *
 * Each client has a session of its own, so that the terminal's Ctrl-C comes from Rigel alone. A signal reaches its group,
 * and what has left the group but still has the client's marks in its environment. Only ever signals what it started.
 */

import { constants } from "node:os";
import { bareReason } from "./attachment.ts";
import { RigelError, reason } from "./errors.ts";
import { heard, progress } from "./log.ts";
import { type Living, hasMapped, living, startedWith } from "./proc.ts";

export interface Command {
  name: string;
  /** The field of the configuration that it comes from, for errors. */
  where: string;
  argv: string[];
  env: Record<string, string | undefined>;
  /** Entries of `env` (`NAME=value`) that together no process but this client's has. */
  marks: readonly string[];
  cwd: string;
  /** Standard output is a result that the launcher reports itself, not something to show. */
  hideOutput: boolean;
}

/** How a process ended. */
interface Exit {
  /** As a shell would give it: 128 + n for signal n. */
  status: number;
  /** In words, for messages. */
  text: string;
}

/** After how long what was told to end is killed. */
const GRACE_ms = 5000;
/**
 * After how long it gets SIGTERM, if the first signal was a terminal's: as late as leaves time for that, since what handles the first one may take
 * its time.
 */
const TERM_ms = 4000;
/** How often it is looked whether what was told to end has. */
const LOOK_ms = 50;
/** How long output is read on once nothing that should hold the pipe is left. */
const OUTPUT_ms = 1000;
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
  /** What the library has said in its output about running without Rigel. All of that is read once it has been stopped. */
  bare: string | undefined;
  /** What the client had started and not waited for when it ended by itself. Known once it has been told to stop. */
  leftBehind: readonly Living[] = [];
  readonly ended: Promise<void>;
  readonly #child: ReturnType<typeof start>;
  readonly #marks: readonly string[];
  readonly #readers: readonly Reader[];
  readonly #output: Promise<unknown>;
  /** Nothing of it is left: its number may be somebody else's by now. */
  #over = false;
  /** Its process group; undefined once nothing of that is left, which may be long before: its number is the same. */
  #group: number | undefined;
  #refused = false;

  constructor(command: Command, show: (line: string) => void) {
    this.name = command.name;
    this.#marks = command.marks;
    this.#child = start(command);
    this.pid = this.#child.pid;
    this.#group = this.pid;
    const { stdout, stderr } = this.#child;
    this.#readers = [stderr, ...(stdout ? [stdout] : [])].map((stream) => stream.getReader());
    const hear = (line: string): void => {
      this.bare ??= bareReason(line);
      show(line);
    };
    this.#output = Promise.all(this.#readers.map((reader) => eachLine(reader, hear)));
    this.ended = this.#child.exited.then(() => {
      this.exit = { ...describe(this.#child.exitCode, this.#child.signalCode), at_ms: performance.now() };
    });
  }

  /** Sends a signal to all of the client. Nothing happens if it is gone. */
  signal(signal: NodeJS.Signals): void {
    if (this.#over) return;
    if (this.#group !== undefined) this.#send(-this.#group, signal);
    for (const { pid, group } of this.#processes()) if (group !== this.#group) this.#send(pid, signal);
  }

  /**
   * Whether it has just turned out that nothing of its group is left. To be asked again and again, so that nobody who has the number
   * later is taken for the client.
   */
  hasScattered(): boolean {
    if (!this.exit || this.#group === undefined) return false;
    try {
      process.kill(-this.#group, 0);
    } catch (thrown) {
      if (thrown instanceof Error && "code" in thrown && thrown.code === "ESRCH") this.#group = undefined;
    }
    return this.#group === undefined;
  }

  /** Asks all of the client to end, then makes it. Returns once that is done, or cannot be, and its output has ended. */
  async stop(first: NodeJS.Signals = "SIGTERM"): Promise<void> {
    if (this.#over) return;
    if (!this.exit) this.stopped = true;
    else if (!this.stopped) this.leftBehind = this.#processes();
    this.signal(first);
    // Which may be ignored by who ends well at SIGTERM: a shell has what it starts in the background ignore SIGINT, nohup SIGHUP.
    const ofTerminal = first === "SIGINT" || first === "SIGHUP";
    let isGone = await this.#isGone(ofTerminal ? TERM_ms : GRACE_ms);
    if (!isGone && ofTerminal) {
      this.signal("SIGTERM");
      isGone = await this.#isGone(GRACE_ms - TERM_ms);
    }
    if (!isGone) {
      this.signal("SIGKILL");
      // A driver may take its time, but what cannot be signalled is not worth waiting for.
      if (!(await this.#isGone(this.#refused ? LOOK_ms : GRACE_ms)))
        progress(`${this.name}: process ${this.pid} does not end; it is left to itself`);
    }
    this.#over = true;
    // A process that has hidden its marks may hold the pipe open for ever.
    await within(OUTPUT_ms, this.#output);
    await Promise.all(this.#readers.map((reader) => reader.cancel()));
    this.#child.unref();
  }

  /** The processes of the client's session, and how many of them have `library` mapped. */
  inspect(library: string): { processes: number; mapped: number } {
    const own = living().filter(({ session }) => session === this.pid);
    return { processes: own.length, mapped: own.filter(({ pid }) => hasMapped(pid, library)).length };
  }

  #processes(): Living[] {
    return living().filter(({ pid, group }) => group === this.#group || startedWith(pid, this.#marks));
  }

  /** Waits for all of the client to end; false if it has not within the limit. */
  async #isGone(limit_ms: number): Promise<boolean> {
    const until_ms = performance.now() + limit_ms;
    while (!this.exit || this.#processes().length > 0) {
      const left_ms = until_ms - performance.now();
      if (left_ms <= 0) return false;
      if (this.exit) await Bun.sleep(LOOK_ms);
      else await within(left_ms, this.ended);
    }
    return true;
  }

  #send(target: number, signal: NodeJS.Signals): void {
    try {
      process.kill(target, signal);
    } catch (thrown) {
      const code = thrown instanceof Error && "code" in thrown ? thrown.code : undefined;
      if (code !== "ESRCH" && code !== "EPERM") throw thrown;
      if (code === "ESRCH" || this.#refused) return;
      this.#refused = true;
      progress(`${this.name}: ${signal} could not be sent to process ${Math.abs(target)}: it runs as another user`);
    }
  }
}

function start({ where, argv, env, cwd, hideOutput }: Command) {
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
    throw new RigelError(
      "command",
      `${where}: expected a program that can be started, got ${argv[0]} (${whyNotStarted(thrown)})`,
      { cause: thrown },
    );
  }
}

/** Why a file that is there and may be executed could not be: the system's words are of a file that is not there, or none. */
export function whyNotStarted(thrown: unknown): string {
  switch (thrown instanceof Error && "code" in thrown ? thrown.code : undefined) {
    case "ENOENT":
      return "ENOENT: what its first line, or its header, names to run it with is not there";
    case "ENOEXEC":
      return "ENOEXEC: it is no program of this machine, and its first line does not name one with #!";
    default:
      return reason(thrown);
  }
}

/** How a process ended, in words. */
export function describe(code: number | null, signal: NodeJS.Signals | number | null): Exit {
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

interface Reader {
  read(): Promise<{ done: boolean; value?: Uint8Array<ArrayBuffer> | undefined }>;
  cancel(): Promise<void>;
}

async function eachLine(reader: Reader, show: (line: string) => void): Promise<void> {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) show(visible(line));
    if (rest.length > LINE_LIMIT) {
      show(visible(rest));
      rest = "";
    }
    // Where nobody takes it the program waits, as it would without Rigel; and timers, signals and other clients have their turn
    // whatever it prints: a read whose data is there already, and `heard`, give them none.
    await heard();
    await new Promise(setImmediate);
  }
  rest += decoder.decode();
  if (rest !== "") show(visible(rest));
}

/** Of a line that a progress bar has overwritten, what would still be seen. */
function visible(line: string): string {
  const text = line.endsWith("\r") ? line.slice(0, -1) : line;
  return text.slice(text.lastIndexOf("\r") + 1);
}
