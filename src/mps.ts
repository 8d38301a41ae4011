/**
 * mps.ts: how clients are on a real GPU together: in time slices, or side by side under an MPS control daemon, which is
 * one that runs already or one of the launch's own.
 *
 * A daemon that Rigel did not start is never stopped, and its folder never removed. One that Rigel started ends with the
 * launch, whatever ends that (guard.ts, when the launcher itself is killed), or with the last program that has joined it (`rigel run`).
 */

import type { Config } from "./config.ts";
import type { Device, Environment } from "./device.ts";
import { RigelError, reason } from "./errors.ts";
import { Guard } from "./guard.ts";
import type { Interrupt } from "./interrupt.ts";
import { progress } from "./log.ts";
import { DaemonFolder, DaemonLogs, OTHERWISE, RUN_MARK, clientsOf, findDaemon, program } from "./mps-daemon.ts";

/** How the clients share their GPU; part of the report. */
export interface Sharing {
  mode: "mps" | "time-slice";
  /** Whose control daemon serves them: the launch's own, or one that ran before; null without MPS and on a simulated GPU. */
  daemon: "private" | "adopted" | null;
  /** The daemon's; null as long as a private one has not been started. */
  pipe_directory: string | null;
}

/** What has been decided for the clients of a launch on real GPUs. */
export interface Decision extends Sharing {
  /** Clients have to be kept from finding a daemon that they are not meant to use. */
  hides: boolean;
  notes: string[];
}

/** What this needs to know of a client. */
interface Sharer {
  /** Is to run under MPS. */
  mps: boolean;
  /** Must not find a daemon. */
  hidden: boolean;
  sm_percent: number | undefined;
  device: Pick<Device, "uuid" | "simulated">;
}

/** How clients had better share their GPU, and why. */
export interface Advice extends Pick<Sharing, "mode"> {
  why: string;
}

/**
 * What `auto` stands for: MPS where somebody has started it, unless that serves nobody yet and time slices are advised; or where a
 * daemon can be started and is advised; else time slices. `why`: what is done is not what is there already.
 */
async function automatic(
  found: Awaited<ReturnType<typeof findDaemon>>,
  gpus: readonly Gpu[],
  advise: () => Advice | undefined,
): Promise<Pick<Sharing, "mode"> & { why?: string }> {
  if (found.state === "running") {
    // Where one process alone may use the GPU that is the daemon's server.
    const advice = gpus.some(({ exclusive }) => exclusive) ? undefined : advise();
    return advice?.mode === "time-slice" && (await servesNobody(found.folder)) ? advice : { mode: "mps" };
  }
  const advice = found.state === "none" && program() !== null ? advise() : undefined;
  return advice?.mode === "mps" ? advice : { mode: "time-slice" };
}

/** What this needs to know of a GPU. */
type Gpu = Pick<Device, "uuid" | "exclusive">;

/** How often, and how long after one another, a daemon is asked for its clients: the process that looked for GPUs was one. */
const ASKED_TIMES = 5;
const ASKED_AGAIN_ms = 100;

/** Whether the daemon has no client; false also if it does not say, as of one that has just ended. */
async function servesNobody(folder: string): Promise<boolean> {
  for (let time = 0; time < ASKED_TIMES; time++) {
    if (time > 0) await Bun.sleep(ASKED_AGAIN_ms);
    const clients = await clientsOf(folder);
    if (clients) return clients.size === 0;
  }
  return false;
}

/**
 * Decides how clients on these GPUs share them; starts nothing. Throws if MPS is asked for and cannot be had.
 * `where` is the field of the configuration that asks, for the error. `advise`: what "auto" had better be, if that is known; asked
 * where it could.
 */
export async function decide(
  asked: Config["sharing"],
  gpus: readonly Gpu[],
  environment: Environment,
  where: string,
  advise: () => Advice | undefined,
): Promise<Decision> {
  const uuids = gpus.map(({ uuid }) => uuid);
  const found = await findDaemon(environment, uuids);
  const { mode, why = undefined } = asked === "auto" ? await automatic(found, gpus, advise) : { mode: asked };
  const notes =
    found.state === "unusable"
      ? [`${found.folder}: ${found.why}; it is not used, and left as it is, as Rigel did not make it`]
      : [];
  if (mode === "time-slice") {
    if (why !== undefined) notes.push(`time slices, though an MPS daemon runs: ${why}; "sharing": "mps" uses it`);
    return {
      mode,
      daemon: null,
      pipe_directory: null,
      hides: asked === "time-slice" || found.state !== "none",
      notes,
    };
  }
  if (found.state === "running") return { mode, daemon: "adopted", pipe_directory: found.folder, hides: false, notes };
  if (program() === null)
    throw new RigelError(
      "device",
      `${where}: expected nvidia-cuda-mps-control on PATH for "mps", as no MPS daemon runs; it comes with NVIDIA's driver. ` +
        `Install it, or ${OTHERWISE}`,
    );
  if (why !== undefined) notes.push(`an MPS daemon of the launch's own: ${why}; "sharing": "time-slice" goes without`);
  return { mode, daemon: "private", pipe_directory: null, hides: false, notes };
}

/** The sharing of a launch while it lasts. */
export class Mps implements AsyncDisposable {
  readonly sharing: Sharing;
  readonly #folder: DaemonFolder | undefined;
  readonly #guard: Guard | undefined;
  readonly #logs: DaemonLogs | undefined;

  private constructor(sharing: Sharing, folder?: DaemonFolder, guard?: Guard) {
    this.sharing = sharing;
    this.#folder = folder;
    this.#guard = guard;
    if (sharing.daemon === "private" && folder) this.#logs = new DaemonLogs(folder.logs);
    if (sharing.daemon === "adopted" && sharing.pipe_directory !== null)
      this.#logs = DaemonLogs.of(sharing.pipe_directory);
  }

  /**
   * Prepares what the clients need, and starts a daemon if that was decided. `where` is the field that asked for it, `otherwise` what to
   * do where it cannot be had. Where `interrupt` has been raised meanwhile the daemon may serve nobody.
   */
  static async open(
    sharing: Sharing,
    clients: readonly Sharer[],
    where: string,
    interrupt: Interrupt,
    otherwise?: string,
  ): Promise<Mps> {
    const starts = sharing.daemon === "private";
    if (!starts && !clients.some(({ hidden }) => hidden)) return new Mps(sharing);
    const folder = DaemonFolder.make(where, otherwise);
    const guard = starts
      ? new Guard(folder.mark, [folder.path], { farewell: folder.farewell, guest: RUN_MARK })
      : new Guard(folder.mark, [folder.path]);
    const opened = new Mps(starts ? { ...sharing, pipe_directory: folder.pipe } : sharing, folder, guard);
    if (!starts) return opened;
    try {
      const served = clients.filter(({ mps, device }) => mps && !device.simulated).map(({ device }) => device.uuid);
      await folder.start([...new Set(served)], interrupt);
      return opened;
    } catch (thrown) {
      await opened[Symbol.asyncDispose]();
      throw thrown;
    }
  }

  /** What a client needs in its environment for this sharing. `own` is what the configuration has for it. */
  environment({ mps, hidden, sm_percent, device }: Sharer, own: Record<string, string>): Record<string, string> {
    if (hidden) return this.#folder ? { CUDA_MPS_PIPE_DIRECTORY: this.#folder.empty } : {};
    if (!mps) return {};
    const limit = sm_percent === undefined ? {} : { CUDA_MPS_ACTIVE_THREAD_PERCENTAGE: String(sm_percent) };
    const pipe = this.sharing.pipe_directory;
    // Who names a daemon for one client means it.
    if (device.simulated || pipe === null || own["CUDA_MPS_PIPE_DIRECTORY"] !== undefined) return limit;
    return {
      ...limit,
      CUDA_MPS_PIPE_DIRECTORY: pipe,
      ...(this.#folder && this.sharing.daemon === "private" && { CUDA_MPS_LOG_DIRECTORY: this.#folder.logs }),
    };
  }

  /**
   * The processes that are clients of the launch's own daemon now; undefined if it does not say. Of a daemon that was
   * adopted nothing is said: it may be in another pid namespace.
   */
  async processes(): Promise<ReadonlySet<number> | undefined> {
    const { daemon, pipe_directory } = this.sharing;
    return daemon === "private" && pipe_directory !== null ? await clientsOf(pipe_directory) : undefined;
  }

  /** The last lines about faults that the daemon and its servers have logged since the launch began. */
  evidence(): string[] {
    return this.#logs?.faults() ?? [];
  }

  /** Ends what was started and removes what was made. Says so if it cannot. */
  async [Symbol.asyncDispose](): Promise<void> {
    if (!this.#folder) return;
    try {
      if (this.sharing.daemon === "private") {
        const { guests } = this.#folder;
        if (guests.length > 0) {
          progress(`MPS: the daemon ends with what has joined this launch (process ${guests.join(", ")})`);
          this.#guard?.stay();
          return;
        }
        await this.#folder.stop();
      }
      this.#folder.remove();
    } catch (thrown) {
      progress(`${this.#folder.path}: could not be removed (${reason(thrown)})`);
    }
    this.#guard?.[Symbol.dispose]();
  }
}

/**
 * What to say of clients that failed one after the other under one MPS server; undefined if there is nothing to say.
 *
 * A fatal fault of one client (an illegal address, say) is reported to all clients on the GPU, and MPS does not say whose
 * it was (NVIDIA's MPS documentation, "Error Containment"). So the first to end is where to look first, not the culprit.
 */
export function sharedFault(
  failed: readonly { name: string; text: string; at_ms: number; gpu: string }[],
): string | undefined {
  const [first, ...later] = failed.toSorted((a, b) => a.at_ms - b.at_ms);
  const others = later.filter(({ gpu }) => gpu === first?.gpu);
  if (!first || others.length === 0) return undefined;
  const then = others.map(
    ({ name, text, at_ms }) => `${name} ${text} ${((at_ms - first.at_ms) / 1000).toFixed(1)} s later`,
  );
  return (
    `${first.name} was the first to fail (it ${first.text}), ${then.join(", ")}. They shared the GPU through MPS, which ` +
    `reports a fatal GPU fault of one client to all of them: ${first.name} may have ended the others. Its own output says ` +
    'what happened to it; "isolation": "process" keeps a client out of MPS, and its faults to itself'
  );
}
