/** self.ts: how this program starts itself once more: from a checkout, and from the single file. */

import { join } from "node:path";

/** The words before the arguments. */
export function commandLine(): string[] {
  return Bun.isStandaloneExecutable ? [process.execPath] : [process.execPath, join(import.meta.dir, "cli.ts")];
}
