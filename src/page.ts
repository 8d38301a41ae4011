/**
 * page.ts: the pages with plots: each one HTML file that needs nothing else, script, style and plots are in it.
 *
 * Their sources are in src/page/, for the browser. From a checkout a page is put together when it is asked for; build.ts puts all of
 * them ready into the single file.
 */

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { RigelError } from "./errors.ts";

/** `dashboard`: of `rigel serve`; `launch`: of a launch's report (`--html`). */
export const PAGES = ["dashboard", "launch"] as const;
type PageName = (typeof PAGES)[number];

const SOURCES = join(import.meta.dir, "page");
const EMBEDDED = join(import.meta.dir, "embed");

/** The name of a page's file among what the single file has embedded. */
export function embeddedName(name: PageName): string {
  return `${name}.html`;
}

/** The text of a page, ready to be shown. */
export async function pageText(name: PageName): Promise<string> {
  return Bun.isStandaloneExecutable
    ? await readFile(join(EMBEDDED, embeddedName(name)), "utf8")
    : await buildPage(name);
}

/** Puts a page together from its sources. */
export async function buildPage(name: PageName): Promise<string> {
  const plotStyle = Bun.fileURLToPath(import.meta.resolve("uplot/dist/uPlot.min.css"));
  const [html, ownStyle, uplotStyle, script] = await Promise.all([
    readFile(join(SOURCES, `${name}.html`), "utf8"),
    readFile(join(SOURCES, "page.css"), "utf8"),
    readFile(plotStyle, "utf8"),
    bundled(join(SOURCES, `${name}.ts`)),
  ]);
  return html
    .replace("<style></style>", () => `<style>${uplotStyle}\n${ownStyle}</style>`)
    .replace('<script type="module"></script>', () => `<script type="module">${script}</script>`);
}

async function bundled(entry: string): Promise<string> {
  const { outputs, success, logs } = await Bun.build({ entrypoints: [entry], target: "browser", minify: true });
  const [output] = outputs;
  if (!success || !output) throw new RigelError("native", `${entry} cannot be put together: ${logs.join("; ")}`);
  // The end of the element must not be in it, be it in a string.
  return (await output.text()).replaceAll(/<\/(script)/gi, "<\\/$1");
}
