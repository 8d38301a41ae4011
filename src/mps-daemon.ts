/**
 * mps-daemon.ts: the MPS control daemon seen from outside: found, asked, started for one launch, stopped, its logs read.
 *
 * What it does (its `control` socket and pid file in the pipe directory, control.log and server.log in the log directory,
 * `start_server`, `get_client_list`, `quit -t`) is described in NVIDIA's MPS documentation, "Tools and Interface
 * Reference", and in its manual page. Only the daemon in a folder that was made here is ever stopped.
 */

import { closeSync, existsSync, mkdirSync, mkdtempSync, openSync, readFileSync, readSync, rmSync } from "node:fs";
import { connect } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Environment } from "./device.ts";
import { RigelError, reason } from "./errors.ts";
import type { Interrupt } from "./interrupt.ts";
import { statAt } from "./path.ts";
import { progress, quoted } from "./log.ts";
import { commandOf, environmentOf, living, startedWith } from "./proc.ts";

const PROGRAM = "nvidia-cuda-mps-control";
const DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps";
const DEFAULT_LOG_DIRECTORY = "/var/log/nvidia-mps";
/** What to do where MPS cannot be had. */
export const OTHERWISE = 'set sharing to "auto" or "time-slice" to go without';

/** Longest path of a Unix socket, without the zero at its end: sockaddr_un of Linux. */
const SOCKET_PATH_bytes = 107;
const CONNECT_ms = 2000;
const ASK_ms = 5000;
/** The daemon answers within milliseconds; its server makes a context on every GPU first, which can take many seconds. */
const START_ms = 30_000;
/** How long the daemon may take from the end of the program that starts it until it can be seen. */
const SEEN_ms = 2000;
/** After how long the daemon ends servers whose clients have not ended. */
const QUIT_s = 5;
const KILL_ms = 2000;
const LOOK_ms = 50;
/** The command of a `rigel run` and all that it starts have this in their environment: by which run. */
export const RUN_MARK = "RIGEL_RUN";

/** Where the program is that starts daemons and talks to them; null if it is not on PATH. */
export function program(): string | null {
  return Bun.which(PROGRAM, { PATH: process.env["PATH"] ?? "" });
}

type Found =
  | { state: "none"; folder: string }
  | { state: "running"; folder: string }
  /** `isGone`: there is no daemon any more. */
  | { state: "unusable"; folder: string; why: string; isGone: boolean };

/** Looks for the daemon that a program started in this environment would use, and whether it serves all of `uuids`. */
export async function findDaemon(environment: Environment, uuids: readonly string[]): Promise<Found> {
  const folder = environment["CUDA_MPS_PIPE_DIRECTORY"] || DEFAULT_PIPE_DIRECTORY;
  const unusable = (why: string, isGone = false): Found => ({ state: "unusable", folder, why, isGone });
  const refused = await connectTo(folder);
  const pid = pidOf(folder);
  // Not the pid file alone: the daemon may be in another pid namespace, or its number somebody else's by now.
  if (refused !== undefined) {
    if (pid === undefined && !existsSync(join(folder, "control"))) return { state: "none", folder };
    const isGone = pid === undefined ? refused === "ECONNREFUSED" : commandOf(pid) === "";
    const gone = isGone && pid !== undefined ? `; process ${pid} of its pid file is gone` : "";
    if (refused === "EACCES" || refused === "EPERM")
      return unusable(`its MPS control socket belongs to somebody else (${refused})`);
    return unusable(`it holds the files of an MPS control daemon that does not answer (${refused}${gone})`, isGone);
  }
  // Also of one that is stopped, the kernel accepts connections.
  const answer = program() === null ? "unasked" : await ask(folder, "get_server_list");
  if (answer === "late")
    return unusable(
      `its MPS control daemon does not answer within ${ASK_ms / 1000} s${pid ? ` (process ${pid})` : ""}`,
    );
  // Indices in it cannot be compared: the daemon numbers the GPUs that it serves anew.
  const served = daemonEnvironment(folder)["CUDA_VISIBLE_DEVICES"]?.split(",") ?? [];
  const missing = uuids.filter((uuid) => !served.some((one) => uuid.toLowerCase().startsWith(one.toLowerCase())));
  if (served.length > 0 && served.every((one) => /^(GPU|MIG)-/i.test(one)) && missing.length > 0)
    return unusable(`its MPS control daemon serves other GPUs (${served.join(", ")}), not ${missing.join(", ")}`);
  return { state: "running", folder };
}

/** What the daemon of a folder was started with; empty if that cannot be seen from here. */
function daemonEnvironment(folder: string): Record<string, string> {
  const pid = pidOf(folder);
  return pid !== undefined && commandOf(pid).includes(PROGRAM) ? environmentOf(pid) : {};
}

function pidOf(folder: string): number | undefined {
  const pid = Number(contents(join(folder, `${PROGRAM}.pid`)));
  return Number.isInteger(pid) && pid > 0 ? pid : undefined;
}

/** Undefined if somebody listens at the control socket of a folder, else why not: the code of the error. */
function connectTo(folder: string): Promise<string | undefined> {
  const { promise, resolve } = Promise.withResolvers<string | undefined>();
  const socket = connect(join(folder, "control"));
  socket.setTimeout(CONNECT_ms, () => resolve("ETIMEDOUT"));
  socket.on("connect", () => resolve(undefined));
  socket.on("error", (error) => {
    const code = "code" in error ? String(error.code) : error.message;
    // So says Bun, too, of a socket of another type than a stream's, at which somebody does listen.
    resolve(code === "ECONNREFUSED" && isListening(join(folder, "control")) ? undefined : code);
  });
  return promise.finally(() => socket.destroy());
}

/** Whether the kernel knows of a socket bound to this path at which somebody listens; of any type. */
function isListening(path: string): boolean {
  const ACCEPTS = 0x10000; // __SO_ACCEPTCON in the column Flags
  return contents("/proc/net/unix")
    .split("\n")
    .some((line) => {
      const [, , , flags, , , , ...bound] = line.trim().split(/\s+/);
      return (Number.parseInt(flags ?? "0", 16) & ACCEPTS) !== 0 && bound.join(" ") === path;
    });
}

/** Has the daemon of a folder carry out a command; its answer, or that it failed, or took longer than the limit. */
async function ask(folder: string, command: string, limit_ms = ASK_ms): Promise<"failed" | "late" | { text: string }> {
  try {
    const child = Bun.spawn([program() ?? PROGRAM], {
      env: { ...process.env, CUDA_MPS_PIPE_DIRECTORY: folder },
      stdin: Buffer.from(`${command}\n`),
      stdout: "pipe",
      stderr: "ignore",
      // Out of reach of the terminal's Ctrl-C.
      detached: true,
      timeout: limit_ms,
      killSignal: "SIGKILL",
    });
    const [text, status] = await Promise.all([child.stdout.text(), child.exited]);
    if (child.signalCode !== null) return "late";
    return status === 0 ? { text } : "failed";
  } catch {
    return "failed";
  }
}

/**
 * The processes that are clients of the daemon of a folder; undefined if it does not say, or names others than there are: it
 * gives 0 for those whose numbers it cannot learn, and its own for those of another pid namespace.
 */
export async function clientsOf(folder: string): Promise<ReadonlySet<number> | undefined> {
  const servers = await ask(folder, "get_server_list");
  if (typeof servers === "string") return undefined;
  const found = new Set<number>();
  for (const server of numbers(servers.text)) {
    const clients = await ask(folder, `get_client_list ${server}`);
    if (typeof clients === "string") return undefined;
    for (const pid of numbers(clients.text)) found.add(pid);
  }
  return [...found].every((pid) => existsSync(`/proc/${pid}`)) ? found : undefined;
}

/** The folder of one launch, which nobody else can enter: for a daemon of its own, and for clients that must find none. */
export class DaemonFolder {
  readonly path: string;
  /** The field of the configuration that asks for it, for errors. */
  readonly #where: string;
  readonly #otherwise: string;

  private constructor(path: string, where: string, otherwise: string) {
    this.path = path;
    this.#where = where;
    this.#otherwise = otherwise;
  }

  /** On a path short enough for the daemon's sockets. */
  static make(where: string, otherwise = OTHERWISE): DaemonFolder {
    const problems: string[] = [];
    for (const parent of new Set([process.env["XDG_RUNTIME_DIR"], tmpdir(), "/tmp"])) {
      if (!parent?.startsWith("/")) continue;
      const prefix = join(parent, `rigel-mps-${process.pid}-`);
      // On a longer one the daemon starts and ends at once, without a word of why.
      if (Buffer.byteLength(`${prefix}XXXXXX/pipe/control_privileged`) > SOCKET_PATH_bytes) {
        problems.push(`${parent} (its path is too long for a socket)`);
        continue;
      }
      try {
        const made = new DaemonFolder(mkdtempSync(prefix), where, otherwise);
        for (const inside of [made.pipe, made.logs, made.empty]) mkdirSync(inside, { mode: 0o700 });
        return made;
      } catch (thrown) {
        problems.push(`${parent} (${reason(thrown)})`);
      }
    }
    throw new RigelError(
      "device",
      `${where}: no folder can be made for MPS in ${problems.join(" or ")}; set TMPDIR to one with room`,
    );
  }

  get pipe(): string {
    return join(this.path, "pipe");
  }

  get logs(): string {
    return join(this.path, "log");
  }

  /** As a pipe directory it hides whatever daemon runs. */
  get empty(): string {
    return join(this.path, "none");
  }

  /** What the daemon, its servers and its clients have in their environment, and no other process. */
  get mark(): string {
    return `CUDA_MPS_PIPE_DIRECTORY=${this.pipe}`;
  }

  /** Ends the daemon from a shell, when the launcher no longer can. */
  get farewell(): string {
    const quit = `timeout ${QUIT_s + 2} ${quoted(program() ?? PROGRAM)}`;
    return `echo quit -t ${QUIT_s} | CUDA_MPS_PIPE_DIRECTORY=${quoted(this.pipe)} ${quit}`;
  }

  /**
   * Starts a daemon for these GPUs, and its server, so that what is wrong is known before a client starts. Once there is a request to end
   * nothing is waited for any more: what there is by then, stop() ends.
   */
  async start(uuids: readonly string[], interrupt: Interrupt): Promise<void> {
    await this.#startControl(uuids, interrupt);
    const began_ms = performance.now();
    while (!interrupt.signal && (await connectTo(this.pipe)) !== undefined) {
      const waited_ms = performance.now() - began_ms;
      if (waited_ms > START_ms || (waited_ms > SEEN_ms && this.#processes().length === 0))
        this.#fail(`${PROGRAM} -d ended well, but no daemon answers`);
      await Bun.sleep(LOOK_ms);
    }
    if (interrupt.signal) return;
    progress(`MPS: started a control daemon (process ${pidOf(this.pipe) ?? "unknown"}, ${this.pipe})`);
    await this.#startServer(interrupt);
  }

  async #startControl(uuids: readonly string[], interrupt: Interrupt): Promise<void> {
    const said = openSync(this.#said, "a", 0o600);
    let child;
    try {
      child = Bun.spawn([program() ?? PROGRAM, "-d"], {
        env: {
          ...process.env,
          CUDA_MPS_PIPE_DIRECTORY: this.pipe,
          CUDA_MPS_LOG_DIRECTORY: this.logs,
          // By UUID: of indices, clients would see a numbering of the daemon's own. Other GPUs are none of its business.
          CUDA_VISIBLE_DEVICES: uuids.join(","),
        },
        cwd: this.path,
        // Out of reach of the terminal's Ctrl-C.
        detached: true,
        stdin: "ignore",
        // A file: the daemon may keep it open.
        stdout: said,
        stderr: said,
        timeout: START_ms,
        killSignal: "SIGKILL",
      });
    } catch (thrown) {
      return this.#fail(`${PROGRAM} could not be started (${reason(thrown)})`);
    } finally {
      closeSync(said);
    }
    void interrupt.raised.then(() => child.kill("SIGKILL"));
    const status = await child.exited;
    if (interrupt.signal) return;
    if (child.signalCode !== null) this.#fail(`${PROGRAM} -d was ended by ${child.signalCode}`);
    if (status !== 0) this.#fail(`${PROGRAM} -d ended with status ${status}`);
  }

  /** Clients would start the server; started now, its failure is seen. A daemon that says neither is left to them. */
  async #startServer(interrupt: Interrupt): Promise<void> {
    const until_ms = performance.now() + START_ms;
    let answered = false;
    const asked = ask(this.pipe, `start_server -uid ${process.getuid?.() ?? 0}`, START_ms).then(() => {
      answered = true;
    });
    while (!interrupt.signal && performance.now() < until_ms) {
      const text = contents(join(this.logs, "control.log"));
      if (/Server \d+ exited with status [1-9]|encountered a fatal exception/i.test(text))
        this.#fail("its server did not start");
      if (/NEW SERVER \d+: Ready/i.test(text)) break;
      if (this.#processes().length === 0) this.#fail("its control daemon has ended");
      if (answered) {
        const servers = await ask(this.pipe, "get_server_list");
        if (typeof servers !== "string" && numbers(servers.text).length > 0) break;
      }
      await Bun.sleep(LOOK_ms);
    }
    await Promise.race([asked, interrupt.raised]);
  }

  /** Ends the daemon that was started here, if it runs: asked to first, then by signals. Says so if that fails. */
  async stop(): Promise<void> {
    if (await this.#isGone(0)) return;
    const asked = await ask(this.pipe, `quit -t ${QUIT_s}`, (QUIT_s + 2) * 1000);
    if (await this.#isGone(typeof asked === "string" ? 0 : KILL_ms)) return;
    for (const signal of ["SIGTERM", "SIGKILL"] as const) {
      for (const pid of this.#processes())
        try {
          process.kill(pid, signal);
        } catch {
          // It has just ended.
        }
      if (await this.#isGone(KILL_ms)) return;
    }
    progress(`MPS: process ${this.#processes().join(", ")} does not end; it is left to itself`);
  }

  remove(): void {
    rmSync(this.path, { recursive: true, force: true });
  }

  /** What the program that starts the daemon says. */
  get #said(): string {
    return join(this.path, "said");
  }

  /** Processes that are none of this launch's: `rigel run` has joined it with them, and they are its daemon's clients. */
  get guests(): number[] {
    return living().flatMap(({ pid }) => (startedWith(pid, [this.mark]) && isGuest(pid) ? [pid] : []));
  }

  /** The daemon and its servers; while clients run, they too. */
  #processes(): number[] {
    const daemon = pidOf(this.pipe);
    return living().flatMap(({ pid }) =>
      (startedWith(pid, [this.mark]) && !isGuest(pid)) || (pid === daemon && commandOf(pid).includes(PROGRAM))
        ? [pid]
        : [],
    );
  }

  async #isGone(limit_ms: number): Promise<boolean> {
    const until_ms = performance.now() + limit_ms;
    for (;;) {
      // Twice: of a daemon that is just being started, one look may miss who starts it, which has ended, and what that has started since.
      if (this.#processes().length === 0 && this.#processes().length === 0) return true;
      if (performance.now() >= until_ms) return false;
      await Bun.sleep(LOOK_ms);
    }
  }

  #fail(what: string): never {
    const lines = [this.#said, ...LOGS.map((log) => join(this.logs, log))].flatMap((path) => lastLines(contents(path)));
    throw new RigelError(
      "device",
      `${this.#where}: "mps" cannot be had: ${what}${lines.length > 0 ? `: ${lines.join(" / ")}` : ""}. A container ` +
        "without the rights, a GPU that cannot do MPS, or one in exclusive mode that another program uses, are usual " +
        `causes; ${this.#otherwise}`,
    );
  }
}

/** A launch may itself be the command of a `rigel run`: then all that it starts has that one's mark. */
function isGuest(pid: number): boolean {
  const run = environmentOf(pid)[RUN_MARK];
  return run !== undefined && run !== process.env[RUN_MARK];
}

const LOGS = ["control.log", "server.log"];
const FAULT = /fatal|exception|\bfault|fail|error|terminat|exited with status [1-9]/i;
/** What the logs say of every client that comes and goes. */
const USUAL = /Receive command failed, assuming client exit|User did not send valid credentials/i;
const LINES = 3;
/** Far more than a launch makes a daemon say; one that was adopted may have run for months. */
const TAIL_bytes = 65_536;

/** What a daemon and its servers log from now on. */
export class DaemonLogs {
  readonly #folder: string;
  /** Length of each log now: what came before is about others. */
  readonly #before: ReadonlyMap<string, number>;

  constructor(folder: string) {
    this.#folder = folder;
    this.#before = new Map(LOGS.map((name) => [name, size(join(folder, name))]));
  }

  /** The logs of a daemon that runs, by its pipe directory. */
  static of(pipe: string): DaemonLogs {
    const name = "CUDA_MPS_LOG_DIRECTORY";
    return new DaemonLogs(daemonEnvironment(pipe)[name] ?? (process.env[name] || DEFAULT_LOG_DIRECTORY));
  }

  /** The last lines of each that speak of a fault. */
  faults(): string[] {
    return LOGS.flatMap((name) => {
      const lines = tail(join(this.#folder, name), this.#before.get(name) ?? 0).split("\n");
      const faults = lines.filter((line) => FAULT.test(line) && !USUAL.test(line));
      return lastLines(faults.join("\n")).map((line) => `${name}: ${line.trim()}`);
    });
  }
}

/** What a file has from an offset on, or its end if that is long. */
function tail(path: string, from: number): string {
  try {
    const file = openSync(path, "r");
    try {
      const buffer = new Uint8Array(TAIL_bytes);
      const read = readSync(file, buffer, 0, TAIL_bytes, Math.max(from, size(path) - TAIL_bytes));
      return new TextDecoder().decode(buffer.subarray(0, read));
    } finally {
      closeSync(file);
    }
  } catch {
    return "";
  }
}

function lastLines(text: string): string[] {
  return text
    .split("\n")
    .filter((line) => line.trim() !== "")
    .slice(-LINES);
}

function numbers(text: string): number[] {
  return text.split(/\s+/).flatMap((word) => (/^\d+$/.test(word) ? [Number(word)] : []));
}

function size(path: string): number {
  return statAt(path)?.size ?? 0;
}

function contents(path: string): string {
  try {
    return readFileSync(path, "utf8");
  } catch {
    return "";
  }
}
