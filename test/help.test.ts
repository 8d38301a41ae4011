/** help.test.ts: every command says by itself what it does, with examples that it takes, and has a line in the README. */

import { describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { rigel, root } from "./rigel.ts";

/** Names of the commands that a help text lists. */
function commandsIn(help: string): string[] {
  const [, list = ""] = /^Commands:\n((?: .*\n?)*)/m.exec(help) ?? [];
  return [...list.matchAll(/^ {2}([a-z]+) /gm)].map(([, name = ""]) => name).filter((name) => name !== "help");
}

async function helpOf(...path: string[]): Promise<string> {
  const { status, stdout, stderr } = await rigel(...path, "--help");
  expect({ status, stderr }).toEqual({ status: 0, stderr: "" });
  return stdout;
}

/** First and second column of the README's table of commands. */
const [, section = ""] = /^## Commands\n(.*?)^## /ms.exec(readFileSync(join(root, "README.md"), "utf8")) ?? [];
const rows = [...section.matchAll(/^\| `rigel ([a-z]+(?: (?:show|diff))?)\b.*?` +\| (.*?) +\|$/gm)];
const described = rows.map(([, name = "", text = ""]) => ({ name, text }));
const helps = new Map<string, string>();
for (let paths = [[""]]; paths.length > 0;) {
  const found = await Promise.all(
    paths.map(async (path) => {
      const help = await helpOf(...path.filter((word) => word !== ""));
      helps.set(path.slice(1).join(" "), help);
      return commandsIn(help).map((name) => [...path, name]);
    }),
  );
  paths = found.flat();
}
const commands = [...helps.keys()].filter((name) => name !== "");

test("the commands are found in the help text", () => {
  expect(commands).toContain("launch");
  expect(commands).toContain("profile show");
  expect(commands.length).toBeGreaterThan(18);
});

describe.each(commands)("rigel %s", (command) => {
  test("has examples of options that it has, and prints JSON if asked", () => {
    const help = helps.get(command) ?? "";
    const [, examples = ""] = /^Examples?:\n((?: .*\n?)+)/m.exec(help) ?? [];
    const own = examples.split("\n").filter((line) => line.startsWith(`  rigel ${command}`));
    expect(own.length).toBeGreaterThan(0);
    const [, options = ""] = /^Options:\n((?: .*\n?)+)/m.exec(help) ?? [];
    const known = new Set(options.match(/--[a-z][a-z-]*/g));
    for (const line of own)
      // What comes after -- or | is another program's, what comes after two spaces a comment.
      for (const option of line
        .trim()
        .split(/ -- | \| | {2,}/)[0]
        ?.match(/(?<= )--[a-z][a-z-]*/g) ?? [])
        expect(known).toContain(option);
    // What `run` prints is what its command prints.
    if (command !== "run") expect(known).toContain("--json");
  });
});

test("each has one line in the README's table, and nothing else has", () => {
  expect(described.map(({ name }) => name).toSorted()).toEqual(commands.toSorted());
  expect(described.filter(({ text }) => text.length < 10)).toEqual([]);
});
