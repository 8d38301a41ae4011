/** output.ts: files that results are written to. */

import { closeSync, existsSync, openSync, rmSync, statSync } from "node:fs";
import { RigelError, reason } from "./errors.ts";

/**
 * Before minutes are spent on what could not be written down. What is in a file that is there stays until then. Returns what removes
 * the file again if it was not there before and nothing has been written.
 */
export function checkOutput(option: string, file: string, mode = 0o666): () => void {
  const fresh = !existsSync(file);
  try {
    closeSync(openSync(file, "a", mode));
  } catch (thrown) {
    throw new RigelError("config", `${option}: expected a file that can be written, got ${file} (${reason(thrown)})`, {
      cause: thrown,
    });
  }
  return () => {
    if (fresh && statSync(file, { throwIfNoEntry: false })?.size === 0) rmSync(file, { force: true });
  };
}
