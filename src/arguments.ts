/** arguments.ts: numbers and devices on the command line, for Commander: each says what it expects. */

import { Command, InvalidArgumentError } from "commander";
import type { DeviceSelector } from "./config.ts";

/** The command of a program by itself: wrong arguments end it with status 2, as they do `rigel`. */
export function standalone(name: string): Command {
  return new Command(name).exitOverride(({ exitCode }) => process.exit(exitCode === 0 ? 0 : 2));
}

/** A number above 0. */
export const above0 = upTo(Number.MAX_VALUE);

/** One that is no more than so many. */
export function upTo(most: number): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (text.trim() === "" || !(value > 0 && value <= most))
      throw new InvalidArgumentError(`Expected a number above 0${most < Number.MAX_VALUE ? `, up to ${most}` : ""}.`);
    return value;
  };
}

/** A number of a range. */
export function between(least: number, most: number): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (text.trim() === "" || !(value >= least && value <= most))
      throw new InvalidArgumentError(`Expected a number from ${least} to ${most}.`);
    return value;
  };
}

/** A whole number of a range, written in digits. `what`: what the message calls it. */
export function whole(least: number, most: number, what = "a whole number"): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (!/^\d+$/.test(text) || value < least || value > most)
      throw new InvalidArgumentError(`Expected ${what} from ${least} to ${most}.`);
    return value;
  };
}

export function deviceSelector(text: string): DeviceSelector {
  if (/^\d+$/.test(text)) return Number(text);
  if (/^(auto|simulated|(GPU|MIG)-[\w/-]+)$/.test(text)) return text;
  throw new InvalidArgumentError("Expected auto, simulated, a device index, or a UUID such as GPU-….");
}
