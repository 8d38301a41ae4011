/**
 * json.ts: reads JSON that people write by hand, so that a slip is named by line and column.
 *
 * JSON.parse of JavaScriptCore gives no position, and of a field that is there twice it drops the first. It stays the parser; the scan
 * below runs after it has refused a text, to find where, over configurations, to find such fields, and where one is refused later, to find that
 * field. It must never accept or reject anything else on its own.
 */

import { RigelError, reason } from "./errors.ts";

/** What a file is called: "-" is standard input. */
export function inputName(path: string): string {
  return path === "-" ? "standard input" : path;
}

/** What else is asked of a text. */
interface Strictness {
  /** No object has a field twice. */
  once?: boolean;
}

/** Reads and parses a file. Throws a coded error that names the file, and the line and column of a syntax error. */
export async function readJson(file: string, strictness: Strictness = {}): Promise<unknown> {
  const path = inputName(file);
  let bytes: Uint8Array;
  try {
    bytes = await (file === "-" ? Bun.stdin : Bun.file(file)).bytes();
  } catch (thrown) {
    throw new RigelError("config", `${path}: cannot be read (${reason(thrown)})`, { cause: thrown });
  }
  const text = decoded(bytes, path);
  const value = parseJson(text, path, strictness);
  checkDepth(value, path);
  read.set(path, new Places(text));
  return value;
}

/** Files as readJson has read them, by what errors call them. */
const read = new Map<string, Places>();

/** Nothing more will be said of a file. */
export function forgetPlaces(path: string): void {
  read.delete(path);
}

/** Says that what errors tell of a field is not what the file has: an option stands for it. */
export function setElsewhere(path: string, field: string): void {
  read.get(path)?.elsewhere.add(field);
}

/**
 * An error's message, with line and column in those of its lines that name a field of such a file: `jobs.json: clients[0].name: expected ...`
 * becomes `jobs.json:3:15: clients[0].name: expected ...`. Of a field that is missing it is where that is of which it is one.
 */
export function withPlaces(message: string): string {
  return message
    .split("\n")
    .map((line) => {
      const [path, places] = [...read].find(([name]) => line.startsWith(`${name}: `)) ?? [];
      if (path === undefined) return line;
      const problem = line.slice(path.length + 2);
      const place = places?.of(problem);
      return place === undefined ? line : `${path}:${place}: ${problem}`;
    })
    .join("\n");
}

/** What errors call a field: its parts, put together so that no other field is called the same, as `clients[0].env["a.b"]`. */
export function fieldName(parts: readonly PropertyKey[]): string {
  return parts
    .map((part, index) => {
      if (typeof part === "number") return `[${part}]`;
      const name = String(part);
      return PLAIN.test(name) ? `${index > 0 ? "." : ""}${name}` : `[${JSON.stringify(name)}]`;
    })
    .join("");
}

/** The parts of the field whose name a problem begins with; undefined if it begins with none. */
function fieldOf(problem: string): (string | number)[] | undefined {
  const parts: (string | number)[] = [];
  let end = 0;
  for (;;) {
    PART.lastIndex = end;
    const [all, index, quoted, name] = PART.exec(problem) ?? [];
    if (all === undefined) break;
    parts.push(index === undefined ? (name ?? String(JSON.parse(quoted ?? '""'))) : Number(index));
    end += all.length;
  }
  return parts.length > 0 && problem.startsWith(": ", end) ? parts : undefined;
}

/** A field or entry of a text: where it begins, and what is in it. */
interface Place {
  offset: number;
  inner?: Map<string | number, Place>;
}

/** Where the fields of a text are, once somebody asks. */
class Places {
  /** Names of fields. */
  readonly elsewhere = new Set<string>();
  readonly #text: string;
  #found: { root: Place; lines: number[] } | undefined;

  constructor(text: string) {
    this.#text = text;
  }

  /** Line and column of the field that a problem begins with, or of what that is missing in; undefined if it begins with none. */
  of(problem: string): string | undefined {
    const parts = fieldOf(problem);
    if (parts === undefined || this.elsewhere.has(fieldName(parts))) return undefined;
    const { root, lines } = (this.#found ??= this.#find());
    let place = root;
    for (const part of parts) {
      const next = place.inner?.get(part);
      if (next === undefined) break;
      place = next;
    }
    if (place === root) return undefined;
    const { offset } = place;
    const line = lines.findLastIndex((start) => start <= offset);
    return `${line + 1}:${offset - (lines[line] ?? 0) + 1}`;
  }

  #find(): { root: Place; lines: number[] } {
    const root: Place = { offset: 0 };
    firstFault(this.#text, false, root);
    return { root, lines: [0, ...[...this.#text.matchAll(/\n/g)].map(({ index }) => index + 1)] };
  }
}

/** Parses a text, which errors call `path`. */
export function parseJson(text: string, path: string, { once = false }: Strictness = {}): unknown {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (thrown) {
    if (thrown instanceof RangeError) throw tooDeep(path);
    const { line, column, problem } = firstFault(text) ?? locate(text, text.length, "not valid JSON");
    throw new RigelError("config", `${path}:${line}:${column}: ${problem}`, { cause: thrown });
  }
  const fault = once ? firstFault(text, once) : undefined;
  if (fault) throw new RigelError("config", `${path}:${fault.line}:${fault.column}: ${fault.problem}`);
  return value;
}

/** Text in UTF-8, or an error that begins with `path` and says `advice`. */
export function decoded(bytes: Uint8Array, path: string, advice = "; save the file in that encoding"): string {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch (thrown) {
    throw new RigelError("config", `${path}: expected text in UTF-8${advice}`, { cause: thrown });
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

interface Fault {
  line: number;
  column: number;
  problem: string;
}

const BLANK = /[ \t\r\n]*/y;
const SCALAR =
  /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;

/** What fieldName leaves as it is, and a part of what it makes. */
const PLAIN = /^[^"\\.:[\]\u0000-\u001f]+$/;
const PART = new RegExp(`\\[(?:(\\d+)|(${STRING.source}))\\]|(?:^|\\.)(${PLAIN.source.slice(1, -1)})`, "y");

/** What is open: an object with the fields that it has so far, or a list; and its place. */
interface Open {
  fields?: Set<unknown>;
  place: Place | undefined;
  entries: number;
}

/**
 * Walks the text by the JSON grammar with an explicit stack of what is open, up to the first thing that does not fit. `root` gets the place
 * of everything in the text; of a field that is there twice, as JSON.parse, the last one's.
 */
function firstFault(text: string, once = false, root?: Place): Fault | undefined {
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
  const expected = (what: string): Fault => locate(text, at, `not valid JSON: expected ${what}`);
  const open: Open[] = [];
  /** Of the next value. */
  let place = root;
  const found = (within: Place | undefined, part: string | number, offset: number): void => {
    place = { offset };
    if (within) (within.inner ??= new Map<string | number, Place>()).set(part, place);
  };
  let want: "value" | "key or end" | "key" | "value or end" | "separator" = "value";
  for (;;) {
    take(BLANK);
    const inner = open.at(-1);
    if (want === "separator") {
      if (inner === undefined) return at < text.length ? expected("the end of the file") : undefined;
      const close = inner.fields ? "}" : "]";
      if (takeChar(close)) open.pop();
      else if (takeChar(",")) want = inner.fields ? "key" : "value";
      else return expected(`"," or "${close}"`);
    } else if (want === "key" || want === "key or end") {
      if (want === "key or end" && takeChar("}")) {
        open.pop();
        want = "separator";
        continue;
      }
      const begin = at;
      if (!take(STRING)) return expected('a field name in double quotes (and no "," after the last field)');
      if ((once || root) && inner?.fields) {
        const quoted = text.slice(begin, at);
        const name = String(JSON.parse(quoted));
        if (once && inner.fields.has(name)) return locate(text, begin, `expected each field once, got ${quoted} again`);
        inner.fields.add(name);
        if (root) found(inner.place, name, begin);
      }
      take(BLANK);
      if (!takeChar(":")) return expected('":" after the field name');
      want = "value";
    } else if (want === "value or end" && takeChar("]")) {
      open.pop();
      want = "separator";
    } else {
      if (root && inner && !inner.fields) found(inner.place, inner.entries++, at);
      if (takeChar("{")) {
        open.push({ fields: new Set(), place, entries: 0 });
        want = "key or end";
      } else if (takeChar("[")) {
        open.push({ place, entries: 0 });
        want = "value or end";
      } else if (take(SCALAR)) {
        want = "separator";
      } else {
        return expected("a value (text in double quotes, a number, true, false, null, { or [)");
      }
    }
  }
}

function locate(text: string, offset: number, problem: string): Fault {
  const before = text.slice(0, offset).split("\n");
  return { line: before.length, column: (before.at(-1) ?? "").length + 1, problem };
}
