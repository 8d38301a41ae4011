/**
 * pictures.ts: `bun run pictures`: makes the README's pictures from what really runs here: the demo, `rigel top`, the dashboard, and
 * the page of a launch whose load and neighbours change.
 *
 * Everything in them has been measured while they were made. Takes about four minutes; needs Chromium. Writes src/pictures/.
 */

import { chmodSync, mkdirSync, mkdtempSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { z } from "zod";
import { Browser } from "./chromium.ts";
import { Segments } from "./discover.ts";
import { GpuShares } from "./gpu-share.ts";
import { progress } from "./log.ts";
import { Native } from "./native.ts";
import { ahead, commandLine } from "./self.ts";
import { readingOf, statsOf } from "./stats.ts";
import { svgOf } from "./terminal-svg.ts";
import { render } from "./top-view.ts";

const OUT = join(import.meta.dir, "pictures");
/** So much of the past is in the picture of the dashboard. */
const HISTORY_s = 90;
const LIMIT_bytes = 300_000;
/** Requests a second, and for how long: what the page of a launch shows. */
const LOAD: readonly [per_s: number, seconds: number][] = [
  [60, 30],
  [120, 25],
  [60, 45],
];
/** When a second best-effort client comes, and how long it stays. */
const GUEST_s = { at: 70, stays: 15 };
/** Before launches: what else the machine does is not to be in the pictures. */
const FIRST = ahead();

const native = await Native.load();
mkdirSync(OUT, { recursive: true });
const scratch = mkdtempSync(join(tmpdir(), "rigel-pictures-"));
try {
  chmodSync(scratch, 0o700);
  const env = { ...process.env, NO_COLOR: "1", XDG_RUNTIME_DIR: scratch };
  progress("the demo: its table");
  await using demo = Bun.spawn([...FIRST, ...commandLine(), "launch"], {
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
    [
      ...FIRST,
      ...commandLine(),
      "launch",
      config,
      "--no-compare",
      "--policy",
      "slo",
      "--mps",
      "off",
      "--duration",
      "3600",
      "--segment",
      scratch,
    ],
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
  const gpus = new GpuShares(native);
  const before = segments.map((segment) => readingOf(segment, gpus));
  await Bun.sleep(1000);
  const stats = segments.map((segment, index) => statsOf(readingOf(segment, gpus), before[index]));
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

  const whole_s = LOAD.reduce((sum, [, seconds]) => sum + seconds, 0);
  progress(`a launch of ${whole_s} s with a step in its load, and a client that comes and goes`);
  await tab.resize(1280, 800);
  await tab.goto(`file://${await settling(native, whole_s, env)}`);
  await tab.until(`document.querySelectorAll("canvas").length === 5`);
  // Plots take the width of the page a moment later.
  await Bun.sleep(1000);
  await save(tab, "settle.png", { width: 1280, height: 550 });
} finally {
  rmSync(scratch, { recursive: true, force: true });
}

/** Runs that launch; the file of its page. */
async function settling({ files }: Native, duration_s: number, env: Record<string, string | undefined>) {
  const profile = (name: string): string => join(files.profiles, `h200-${name}.csv`);
  const gaps = LOAD.flatMap(([per_s, seconds]) => Array.from({ length: per_s * seconds }, () => 1 / per_s));
  // It goes on from its beginning, should the launch take longer.
  writeFileSync(join(scratch, "gaps.json"), JSON.stringify(gaps));
  const config = join(scratch, "settle.json");
  const clients = [
    { name: "serve", class: "high", replay: { profile: profile("resnet50-infer-bs4"), arrivals: "gaps.json" } },
    { name: "train", class: "best-effort", replay: { profile: profile("resnet50-train-bs64") } },
  ];
  writeFileSync(config, JSON.stringify({ device: "simulated", duration_s, clients }));
  const page = join(scratch, "settle.html");
  const options = { env, stdin: "ignore", stdout: "ignore", stderr: "inherit" } as const;
  const where = ["--segment", scratch];
  await using launch = Bun.spawn([...FIRST, ...commandLine(), "launch", config, "--html", page, ...where], options);
  await Bun.sleep(GUEST_s.at * 1000);
  const job = ["run", "--class", "best-effort", "--name", "guest", "--device", "simulated", ...where, "--"];
  await using guest = Bun.spawn(
    [...FIRST, ...commandLine(), ...job, files.replay, "--profile", profile("bert-train-bs8x128")],
    options,
  );
  await Bun.sleep(GUEST_s.stays * 1000);
  guest.kill("SIGTERM");
  await guest.exited;
  if ((await launch.exited) !== 0) throw new Error("the launch has failed");
  return page;
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
