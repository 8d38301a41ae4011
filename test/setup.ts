/**
 * setup.ts: runs before all tests: builds the native parts once, so that no test waits for, or races with, a compiler.
 */

import { rmSync } from "node:fs";
import { afterAll, setDefaultTimeout } from "bun:test";
import { Native } from "../src/native.ts";
import { cache } from "./rigel.ts";

await Native.load();

// Tests wait for processes, not for clocks; the limit only ends a hang, also on a machine under load.
setDefaultTimeout(300_000);

afterAll(() => rmSync(cache, { recursive: true, force: true }));
