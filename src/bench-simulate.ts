/**
 * bench-simulate.ts: how long a scenario takes: the demo's two clients, 60 s of virtual time, each way by itself, in processor seconds.
 *
 * Processor time, since other programs on the machine do not change it much; the median of a few rounds.
 */

import { join } from "node:path";
import { standalone, whole } from "./arguments.ts";
import { median } from "./bench-stats.ts";
import { Native } from "./native.ts";

const options = standalone("bench:simulate")
  .option("--json", "print as JSON")
  .option("--rounds <count>", "rounds", whole(1, 10_000), 3)
  .parse()
  .opts<{ json?: true; rounds: number }>();

const { files } = await Native.load();
const clients = `client
class high
profile ${join(files.profiles, "h200-resnet50-infer-bs4.csv")}
rate poisson 16666667 1
client
class best-effort
profile ${join(files.profiles, "h200-resnet50-train-bs64.csv")}
run
`;
const ways = {
  "time slicing": "mode ungoverned",
  MPS: "mode ungoverned\ngpu.shared 1",
  "rigel priority": "mode preempt",
  "rigel priority, MPS": "mode governed\ngpu.shared 1",
};

const seconds: Record<string, number> = {};
for (const [way, lines] of Object.entries(ways)) {
  const rounds = Array.from({ length: options.rounds }, () => {
    const stdin = Buffer.from(`${lines}\nduration_ns 60000000000\n${clients}`);
    const { exitCode, stderr, resourceUsage } = Bun.spawnSync([files.simulate], { stdin });
    if (exitCode !== 0) throw new Error(stderr.toString());
    return Number(resourceUsage.cpuTime.total) / 1e6;
  });
  seconds[way] = Number(median(rounds).toFixed(3));
}
const lines = Object.entries(seconds).map(([way, s]) => `${way.padEnd(20)} ${s.toFixed(2)} s`);
process.stdout.write(`${options.json ? JSON.stringify(seconds, null, 2) : lines.join("\n")}\n`);
