/**
 * dashboard.ts: the dashboard at `/` of `rigel serve`, one page that needs nothing else: script, style and plots are in it.
 *
 * From a checkout the page is put together when it is first asked for; build.ts puts it ready into the single file. Its
 * Content-Security-Policy allows the very script and style that are in it, and no connection to anywhere but this server.
 */

import { createHash } from "node:crypto";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { Elysia } from "elysia";
import { RigelError } from "./errors.ts";

/** Its name among what the single file has embedded. */
export const EMBEDDED_PAGE = "dashboard.html";

/** Its sources. */
const PAGE = join(import.meta.dir, "page");

/** The route of the page. */
export function dashboard() {
  let page: Promise<{ html: string; policy: string }> | undefined;
  return new Elysia({ name: "dashboard" }).get(
    "/",
    async () => {
      page ??= load().then((html) => ({ html, policy: policyOf(html) }));
      const { html, policy } = await page;
      return new Response(html, {
        headers: {
          "content-type": "text/html; charset=utf-8",
          "content-security-policy": policy,
          "x-content-type-options": "nosniff",
          "referrer-policy": "no-referrer",
          "cache-control": "no-cache",
        },
      });
    },
    { detail: { summary: "The dashboard, a page", hide: true } },
  );
}

async function load(): Promise<string> {
  return Bun.isStandaloneExecutable
    ? await readFile(join(import.meta.dir, "embed", EMBEDDED_PAGE), "utf8")
    : await buildPage();
}

/** Puts the page together from its sources. */
export async function buildPage(): Promise<string> {
  const plotStyle = Bun.fileURLToPath(import.meta.resolve("uplot/dist/uPlot.min.css"));
  const [html, ownStyle, uplotStyle, script] = await Promise.all([
    readFile(join(PAGE, "dashboard.html"), "utf8"),
    readFile(join(PAGE, "dashboard.css"), "utf8"),
    readFile(plotStyle, "utf8"),
    bundled(join(PAGE, "dashboard.ts")),
  ]);
  return html
    .replace("<style></style>", () => `<style>${uplotStyle}\n${ownStyle}</style>`)
    .replace('<script type="module"></script>', () => `<script type="module">${script}</script>`);
}

async function bundled(entry: string): Promise<string> {
  const { outputs, success, logs } = await Bun.build({ entrypoints: [entry], target: "browser", minify: true });
  const [output] = outputs;
  if (!success || !output) throw new RigelError("native", `the dashboard cannot be put together: ${logs.join("; ")}`);
  // The end of the element must not be in it, be it in a string.
  return (await output.text()).replaceAll(/<\/(script)/gi, "<\\/$1");
}

/** What the page may do: run and look as it came, and talk to this server. */
export function policyOf(html: string): string {
  const hashes = (tag: string): string =>
    [...html.matchAll(new RegExp(`<${tag}(?: [^>]*)?>([\\s\\S]*?)</${tag}>`, "g"))]
      .map(
        ([, text]) =>
          `'sha256-${createHash("sha256")
            .update(text ?? "")
            .digest("base64")}'`,
      )
      .join(" ");
  return [
    "default-src 'none'",
    `script-src ${hashes("script")}`,
    `style-src ${hashes("style")}`,
    "connect-src 'self'",
    "img-src data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
  ].join("; ");
}
