/** self.ts: how this program starts itself once more: from a checkout, and from the single file; and ahead of all other programs. */

import { join } from "node:path";

/** The words before the arguments. */
export function commandLine(): string[] {
  return Bun.isStandaloneExecutable ? [process.execPath] : [process.execPath, join(import.meta.dir, "cli.ts")];
}

/**
 * The words before a command that is to have the processors before all other programs of the machine, so that what is measured is not
 * what else runs here; none where that may not be. Leaves other programs a twentieth of the time (sched_rt_runtime_us).
 */
export function ahead(): string[] {
  const words = ["chrt", "--rr", "1"];
  return Bun.which("chrt") !== null && Bun.spawnSync([...words, "true"]).success ? words : [];
}
