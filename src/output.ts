/** output.ts: files that results are written to. */

import { closeSync, openSync } from "node:fs";
import { RigelError, reason } from "./errors.ts";

/** Before minutes are spent on what could not be written down. What is in a file that is there stays until then. */
export function checkOutput(option: string, file: string, mode = 0o666): void {
  try {
    closeSync(openSync(file, "a", mode));
  } catch (thrown) {
    throw new RigelError("config", `${option}: expected a file that can be written, got ${file} (${reason(thrown)})`, {
      cause: thrown,
    });
  }
}
