/**
 * dashboard.ts: the route of the dashboard, `/` of `rigel serve`: one page that needs nothing else (page/dashboard.ts).
 *
 * Its Content-Security-Policy allows the very script and style that are in it, and no connection to anywhere but this server.
 */

import { createHash } from "node:crypto";
import { Elysia } from "elysia";
import { pageText } from "./page.ts";

/** The route of the page. */
export function dashboard() {
  let page: Promise<{ html: string; policy: string }> | undefined;
  return new Elysia({ name: "dashboard" }).get(
    "/",
    async () => {
      page ??= pageText("dashboard").then((html) => ({ html, policy: policyOf(html) }));
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
