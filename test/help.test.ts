/** help.test.ts: every command says by itself what it does, with examples that it takes, and is in the README and docs/ as it is. */

import { describe, expect, test } from "bun:test";
import { readFileSync, readdirSync } from "node:fs";
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

/** Options that a help text lists. */
function knownIn(help: string): Set<string> {
  const [, options = ""] = /^Options:\n((?: .*\n?)+)/m.exec(help) ?? [];
  return new Set(options.match(/--[a-z][a-z-]*/g));
}

/** Options in a command line. What comes after -- or | is another program's, what comes after two spaces or # a comment. */
function optionsIn(line: string): string[] {
  const [own = ""] = line.trim().split(/ -- | \| | {2,}| #/);
  return own.match(/(?<= )--[a-z][a-z-]*/g) ?? [];
}

const readme = readFileSync(join(root, "README.md"), "utf8");
/** First and second column of the README's table of commands. */
const [, section = ""] = /^## Commands\n(.*?)^## /ms.exec(readme) ?? [];
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
    const known = knownIn(help);
    for (const line of own) for (const option of optionsIn(line)) expect(known).toContain(option);
    // What `run` prints is what its command prints.
    if (command !== "run") expect(known).toContain("--json");
  });
});

test("each has one line in the README's table, and nothing else has", () => {
  expect(described.map(({ name }) => name).toSorted()).toEqual(commands.toSorted());
  expect(described.filter(({ text }) => text.length < 10)).toEqual([]);
});

test("what the README and docs/ show of them is taken", () => {
  const pages = readdirSync(join(root, "docs")).map((name) => readFileSync(join(root, "docs", name), "utf8"));
  const code = [readme, ...pages].flatMap((page) => [
    ...[...page.matchAll(/^```sh\n(.*?)^```$/gms)].flatMap(([, block = ""]) => block.split("\n")),
    ...[...page.replaceAll(/^```.*?^```$/gms, "").matchAll(/`([^`]*)`/g)].map(([, span = ""]) =>
      span.replaceAll("\n", " "),
    ),
  ]);
  const lines = code.filter((line) => /^((\.\/)?rigel |bun run (launch|bench) )/.test(line));
  expect(lines.length).toBeGreaterThan(60);
  const wrong = lines.filter((line) => {
    const words = line.replace(/^bun run |^(\.\/)?rigel /, "").split(" ");
    const path = [words.slice(0, 2).join(" "), words[0] ?? ""].find((name) => helps.has(name));
    const known = knownIn(helps.get(path ?? "") ?? "");
    return path === undefined || optionsIn(line).some((option) => !known.has(option) && option !== "--help");
  });
  expect(wrong).toEqual([]);
});
