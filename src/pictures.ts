/**
 * pictures.ts: `bun run pictures`: makes the README's pictures from what really runs here: the demo, `rigel top`, the dashboard.
 *
 * Everything in them has been measured while they were made. Takes about two minutes; needs Chromium. Writes src/pictures/.
 */

import { chmodSync, mkdirSync, mkdtempSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { z } from "zod";
import { Browser } from "./chromium.ts";
import { Segments } from "./discover.ts";
import { progress } from "./log.ts";
import { Native } from "./native.ts";
import { commandLine } from "./self.ts";
import { readingOf, statsOf } from "./stats.ts";
import { svgOf } from "./terminal-svg.ts";
import { render } from "./top-view.ts";

const OUT = join(import.meta.dir, "pictures");
/** So much of the past is in the picture of the dashboard. */
const HISTORY_s = 90;
const LIMIT_bytes = 200_000;

const native = await Native.load();
mkdirSync(OUT, { recursive: true });
const scratch = mkdtempSync(join(tmpdir(), "rigel-pictures-"));
try {
  chmodSync(scratch, 0o700);
  const env = { ...process.env, NO_COLOR: "1", XDG_RUNTIME_DIR: scratch };
  progress("the demo: its table");
  await using demo = Bun.spawn([...commandLine(), "launch"], {
    env,
    stdin: "ignore",
    stdout: "pipe",
    stderr: "inherit",
  });
  const table = (await demo.stdout.text()).trimEnd().split("\n");
  if ((await demo.exited) !== 0) throw new Error("the demo has failed");
  writeFileSync(
    join(OUT, "launch.svg"),
    svgOf(["\u001b[2m$\u001b[0m \u001b[1mnpx bun run launch\u001b[0m", ...table], "The table that the demo ends with"),
  );

  progress(`the demo once more, for ${HISTORY_s} s: rigel top and the dashboard`);
  const config = join(native.files.profiles, "demo.json");
  await using launch = Bun.spawn(
    [...commandLine(), "launch", config, "--no-compare", "--duration", "3600", "--segment", scratch],
    { env, stdin: "ignore", stdout: "ignore", stderr: "pipe" },
  );
  const launched = launch.stderr.text();
  await using server = Bun.spawn([...commandLine(), "serve", "--port", "0", "--json", "--segment", scratch], {
    env,
    stdin: "ignore",
    stdout: "pipe",
    stderr: "ignore",
  });
  const { value: line } = await server.stdout.getReader().read();
  const { url } = z.object({ url: z.string() }).parse(JSON.parse(new TextDecoder().decode(line)));
  await using browser = await Browser.open();
  const tab = await browser.tab();
  await tab.scheme("light");
  await tab.resize(1280, 800);
  await tab.goto(url);
  await Bun.sleep(HISTORY_s * 1000);
  await save(tab, "dashboard.png");
  await tab.resize(390, 844, true);
  // The next second draws everything in its new size.
  await Bun.sleep(1500);
  await save(tab, "dashboard-phone.png", { width: 390, height: 844 });

  const segments = new Segments(native, scratch).live();
  const before = segments.map(readingOf);
  await Bun.sleep(1000);
  const stats = segments.map((segment, index) => statsOf(readingOf(segment), before[index]));
  const [first] = stats;
  const view = {
    segments: stats,
    folder: scratch,
    interval_s: 1,
    sort: "attached" as const,
    selected: first ? `${first.segment.id} ${first.clients[0]?.name}` : undefined,
    help: false,
    notice: "",
  };
  writeFileSync(
    join(OUT, "top.svg"),
    svgOf(render(view, { width: 99, height: 10, colour: true, keys: true }), "rigel top beside the demo"),
  );
  launch.kill("SIGTERM");
  await launched;
  server.kill("SIGTERM");
  await server.exited;
} finally {
  rmSync(scratch, { recursive: true, force: true });
}

async function save(
  tab: Awaited<ReturnType<Browser["tab"]>>,
  name: string,
  part?: { width: number; height: number },
): Promise<void> {
  const path = join(OUT, name);
  writeFileSync(path, await tab.screenshot(part));
  const { size } = statSync(path);
  progress(`${path}: ${(size / 1000).toFixed(0)} kB`);
  if (size > LIMIT_bytes) throw new Error(`${path} has ${size} bytes, expected at most ${LIMIT_bytes}`);
}
