/**
 * world.ts: a segment of a test's own, and programs on the simulated GPU that are its clients.
 */

import { join } from "node:path";
import { Native } from "../src/native.ts";
import { Segment } from "../src/segment.ts";
import { Scratch, plainEnvironment } from "./rigel.ts";

export class World implements AsyncDisposable {
  readonly scratch = new Scratch();
  readonly native: Native;
  readonly segment: Segment;
  readonly #children: Bun.Subprocess[] = [];

  constructor(native: Native) {
    this.native = native;
    this.segment = Segment.create(native, join(this.scratch.path, "segment"));
    this.segment.configure({ policy: "priority" });
  }

  /** Starts a client, which is killed at the end if it still runs. */
  run(command: string[], name: string, kind: "high" | "best-effort", env: Record<string, string> = {}): Bun.Subprocess {
    const { files } = this.native;
    const child = Bun.spawn(command, {
      env: {
        ...plainEnvironment(),
        LD_LIBRARY_PATH: files.simulator,
        LD_PRELOAD: files.interposer,
        RIGEL_SIM_STATE: join(this.scratch.path, "gpu"),
        RIGEL_SEGMENT: this.segment.path,
        RIGEL_CLASS: kind,
        RIGEL_NAME: name,
        ...env,
      },
      stdout: "ignore",
      stderr: "inherit",
    });
    this.#children.push(child);
    return child;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const child of this.#children) child.kill("SIGKILL");
    await Promise.all(this.#children.map((child) => child.exited));
    this.scratch[Symbol.dispose]();
  }
}
