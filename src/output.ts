/** output.ts: files that results are written to. */

import { accessSync, closeSync, constants, existsSync, openSync, rmSync, statSync, writeFileSync } from "node:fs";
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

/** Whether files can be made in it. */
export function checkFolder(option: string, folder: string): void {
  try {
    accessSync(`${folder}/`, constants.W_OK | constants.X_OK);
  } catch (thrown) {
    throw new RigelError(
      "machine",
      `${option}: expected a folder that can be written to, got ${folder} (${reason(thrown)})`,
      {
        cause: thrown,
      },
    );
  }
}

/** Writes it, or says which option's file could not be written, and why. */
export function writeOutput(option: string, file: string, text: string): void {
  try {
    writeFileSync(file, text);
  } catch (thrown) {
    throw new RigelError("machine", `${option}: ${file} cannot be written (${reason(thrown)})`, { cause: thrown });
  }
}
