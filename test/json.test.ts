/** json.test.ts: a slip in a JSON file is named by line and column. */

import { expect, test } from "bun:test";
import { RigelError, reason } from "../src/errors.ts";
import { fieldName, forgetPlaces, parseJson, readJson, setElsewhere, withPlaces } from "../src/json.ts";
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

test("a field of a file is found by how errors call it", async () => {
  using scratch = new Scratch();
  const text =
    '{"a": {"b.c": [1,\n {"d": 2}]}, "b": 3,\n "a\\u0062": "\\"b\\": 1", "x y": {},\r\n "y": false, "y: z": "p", "p-q": {"r s": [0,\t1, {}]}}';
  const path = scratch.file("fields.json", text);
  await readJson(path, { once: true });
  const at = (problem: string): string => withPlaces(`${path}: ${problem}`).slice(path.length);
  for (const [problem, place] of [
    ["a: wrong", "1:2"],
    ['a["b.c"]: wrong', "1:8"],
    ['a["b.c"][0]: wrong: b: no', "1:16"],
    ['a["b.c"][1]: wrong', "2:2"],
    ['a["b.c"][1].d: wrong', "2:3"],
    ["b: wrong", "2:14"],
    ["ab: wrong", "3:2"],
    ["x y: wrong", "3:25"],
    ['["y: z"]: wrong: y: no', "4:14"],
    // Missing ones, by the last of those that they are in.
    ["p-q.r s[2].t.u: is missing", "4:49"],
    ["p-q.s: is missing", "4:27"],
    ["b.e.f[3]: is missing", "2:14"],
    ["a.e: is missing", "1:2"],
  ] as const)
    expect(at(problem)).toBe(`:${place}: ${problem}`);
  for (const nowhere of ["e: is missing", "wrong", "", "a]: no", "expected a: b"])
    expect(at(nowhere)).toBe(`: ${nowhere}`);
  // Only at the start of a line, and of files that were read and are not forgotten.
  expect(withPlaces(`one\n${path}: b: two\nsee ${path}: b: three`)).toBe(
    `one\n${path}:2:14: b: two\nsee ${path}: b: three`,
  );
  setElsewhere(path, 'a["b.c"]');
  expect(at('a["b.c"]: wrong')).toBe(': a["b.c"]: wrong');
  expect(at('a["b.c"][0]: wrong')).toBe(':1:16: a["b.c"][0]: wrong');
  setElsewhere(path, "a.f");
  expect(at("a.f: is missing")).toBe(": a.f: is missing");
  setElsewhere("no such file", "a");
  expect(withPlaces(`${scratch.path}/other.json: b: wrong`)).toBe(`${scratch.path}/other.json: b: wrong`);
  forgetPlaces(path);
  expect(at("b: wrong")).toBe(": b: wrong");
});

test("a field whose name has dots or brackets in it is not taken for another one", async () => {
  using scratch = new Scratch();
  const keys = ["a.b", "c[0]", "", 'q"', "d: e", "l\nm", "\\"];
  const value = { a: { b: 1 }, c: [1], ...Object.fromEntries(keys.map((key) => [key, { x: 1 }])) };
  const path = scratch.file("dots.json", JSON.stringify(value, null, 1));
  await readJson(path, { once: true });
  const line = (parts: (string | number)[]): number =>
    Number(
      withPlaces(`${path}: ${fieldName(parts)}: wrong`)
        .slice(path.length)
        .split(":")[1],
    );
  expect([["a"], ["a", "b"], ["c"], ["c", 0]].map(line)).toEqual([2, 3, 5, 6]);
  expect(keys.map((key) => line([key]))).toEqual(keys.map((_, index) => 8 + 3 * index));
  expect(keys.map((key) => line([key, "x"]))).toEqual(keys.map((_, index) => 9 + 3 * index));
  // A part that is not there is looked for in that by its side alone.
  expect(line(["a.b", "b"])).toBe(8);
});

test("a field that is there twice is found where the one is that counts", async () => {
  using scratch = new Scratch();
  const path = scratch.file("twice.json", '{"a": {"b": 1},\n "a": {"c": 1}}');
  await readJson(path);
  expect(withPlaces(`${path}: a: wrong\n${path}: a.b: is missing\n${path}: a.c: wrong`)).toBe(
    `${path}:2:2: a: wrong\n${path}:2:2: a.b: is missing\n${path}:2:8: a.c: wrong`,
  );
});

test("a file that is not there is named", async () => {
  expect(async () => await readJson("/nonexistent/config.json")).toThrow("/nonexistent/config.json: cannot be read");
});
