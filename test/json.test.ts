/** json.test.ts: a slip in a JSON file is named by line and column. */

import { expect, test } from "bun:test";
import { RigelError, reason } from "../src/errors.ts";
import { parseJson, readJson } from "../src/json.ts";
import { Scratch } from "./rigel.ts";

async function refusal(text: string): Promise<string> {
  using scratch = new Scratch();
  const path = scratch.file("a.json", text);
  try {
    return `accepted: ${JSON.stringify(await readJson(path))}`;
  } catch (thrown) {
    expect(thrown).toBeInstanceOf(RigelError);
    return reason(thrown).slice(path.length + 1);
  }
}

test.each([
  ["", "1:1: not valid JSON: expected a value"],
  ["{", "1:2: not valid JSON: expected a field name"],
  ['{\n  "a": 1,\n}', "3:1: not valid JSON: expected a field name"],
  ['{"a" 1}', '1:6: not valid JSON: expected ":"'],
  ['{"a": [1, 2\n  "b"]}', '2:3: not valid JSON: expected "," or "]"'],
  ['{"a": 01}', '1:8: not valid JSON: expected "," or "}"'],
  ["[1, 2],", "1:7: not valid JSON: expected the end of the file"],
  ["{\"a\": 'b'}", "1:7: not valid JSON: expected a value"],
  ['["a\tb"]', "1:2: not valid JSON: expected a value"],
  ['["\\x"]', "1:2: not valid JSON: expected a value"],
  ["// no\n{}", "1:1: not valid JSON: expected a value"],
])("%j is refused at its place", async (text, expected) => {
  expect(await refusal(text)).toStartWith(expected);
});

test("what JSON.parse accepts is accepted", async () => {
  const value = { a: [1, -2.5e3, '"\\\u00e9\n', null, true], b: {}, c: [] };
  expect(await refusal(JSON.stringify(value, null, 1))).toBe(`accepted: ${JSON.stringify(value)}`);
});

test("a field that is there twice is the last one, unless it is to be there once", () => {
  expect(parseJson('{"a": 1, "a": 2}', "x")).toEqual({ a: 2 });
  expect(() => parseJson('{"a": [{"b": 1}, {"b": 2, "c": {"b": 3}}],\n "a": 2}', "x", { once: true })).toThrow(
    'x:2:2: expected each field once, got "a" again',
  );
  const same = '{"a": {"a": [{"a": 1}, {"a": "b:\\"{"}]}, "b": {}, "c": []}';
  expect(parseJson(same, "x", { once: true })).toEqual(JSON.parse(same));
});

test("a file that is not there is named", async () => {
  expect(async () => await readJson("/nonexistent/config.json")).toThrow("/nonexistent/config.json: cannot be read");
});
