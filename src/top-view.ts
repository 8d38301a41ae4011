/**
 * top-view.ts: what `rigel top` shows, as lines of text: a pure function of what was measured, the size, and whether there is colour.
 *
 * Never reads a clock, a segment or the terminal. Every line fits the width; text that others chose (names of clients and
 * devices) loses whatever could move a cursor.
 */

import { printable } from "./log.ts";
import { digits, durationText, percentText, rateText, shareText, stateOf, target_ms, wait_ms_per_s } from "./show.ts";
import type { ClientStats, Stats } from "./stats.ts";

/** What the rows are ordered by. */
export const SORTS = ["attached", "name", "launches", "p99", "gpu", "wait", "memory"] as const;
export type Sort = (typeof SORTS)[number];

export interface View {
  /** Segments with what happened in the last interval. */
  segments: readonly Stats[];
  /** Where segments were looked for. */
  folder: string;
  interval_s: number;
  sort: Sort;
  /** keyOf the marked row; undefined: none is. */
  selected: string | undefined;
  /** The keys are explained in place of the table. */
  help: boolean;
  /** One line for the moment, such as what came of the last key. */
  notice: string;
}

export interface Screen {
  /** Columns; lines are never longer. */
  width: number;
  /** Lines; Infinity where all are wanted, as in a file. */
  height: number;
  colour: boolean;
  /** Keys can be pressed: the line that says so is shown. */
  keys: boolean;
}

/** A client and the segment that it is in. */
export interface Row {
  stats: Stats;
  client: ClientStats;
}

/** Tells a row from all others, also later. */
export function keyOf({ stats, client }: Row): string {
  return `${stats.segment.id} ${client.name}`;
}

/** The clients in the order they are shown: segment by segment, each sorted. */
export function rowsOf({ segments, sort }: Pick<View, "segments" | "sort">): Row[] {
  return segments.flatMap((stats) => sorted(stats.clients, sort).map((client) => ({ stats, client })));
}

function sorted(clients: readonly ClientStats[], sort: Sort): ClientStats[] {
  const value = (client: ClientStats): number => {
    switch (sort) {
      case "launches":
        return client.rates?.launches_per_s ?? 0;
      case "p99":
        return client.rates?.requests.p99_ms ?? 0;
      case "gpu":
        return client.gpu_share ?? 0;
      case "wait":
        return wait_ms_per_s(client) ?? 0;
      case "memory":
        return client.memory.used_bytes;
      default:
        return 0;
    }
  };
  // What has ended says nothing of now, and comes last.
  return clients.toSorted(
    (a, b) =>
      Number(a.state !== "live") - Number(b.state !== "live") ||
      (sort === "name" ? (a.name < b.name ? -1 : a.name > b.name ? 1 : 0) : value(b) - value(a)),
  );
}

/* ---- Cells */

const STATE_COLOURS: Readonly<Record<string, string>> = {
  running: "32",
  paused: "33",
  stopped: "33",
  killed: "31",
  ended: "2",
  idle: "2",
};

interface Column {
  title: string;
  /** Left out first where there is no room: the greatest number. */
  rank: number;
  left?: true;
  cell: (row: Row) => string;
  /** SGR parameters, or none. */
  colour?: (row: Row) => string | undefined;
}

function size(bytes: number): string {
  for (const [unit, of] of [
    ["G", 2 ** 30],
    ["M", 2 ** 20],
    ["K", 2 ** 10],
  ] as const)
    if (bytes >= of) return `${(bytes / of).toFixed(bytes / of >= 10 ? 0 : 1)}${unit}`;
  return String(bytes);
}

const stateOfRow = ({ client, stats }: Row): string => stateOf(client, stats);

const COLUMNS: readonly Column[] = [
  { title: "CLIENT", rank: 0, left: true, cell: ({ client }) => printable(client.name) },
  {
    title: "CLASS",
    rank: 1,
    left: true,
    cell: ({ client }) => (client.class === "high" ? "high" : "best"),
    colour: ({ client }) => (client.class === "high" ? "36" : undefined),
  },
  { title: "STATE", rank: 2, left: true, cell: stateOfRow, colour: (row) => STATE_COLOURS[stateOfRow(row)] },
  { title: "LAUNCH/S", rank: 3, cell: ({ client }) => rateText(client.rates?.launches_per_s) },
  { title: "REQ/S", rank: 4, cell: ({ client }) => rateText(client.rates?.requests_per_s) },
  { title: "P50 ms", rank: 5, cell: ({ client }) => digits(client.rates?.requests.p50_ms ?? null) },
  { title: "P95 ms", rank: 11, cell: ({ client }) => digits(client.rates?.requests.p95_ms ?? null) },
  {
    title: "P99 ms",
    rank: 4,
    cell: ({ client }) => digits(client.rates?.requests.p99_ms ?? null),
    colour: ({ client, stats }) => {
      const limit = target_ms(stats);
      const p99 = client.rates?.requests.p99_ms ?? null;
      return client.class === "high" && limit !== undefined && p99 !== null && p99 > limit ? "31" : undefined;
    },
  },
  { title: "GPU%", rank: 6, cell: ({ client }) => shareText(client.gpu_share) },
  { title: "WAIT%", rank: 7, cell: ({ client }) => percentText(wait_ms_per_s(client)) },
  { title: "OFF%", rank: 7, cell: ({ client }) => percentText(client.rates?.suspended_ms_per_s ?? null) },
  { title: "MEM", rank: 6, cell: ({ client }) => size(client.memory.used_bytes) },
  {
    title: "LIMIT",
    rank: 10,
    cell: ({ client }) => (client.memory.limit_bytes === null ? "-" : size(client.memory.limit_bytes)),
  },
  {
    title: "PID",
    rank: 9,
    cell: ({ client }) => {
      const live = client.processes.filter(({ state }) => state === "live");
      return live.length === 0 ? "-" : `${live[0]?.pid}${live.length > 1 ? `+${live.length - 1}` : ""}`;
    },
  },
];

/** The title of the column that each order looks at. */
const SORT_COLUMNS: Readonly<Record<Sort, string | undefined>> = {
  attached: undefined,
  name: "CLIENT",
  launches: "LAUNCH/S",
  p99: "P99 ms",
  gpu: "GPU%",
  wait: "WAIT%",
  memory: "MEM",
};

/** Widths of numbers that are shorter than others: on 80 columns they decide whether a column has room. */
const LEAST: Readonly<Record<string, number>> = { "GPU%": 4, "OFF%": 4, MEM: 4 };

/** Longest name that is shown whole. */
const NAME_WIDTH = 28;

/* ---- Lines */

/** The picture, line by line; at most `height` of them. */
export function render(view: View, screen: Screen): string[] {
  const { width, height } = screen;
  const body = view.help ? help().map((line) => clip(line, width)) : table(view, screen);
  const head = clip(title(view), width);
  const foot = screen.keys ? [paint(clip(view.notice || footer(view), width), "2", screen.colour)] : [];
  const room = Math.max(0, height - 1 - foot.length);
  const shown = body.length <= room ? body : scrolled(body, room, view, screen);
  return [paint(head, "1", screen.colour), ...shown, ...foot].slice(0, Math.max(1, height));
}

function title({ segments, interval_s }: View): string {
  const clients = segments.reduce((sum, stats) => sum + stats.clients.length, 0);
  const launches = `${segments.length} ${segments.length === 1 ? "launch" : "launches"}`;
  return `rigel top: ${launches}, ${clients} ${clients === 1 ? "client" : "clients"}, over ${interval_s} s`;
}

function footer({ sort }: View): string {
  return `q quit  s sort (${sort})  up/down select  p pause  h help`;
}

function help(): string[] {
  return [
    "",
    "  q, Ctrl-C     quit",
    "  s             sort by the next column",
    "  up, down      mark a client",
    "  p             hold the marked best-effort client back, or let it go on",
    "  h, ?          this text, and back",
    "",
    "  LAUNCH/S      kernels and graphs launched",
    "  REQ/S         requests of a high client, iterations that a program reports",
    "  P50, P99      of the requests that ended in the interval",
    "  GPU%          time for which its kernels ran, of its GPU's; - where nobody can tell",
    "  WAIT%         time that its threads waited at the gate; above 100 if several do",
    "  OFF%          time for which it was taken off the GPU for a high client",
    "  MEM           device memory that it has allocated",
  ];
}

/** The part of a long table that holds the marked row. */
function scrolled(body: readonly string[], room: number, view: View, screen: Screen): string[] {
  const marked = body.findIndex((line) => plain(line).startsWith(">"));
  const from = Math.min(Math.max(0, marked - room + 2), Math.max(0, body.length - room));
  const part = body.slice(from, from + room);
  if (part.length === 0 || view.help) return part;
  const left = body.length - from - room + 1;
  return left > 1 ? [...part.slice(0, -1), clip(`  ... ${left} more lines`, screen.width)] : part;
}

function table(view: View, screen: Screen): string[] {
  const { width, colour } = screen;
  if (view.segments.length === 0)
    return ["", clip(`  Nothing runs under Rigel: there is no live launch of this user in ${view.folder}.`, width)];
  const rows = rowsOf(view);
  const columns = fitting(rows, width);
  const widths = columns.map((column) => columnWidth(column, rows));
  const gap = gapOf(width);
  const spare = width - 2 - widths.reduce((sum, one) => sum + one, 0) - (columns.length - 1) * gap.length;
  const narrow = widths[0];
  // Only the name gives way, and only where even the narrowest table is too wide.
  if (spare < 0 && narrow !== undefined) widths[0] = Math.max(1, narrow + spare);
  const sortTitle = SORT_COLUMNS[view.sort];
  const header = columns.map((column, index) => {
    const name = pad(column.title, widths[index] ?? 0, column.left === true);
    return column.title === sortTitle ? paint(name, "1;4", colour) : paint(name, "2", colour);
  });
  const lines: string[] = [];
  for (const stats of view.segments) {
    lines.push("", clip(segmentLine(stats), width), `  ${header.join(gap)}`.trimEnd());
    const own = rows.filter((row) => row.stats === stats);
    if (own.length === 0) lines.push(clip("  no client has attached yet", width));
    for (const row of own) {
      const marked = keyOf(row) === view.selected;
      const cells = columns.map((column, index) => {
        const cell = pad(column.cell(row), widths[index] ?? 0, column.left === true);
        const code = column.colour?.(row);
        return code === undefined || marked ? cell : paint(cell, code, colour);
      });
      const line = `${marked ? ">" : " "} ${cells.join(gap)}`;
      lines.push(marked ? paint(line, "7", colour) : line.trimEnd());
    }
  }
  return lines.map((line) => clipPainted(line, width));
}

/** Between columns: on the usual 80 columns one space makes room for one more. */
const gapOf = (width: number): string => (width < 100 ? " " : "  ");

/** The columns that there is room for, in their order. */
function fitting(rows: readonly Row[], width: number): Column[] {
  const anything = (column: Column): boolean => column.rank < 8 || rows.some((row) => column.cell(row) !== "-");
  const gap = gapOf(width).length;
  let used = 2 - gap;
  const chosen = new Set<Column>();
  for (const column of COLUMNS.filter(anything).toSorted((a, b) => a.rank - b.rank)) {
    const needed = columnWidth(column, rows) + gap;
    if (column.rank > 0 && used + needed > width) continue;
    used += needed;
    chosen.add(column);
  }
  return COLUMNS.filter((column) => chosen.has(column));
}

function columnWidth({ title: name, rank, cell }: Column, rows: readonly Row[]): number {
  // Numbers change all the time, columns should not.
  const least = rank === 0 ? name.length : Math.max(name.length, LEAST[name] ?? (name.endsWith("ms") ? 6 : 5));
  const widest = Math.max(least, ...rows.map((row) => Bun.stringWidth(cell(row))));
  return rank === 0 ? Math.min(NAME_WIDTH, widest) : widest;
}

/** Where, how, and since when. */
function segmentLine(stats: Stats): string {
  const { devices, policy, settings, slo, segment, at_ms } = stats;
  const names = [...new Set(devices.map(({ name }) => printable(name)))].join(", ");
  const limit = target_ms(stats);
  const over = slo?.over_alone ? `, delayed x${slo.over_alone.p50.toFixed(2)} x${slo.over_alone.p99.toFixed(2)}` : "";
  const aim = limit === undefined ? "" : `, p99 target ${digits(limit)} ms${slo?.unreachable ? " NOT reached" : ""}`;
  return [
    names || "no device yet",
    `policy ${policy}${policy === "none" ? "" : `, ${settings["inflight"] || "any number"} in flight`}${aim}${over}`,
    `launch ${segment.creator_pid}, ${durationText((at_ms - segment.created_ms) / 1000)}`,
  ].join(" | ");
}

/* ---- Text */

/** Exactly so wide: filled with spaces, or cut, which an ellipsis shows. */
function pad(text: string, width: number, left: boolean): string {
  const fitted = clip(text, width);
  const fill = " ".repeat(Math.max(0, width - Bun.stringWidth(fitted)));
  return left ? fitted + fill : fill + fitted;
}

/** At most so wide. */
function clip(text: string, width: number): string {
  if (Bun.stringWidth(text) <= width) return text;
  let cut = "";
  for (const { segment } of new Intl.Segmenter().segment(text)) {
    if (Bun.stringWidth(cut + segment) > width - 1) break;
    cut += segment;
  }
  return width > 0 ? `${cut}…` : "";
}

/** The same for a line with colours, which it loses where it is too long. */
function clipPainted(line: string, width: number): string {
  return Bun.stringWidth(line) <= width ? line : clip(plain(line), width);
}

function plain(line: string): string {
  return Bun.stripANSI(line);
}

function paint(text: string, code: string, colour: boolean): string {
  return colour ? `\u001b[${code}m${text}\u001b[0m` : text;
}
