/**
 * profile-html.ts: a profile as one HTML page that needs nothing else: no script, no font, no network.
 *
 * Names come from files that anybody may have written, so every text is escaped.
 */

import { BOUNDS, type Bound } from "./classify.ts";
import { shortName } from "./kernel-name.ts";
import { type ProfileView, mainBound } from "./profile-show.ts";

const COLOURS: Record<Bound, string> = { compute: "#d9822b", memory: "#2b7bba", unknown: "#8a8f98" };
const ROW_px = 26;
const LABEL_px = 120;
const CHART_px = 520;
const NUMBERS_px = 220;

const STYLE = `
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin-top: 2rem; }
svg { max-width: 100%; height: auto; }
svg text { font: 13px system-ui, sans-serif; fill: currentColor; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid #8884; vertical-align: top; }
td:last-child, th:last-child { text-align: left; overflow-wrap: anywhere; }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; }
code { font-size: .85rem; }`;

/** The whole page. */
export function viewHtml(view: ProfileView): string {
  const { path, facts, operations, kernels, copies, memsets, requests, time_ns, gap_ns } = view;
  const factRows = Object.entries(facts).map(
    ([key, value]) => `<tr><th>${escaped(key)}</th><td>${escaped(value)}</td></tr>`,
  );
  const longest = view.longest.map(
    ({ name, family, count, time_ns: time, share, mean_ns }) =>
      `<tr><td>${ms(time)}</td><td>${percent(share)}</td><td>${count}</td><td>${(mean_ns / 1000).toFixed(1)}</td>` +
      `<td>${family}</td><td><code title="${escaped(name)}">${escaped(shortName(name))}</code></td></tr>`,
  );
  const reasons = view.bound_reasons.map(
    ({ reason, count }) => `<tr><td>${count}</td><td>${escaped(reason)}</td></tr>`,
  );
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>${escaped(path)}</title>
<style>${STYLE}</style>
</head>
<body>
<h1>${escaped(path)}</h1>
<p>${operations} operations: ${kernels} kernels, ${copies} copies, ${memsets} memsets; ${requests} requests;
${ms(time_ns)} ms on the GPU, ${ms(gap_ns)} ms of gaps.</p>
<h2>Time by kind</h2>
<p>${BOUNDS.map((bound) => `<span class="key" style="background:${COLOURS[bound]}"></span>${bound}-bound`).join("")}</p>
${chart(view)}
<h2>Longest kernels</h2>
<table><thead><tr><th>ms</th><th>share</th><th>count</th><th>mean us</th><th>kind</th><th>kernel</th></tr></thead>
<tbody>${longest.join("\n")}</tbody></table>
<h2>Why bound so</h2>
<table><thead><tr><th>kernels</th><th>reason</th></tr></thead><tbody>${reasons.join("\n")}</tbody></table>
<h2>Recorded</h2>
<table><tbody>${factRows.join("\n")}</tbody></table>
</body>
</html>
`;
}

/** A bar for each kind, as long as its share, divided by what its time is bound by. */
function chart({ families }: ProfileView): string {
  const largest = Math.max(...families.map(({ share }) => share), Number.MIN_VALUE);
  const rows = families.map(({ family, count, time_ns, share, bound_ns }, index) => {
    const y = index * ROW_px;
    let x = LABEL_px;
    const bars = BOUNDS.map((bound) => {
      const width = time_ns > 0 ? (bound_ns[bound] / time_ns) * (share / largest) * CHART_px : 0;
      const bar =
        `<rect x="${x.toFixed(1)}" y="${y + 4}" width="${width.toFixed(1)}" height="${ROW_px - 8}" ` +
        `fill="${COLOURS[bound]}"><title>${family}, ${bound}: ${ms(bound_ns[bound])} ms</title></rect>`;
      x += width;
      return width > 0 ? bar : "";
    });
    const numbers = `${percent(share)} ${ms(time_ns)} ms, ${count}, ${mainBound(bound_ns)}`;
    return (
      `<text x="${LABEL_px - 8}" y="${y + 18}" text-anchor="end">${family}</text>${bars.join("")}` +
      `<text x="${(x + 8).toFixed(1)}" y="${y + 18}">${numbers}</text>`
    );
  });
  const width = LABEL_px + CHART_px + NUMBERS_px + 60;
  const height = families.length * ROW_px;
  return `<svg role="img" aria-label="Time by kind" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}">${rows.join("\n")}</svg>`;
}

function escaped(text: string): string {
  return text
    .replaceAll("&", "&amp;")
    .replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;")
    .replaceAll('"', "&quot;")
    .replaceAll(/[\u0000-\u0008\u000b-\u001f]/g, "?");
}

function ms(time_ns: number): string {
  return (time_ns / 1e6).toFixed(3);
}

function percent(share: number): string {
  return `${(share * 100).toFixed(1)}%`;
}
