/**
 * process-table.ts: the table of `rigel ps`.
 */

import { sizeText } from "./memory.ts";
import { aligned } from "./report.ts";
import { digits, isStopped } from "./show.ts";
import type { ClientStats, Stats } from "./stats.ts";

const MOST_PIDS = 3;

function stateOf(client: ClientStats, stats: Stats): string {
  if (client.state !== "live") return client.state;
  return client.paused ? "paused" : isStopped(client, stats) ? "stopped" : "live";
}

/**
 * The first few of them and how many more there are: a client may have dozens. Of one that lives those that do: the number of one that has ended may be
 * somebody else's by now.
 */
function pidsOf({ state, processes }: ClientStats): string {
  const pids = processes.filter((one) => state !== "live" || one.state === "live").map(({ pid }) => pid);
  const shown = pids.length > MOST_PIDS + 1 ? pids.slice(0, MOST_PIDS) : pids;
  return shown.join(",") + (shown.length < pids.length ? ` and ${pids.length - shown.length} more` : "");
}

/** Every client of these segments in a line. */
export function processTable(segments: readonly Stats[]): string {
  const rows = segments.flatMap((stats) =>
    stats.clients.map((client) => [
      client.name,
      client.class,
      stateOf(client, stats),
      pidsOf(client),
      client.devices.map((index) => stats.devices[index]?.name ?? String(index)).join(", ") || "-",
      stats.segment.id,
      stats.policy,
      String(client.launches + client.graph_launches),
      digits(client.requests.p50_ms),
      digits(client.requests.p99_ms),
      sizeText(client.memory.used_bytes),
      client.memory.limit_bytes === null ? "-" : sizeText(client.memory.limit_bytes),
    ]),
  );
  if (rows.length === 0) return "no client runs here";
  const header = [
    "client",
    "class",
    "state",
    "pid",
    "device",
    "segment",
    "policy",
    "launches",
    "p50 ms",
    "p99 ms",
    "memory",
    "limit",
  ];
  return aligned(header, rows, 7).join("\n");
}
