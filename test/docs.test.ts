/** docs.test.ts: README.md and docs/ hold: links lead somewhere, and the fields of a configuration are those that there are. */

import { describe, expect, test } from "bun:test";
import { existsSync, readFileSync, readdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { configSchema, policySchema } from "../src/config.ts";
import { root } from "./rigel.ts";

const pages = ["README.md", ...readdirSync(join(root, "docs")).map((name) => join("docs", name))];
const textOf = (page: string): string => readFileSync(join(root, page), "utf8");
/** Where lines that begin with # are no headings. */
const BLOCKS = /^```.*?^```$/gms;

/** Where links to its headings lead, as GitHub makes them. */
function anchorsOf(page: string): string[] {
  const headings = textOf(page)
    .replaceAll(BLOCKS, "")
    .matchAll(/^#+ (.*)$/gm);
  return [...headings].map(([, title = ""]) =>
    title
      .toLowerCase()
      .replaceAll(/[^\w -]/g, "")
      .replaceAll(" ", "-"),
  );
}

describe.each(pages)("%s", (page) => {
  test("has links that lead somewhere", () => {
    const text = textOf(page)
      .replaceAll(BLOCKS, "")
      .replaceAll(/`[^`]*`/g, "");
    const links = [...text.matchAll(/\]\((.*?)\)|<img src="(.*?)"/g)].map(([, link, image]) => link ?? image ?? "");
    const dead = links.filter((link) => {
      if (link.startsWith("https://")) return false;
      const [path = "", anchor] = link.split("#");
      const file = path === "" ? page : join(dirname(page), path);
      return !existsSync(join(root, file)) || (anchor !== undefined && !anchorsOf(file).includes(anchor));
    });
    expect(dead).toEqual([]);
  });

  test("is reached from the README", () => {
    expect(page === "README.md" || textOf("README.md").includes(`](${page})`)).toBe(true);
  });
});

const { element: client } = configSchema.shape.clients;
test.each([
  ["field", configSchema.shape],
  ["field of `clients[]`", client.shape],
  ["field of `replay`", client.shape.replay.unwrap().shape],
  ["field of `policy`", policySchema.shape],
])("docs/configuration.md has every %s, and no other", (title, shape) => {
  const table = textOf("docs/configuration.md")
    .split("\n\n")
    .find((part) => part.split("|")[1]?.trim() === title);
  const named = [...(table ?? "").matchAll(/^\| `(\w+)` /gm)].map(([, name = ""]) => name);
  expect(named.toSorted()).toEqual(Object.keys(shape).toSorted());
});
