/**
 * interrupt.ts: what Ctrl-C and other requests to end do to a launch.
 *
 * Only for as long as a launch runs; the process that asked for it decides what is done before and after.
 */

import { constants } from "node:os";
import { progress } from "./log.ts";
import { ignored } from "./proc.ts";
import type { ClientProcess } from "./process.ts";

/** The exit status that a shell gives to each. */
export const SIGNAL_STATUS = { SIGINT: 130, SIGTERM: 143, SIGHUP: 129 } as const;

/** The first signal is passed on and ends the launch with its report; the second kills the clients. */
export class Interrupt implements Disposable {
  /** The first signal that came. */
  signal: keyof typeof SIGNAL_STATUS | undefined;
  /** Settles when it comes. */
  readonly raised: Promise<void>;
  clients: ClientProcess[] = [];
  readonly #handlers: [keyof typeof SIGNAL_STATUS, () => void][];

  constructor() {
    const { promise, resolve } = Promise.withResolvers<void>();
    this.raised = promise;
    const handle = (signal: keyof typeof SIGNAL_STATUS) => (): void => {
      if (this.signal) {
        progress("killing the clients");
        for (const client of this.clients) client.signal("SIGKILL");
        return;
      }
      this.signal = signal;
      progress(`${signal}: stopping the clients (once more kills them)`);
      resolve();
    };
    this.#handlers = [
      ["SIGINT", handle("SIGINT")],
      ["SIGTERM", handle("SIGTERM")],
      ["SIGHUP", handle("SIGHUP")],
    ];
    // What nohup has made the launcher ignore, it goes on ignoring.
    for (const [signal, handler] of this.#handlers)
      if (!ignored(constants.signals[signal])) process.on(signal, handler);
  }

  [Symbol.dispose](): void {
    for (const [signal, handler] of this.#handlers) process.off(signal, handler);
  }
}
