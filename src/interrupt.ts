/**
 * interrupt.ts: what Ctrl-C and other requests to end do, above all to a launch.
 *
 * To a launch only for as long as it runs; the process that asked for it decides what is done before and after. What must not be left
 * behind has its scope (`onEnd`).
 */

import { constants } from "node:os";
import { progress } from "./log.ts";
import { ignored } from "./proc.ts";
import type { ClientProcess } from "./process.ts";

/** The exit status that a shell gives to each. */
export const SIGNAL_STATUS = { SIGINT: 130, SIGTERM: 143, SIGHUP: 129 } as const;

/** Calls back at each request to end, but for those that this process was started to ignore, as by nohup. Returns what ends that. */
export function onRequestToEnd(act: (signal: keyof typeof SIGNAL_STATUS) => void): () => void {
  const handlers = (["SIGINT", "SIGTERM", "SIGHUP"] as const)
    .filter((signal) => !ignored(constants.signals[signal]))
    .map((signal) => ({ signal, handler: () => act(signal) }));
  for (const { signal, handler } of handlers) process.on(signal, handler);
  return () => {
    for (const { signal, handler } of handlers) process.off(signal, handler);
  };
}

/** What is to be done if this process ends before the scope that asked for it. */
const ends = new Set<() => void>();
const end = (): void => ends.forEach((act) => act());
let off: (() => void) | undefined;

/** At the end of its scope, or of this process, also by a signal. */
export function onEnd(act: () => void): Disposable {
  if (ends.size === 0) {
    process.on("exit", end);
    off = onRequestToEnd((signal) => {
      // Whoever else handles it decides whether that is the end.
      if (process.listenerCount(signal) === 1) process.exit(SIGNAL_STATUS[signal]);
    });
  }
  ends.add(act);
  return {
    [Symbol.dispose]() {
      ends.delete(act);
      act();
      if (ends.size > 0) return;
      process.off("exit", end);
      off?.();
    },
  };
}

/**
 * The same signal within so long is the same request: who signals a whole process group, as `timeout` does, reaches `bun run` too, which passes
 * it on.
 */
const ECHO_ms = 150;

/** The first signal is passed on and ends the launch with its report; the second kills the clients. */
export class Interrupt implements Disposable {
  /** The first signal that came. */
  signal: keyof typeof SIGNAL_STATUS | undefined;
  /** When it came, by Date.now(). */
  at_ms = Number.POSITIVE_INFINITY;
  /** Settles when it comes. */
  readonly raised: Promise<void>;
  clients: ClientProcess[] = [];
  readonly #off: () => void;

  constructor() {
    const { promise, resolve } = Promise.withResolvers<void>();
    this.raised = promise;
    let at_ms = 0;
    this.#off = onRequestToEnd((signal) => {
      if (signal === this.signal && Date.now() - at_ms < ECHO_ms) return;
      at_ms = Date.now();
      if (this.signal) {
        progress("killing the clients");
        for (const client of this.clients) client.signal("SIGKILL");
        return;
      }
      this.signal = signal;
      this.at_ms = at_ms;
      progress(`${signal}: stopping the clients (once more kills them)`);
      resolve();
    });
  }

  [Symbol.dispose](): void {
    this.#off();
  }
}
