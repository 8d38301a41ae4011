/**
 * schema.ts: checks a value from a file against a zod schema and words what is wrong with it.
 *
 * One line per problem: the file, the line in it, the path of the field, what was expected, what is there.
 */

import { z } from "zod";
import { RigelError } from "./errors.ts";
import { fieldName, withPlaces } from "./json.ts";

/** What goes into a command line, an environment or a file name, where a NUL would end it. */
export const text = z.string().regex(/^[^\0]*$/, "expected text without NUL characters");

/** Requests per second. */
export const rate = z.number().min(1e-6).max(1e6);

/** In one launch: as many as a segment has room for. */
export const MOST_CLIENTS = 64;

/** An object that knows its fields: an unknown one is an error that lists those there are. */
export function fields<Shape extends z.ZodRawShape>(shape: Shape) {
  return z.strictObject(shape, {
    error: (issue) =>
      issue.code === "unrecognized_keys"
        ? `unknown field; expected one of ${Object.keys(shape).join(", ")}`
        : undefined,
  });
}

/**
 * Parses by a schema, or throws with one line per problem: `file: clients[0].replay.rate_per_s: expected …`; of a file that readJson has read
 * `file:3:15: …`.
 */
export function parse<Schema extends z.ZodType>(schema: Schema, value: unknown, file: string): z.output<Schema> {
  const result = schema.safeParse(value, { reportInput: true });
  if (result.success) return result.data;
  const lines = problemsOf(result.error).map(
    ({ path, message }) => `${file}: ${path === "" ? "" : `${path}: `}${message}`,
  );
  throw new RigelError("config", withPlaces(lines.join("\n")));
}

/** What is wrong, field by field, with a value that was parsed with `reportInput`. The value itself has no path. */
export function problemsOf({ issues }: z.core.$ZodError): { path: string; message: string }[] {
  return issues.flatMap((issue) => {
    const keys = issue.code === "unrecognized_keys" ? issue.keys.map((key) => [...issue.path, key]) : [issue.path];
    return keys.map((path) => ({ path: fieldName(path), message: expectation(issue) }));
  });
}

function expectation(issue: z.core.$ZodIssue): string {
  if (issue.code === "custom" || issue.code === "unrecognized_keys") return issue.message;
  const got = issue.input === undefined ? "but it is missing" : `got ${shown(issue.input)}`;
  return `${wanted(issue)}, ${got}`;
}

function wanted(issue: z.core.$ZodIssue): string {
  switch (issue.code) {
    case "invalid_type":
      return `expected ${ARTICLES[issue.expected] ?? issue.expected}`;
    case "invalid_value":
      return `expected one of ${issue.values.map((value) => JSON.stringify(value)).join(", ")}`;
    case "too_small":
      return issue.origin === "number" || issue.origin === "int"
        ? `expected a number ${issue.inclusive ? "of at least" : "above"} ${issue.minimum}`
        : `expected at least ${counted(Number(issue.minimum), issue.origin)}`;
    case "too_big":
      return issue.origin === "number" || issue.origin === "int"
        ? `expected a number ${issue.inclusive ? "of at most" : "below"} ${issue.maximum}`
        : `expected at most ${counted(Number(issue.maximum), issue.origin)}`;
    case "invalid_key":
      return issue.issues[0]?.message ?? issue.message;
    default:
      return issue.message;
  }
}

function counted(count: number, origin: string): string {
  const [one, many] = origin === "string" ? ["character", "characters"] : ["entry", "entries"];
  return `${count} ${count === 1 ? one : many}`;
}

const ARTICLES: Record<string, string> = {
  number: "a number",
  int: "a whole number",
  string: "text",
  boolean: "true or false",
  array: "a list",
  object: "an object",
  record: "an object",
};

function shown(value: unknown): string {
  // JSON has no infinity: what is too large for a number would be shown as null.
  const json = (typeof value === "number" ? undefined : JSON.stringify(value)) ?? String(value);
  return json.length > 80 ? `${json.slice(0, 77)}…` : json;
}
