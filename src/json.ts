/**
 * json.ts: reads JSON that people write by hand, so that a slip is named by line and column.
 *
 * JSON.parse of JavaScriptCore gives no position. It stays the parser; the scan below only runs after it has refused a
 * text, to find where. It must never accept or reject anything on its own.
 */

import { RigelError, reason } from "./errors.ts";

/** What a file is called: "-" is standard input. */
export function inputName(path: string): string {
  return path === "-" ? "standard input" : path;
}

/** Reads and parses a file. Throws a coded error that names the file, and the line and column of a syntax error. */
export async function readJson(file: string): Promise<unknown> {
  const path = inputName(file);
  let bytes: Uint8Array;
  try {
    bytes = await (file === "-" ? Bun.stdin : Bun.file(file)).bytes();
  } catch (thrown) {
    throw new RigelError("config", `${path}: cannot be read (${reason(thrown)})`, { cause: thrown });
  }
  const value = parseJson(decoded(bytes, path), path);
  checkDepth(value, path);
  return value;
}

/** Parses a text, which errors call `path`. */
export function parseJson(text: string, path: string): unknown {
  try {
    return JSON.parse(text);
  } catch (thrown) {
    if (thrown instanceof RangeError) throw tooDeep(path);
    const { line, column, expected } = firstJsonError(text);
    throw new RigelError("config", `${path}:${line}:${column}: not valid JSON: expected ${expected}`, {
      cause: thrown,
    });
  }
}

function decoded(bytes: Uint8Array, path: string): string {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch (thrown) {
    throw new RigelError("config", `${path}: expected text in UTF-8; save the file in that encoding`, {
      cause: thrown,
    });
  }
}

/** Far more than any file of Rigel's needs, far less than what recursion over a value can take. */
const DEEPEST = 100;

/** Throws where a value is nested deeper than anything of Rigel's, and than what reads it can take. */
export function checkDepth(value: unknown, path: string): void {
  if (isDeep(value)) throw tooDeep(path);
}

/** Looked at level by level: recursion is what a deep value breaks. */
function isDeep(value: unknown): boolean {
  let level = [value];
  for (let depth = 0; level.length > 0; depth++) {
    if (depth > DEEPEST) return true;
    level = level.flatMap((one) => (typeof one === "object" && one !== null ? Object.values(one) : []));
  }
  return false;
}

function tooDeep(path: string): RigelError {
  return new RigelError("config", `${path}: expected lists and objects nested at most ${DEEPEST} deep`);
}

interface JsonError {
  line: number;
  column: number;
  expected: string;
}

const BLANK = /[ \t\r\n]*/y;
const SCALAR =
  /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;

/** Walks the text by the JSON grammar with an explicit stack of open brackets, up to the first thing that does not fit. */
function firstJsonError(text: string): JsonError {
  let at = 0;
  const take = (pattern: RegExp): boolean => {
    pattern.lastIndex = at;
    if (!pattern.test(text)) return false;
    at = pattern.lastIndex;
    return true;
  };
  const takeChar = (char: string): boolean => {
    if (text[at] !== char) return false;
    at++;
    return true;
  };
  const open: ("{" | "[")[] = [];
  let want: "value" | "key or end" | "key" | "value or end" | "separator" = "value";
  for (;;) {
    take(BLANK);
    const inner = open.at(-1);
    if (want === "separator") {
      if (inner === undefined) return locate(text, at, "the end of the file");
      const close: string = inner === "{" ? "}" : "]";
      if (takeChar(close)) open.pop();
      else if (takeChar(",")) want = inner === "{" ? "key" : "value";
      else return locate(text, at, `"," or "${close}"`);
    } else if (want === "key" || want === "key or end") {
      if (want === "key or end" && takeChar("}")) {
        open.pop();
        want = "separator";
        continue;
      }
      if (!take(STRING)) return locate(text, at, 'a field name in double quotes (and no "," after the last field)');
      take(BLANK);
      if (!takeChar(":")) return locate(text, at, '":" after the field name');
      want = "value";
    } else {
      if (want === "value or end" && takeChar("]")) {
        open.pop();
        want = "separator";
      } else if (takeChar("{")) {
        open.push("{");
        want = "key or end";
      } else if (takeChar("[")) {
        open.push("[");
        want = "value or end";
      } else if (take(SCALAR)) {
        want = "separator";
      } else {
        return locate(text, at, "a value (text in double quotes, a number, true, false, null, { or [)");
      }
    }
  }
}

function locate(text: string, offset: number, expected: string): JsonError {
  const before = text.slice(0, offset).split("\n");
  return { line: before.length, column: (before.at(-1) ?? "").length + 1, expected };
}
