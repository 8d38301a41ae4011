/**
 * page/dashboard.ts: the script of the dashboard: listens to /v1/events and shows every live launch: a table, plots, what happened.
 * Launches are started in launch-form.ts.
 *
 * Runs in the browser and asks nobody but the server that it came from. Whatever comes from there is shown as text, never as HTML.
 */

import { byId, colourOf, element, table, withUnit } from "./element.ts";
import { launchForm } from "./launch-form.ts";
import { type Line, Plot } from "./plot.ts";
import { digits, durationText, percentText, rateText, shareText, stateOf, target_ms, wait_ms_per_s } from "../show.ts";
import type { ClientStats, Stats } from "../stats.ts";
import type { SegmentHangs } from "../watcher.ts";

/** How much of the past the plots show. */
const HISTORY_s = 180;
/** Statistics come every second; without any for so long the connection is lost, whatever the browser thinks of it. */
const SILENCE_ms = 5000;
const RETRY_ms = 2000;
const EVENTS_SHOWN = 12;
const GIB = 2 ** 30;

/* ---- One launch */

interface Moment {
  time_s: number;
  stats: Stats;
}

/** What a plot shows: a title with the unit, the lines of a client, and their values. */
interface Kind {
  title: string;
  shown: (stats: Stats) => boolean;
  lines: (client: ClientStats, colour: string, stats: Stats) => Line[];
  values: (client: ClientStats) => (number | null)[];
  format: (value: number | null) => string;
  logarithmic?: true;
  /** A line of the launch as a whole: the target. */
  level?: (stats: Stats) => number | undefined;
}

const one = ({ name }: ClientStats, colour: string): Line[] => [{ label: name, colour }];
const KINDS: readonly Kind[] = [
  {
    title: "p99 latency of requests, ms",
    logarithmic: true,
    shown: () => true,
    lines: (client, colour) => (client.requests.source === null ? [] : one(client, colour)),
    values: (client) => (client.requests.source === null ? [] : [client.rates?.requests.p99_ms ?? null]),
    format: withUnit(digits, " ms"),
    level: target_ms,
  },
  {
    title: "Requests, or iterations, per second",
    shown: () => true,
    lines: (client, colour) => (client.requests.source === null ? [] : one(client, colour)),
    values: (client) => (client.requests.source === null ? [] : [client.rates?.requests_per_s ?? null]),
    format: withUnit(rateText, "/s"),
  },
  {
    title: "Launches per second, kernels and graphs",
    shown: () => true,
    lines: one,
    values: ({ rates }) => [rates?.launches_per_s ?? null],
    format: withUnit(rateText, "/s"),
  },
  {
    title: "GPU share, % (time for which kernels ran)",
    shown: () => true,
    lines: one,
    values: ({ gpu_share }) => [gpu_share === null ? null : gpu_share * 100],
    format: withUnit((value) => (value ?? 0).toFixed(1), "%"),
  },
  {
    title: "Held back, % of the time: at the gate, and (broken line) off the GPU",
    shown: ({ policy }) => policy !== "none",
    // Under fair every client may have to wait.
    lines: (client, colour, { policy }) =>
      client.class === "high" && policy !== "fair"
        ? []
        : [
            { label: `${client.name}, gate`, colour },
            { label: "off", colour, dashed: true },
          ],
    values: (client) => {
      const waited = wait_ms_per_s(client);
      return [waited === null ? null : waited / 10, client.rates ? client.rates.suspended_ms_per_s / 10 : null];
    },
    format: withUnit((value) => (value ?? 0).toFixed(1), "%"),
  },
  {
    title: "Device memory, GiB",
    shown: () => true,
    lines: one,
    values: ({ memory }) => [memory.used_bytes / GIB],
    format: (value) => (value === null ? "-" : sizeText(value * GIB)),
  },
];

class Launch {
  readonly element = element("section", "launch");
  readonly #history: Moment[] = [];
  readonly #title = element("h2");
  readonly #about = element("p", "about");
  readonly #table = element("div", "card scroll");
  readonly #hangs = element("div", "card scroll below");
  readonly #plots = element("div", "plots");
  #drawn: { kind: Kind; plot: Plot }[] = [];
  #drawnFor = "";

  constructor() {
    this.element.append(this.#title, this.#about, this.#table, this.#hangs, this.#plots);
  }

  add(stats: Stats, hangs: SegmentHangs | undefined): void {
    const time_s = Date.parse(stats.at) / 1000;
    if (stats.at_ms <= (this.#history.at(-1)?.stats.at_ms ?? 0)) return;
    // What a clock that was set back has shown is not to be drawn to the right of now.
    while ((this.#history.at(-1)?.time_s ?? 0) >= time_s) this.#history.pop();
    this.#history.push({ time_s, stats });
    while ((this.#history[0]?.time_s ?? time_s) < time_s - HISTORY_s) this.#history.shift();
    this.#title.textContent = titleOf(stats);
    this.#about.replaceChildren(...aboutOf(stats));
    this.#table.replaceChildren(tableOf(stats));
    this.#hangs.hidden = hangs === undefined;
    if (hangs) this.#hangs.replaceChildren(hangsOf(hangs));
    this.#plot(stats);
  }

  /** Colours have changed. */
  redraw(): void {
    this.#drawnFor = "";
    const last = this.#history.at(-1);
    if (last) this.#plot(last.stats);
  }

  remove(): void {
    for (const { plot } of this.#drawn) plot.remove();
    this.element.remove();
  }

  #plot(stats: Stats): void {
    const { clients } = stats;
    // All that lines depend on: each is given its values by its place among them.
    const key = JSON.stringify([
      stats.policy,
      target_ms(stats) !== undefined,
      clients.map((client) => [client.name, client.class, client.requests.source]),
    ]);
    if (key !== this.#drawnFor) {
      this.#drawnFor = key;
      for (const { plot } of this.#drawn) plot.remove();
      this.#drawn = KINDS.filter((kind) => kind.shown(stats)).flatMap((kind) => {
        const lines = clients.flatMap((client, index) => kind.lines(client, colourOf(index), stats));
        if (lines.length === 0) return [];
        const target = kind.level?.(stats) === undefined ? [] : [{ label: "target", colour: "#d11", dashed: true }];
        return [
          {
            kind,
            plot: new Plot(kind.title, [...lines, ...target], kind.format, {
              logarithmic: kind.logarithmic === true,
              seconds: false,
            }),
          },
        ];
      });
      this.#plots.replaceChildren(...this.#drawn.map(({ plot }) => plot.element));
    }
    const times_s = this.#history.map((moment) => moment.time_s);
    for (const { kind, plot } of this.#drawn) {
      const rows = clients.flatMap((own) => {
        const { name } = own;
        const lines = kind.lines(own, "", stats).length;
        return Array.from({ length: lines }, (_, line) =>
          this.#history.map((moment) => {
            const client = moment.stats.clients.find((candidate) => candidate.name === name);
            return client?.state === "live" ? (kind.values(client)[line] ?? null) : null;
          }),
        );
      });
      const level = kind.level?.(stats);
      if (level !== undefined) rows.push(this.#history.map((moment) => kind.level?.(moment.stats) ?? null));
      plot.set(times_s, rows);
    }
  }
}

function titleOf({ devices, segment }: Stats): string {
  const names = [...new Set(devices.map(({ name }) => name))].join(", ");
  return `${names || "No device yet"} · ${segment.id}`;
}

function aboutOf(stats: Stats): (Node | string)[] {
  const { policy, settings, slo, segment, at_ms } = stats;
  const inflight = settings["inflight"] || "any number of";
  const parts: (Node | string)[] = [
    `policy ${policy}${policy === "none" ? " (measures only)" : `, ${inflight} launches in flight`}`,
    `, for ${durationText((at_ms - segment.created_ms) / 1000)}`,
  ];
  const limit = target_ms(stats);
  if (slo && limit !== undefined) {
    parts.push(`; p99 target ${digits(limit)} ms`);
    if (slo.now.p99_ms !== null) parts.push(`, now ${digits(slo.now.p99_ms)} ms`);
    if (slo.alone.p99_ms !== null) parts.push(`, alone ${digits(slo.alone.p99_ms)} ms`);
    const over = slo.over_alone;
    if (over)
      parts.push(
        `; requests take x${over.p50.toFixed(2)} (p50), x${over.p99.toFixed(2)} (p99) of what they would alone`,
      );
    if (slo.unreachable) parts.push(element("span", "missed", "; not reached even by the strictest settings"));
  } else if (slo) parts.push("; learning what requests take alone");
  if (segment.refused > 0)
    parts.push(element("span", "missed", `; ${segment.refused} processes found no room in the segment`));
  return parts;
}

function sizeText(bytes: number): string {
  return bytes >= GIB ? `${digits(bytes / GIB)} GiB` : `${digits(bytes / 2 ** 20)} MiB`;
}

function tableOf(stats: Stats): Node {
  if (stats.clients.length === 0) return element("p", "", "No client has attached yet.");
  const header = [
    "client",
    "class",
    "state",
    "p99 ms",
    "p50 ms",
    "requests/s",
    "launches/s",
    "GPU %",
    "gate %",
    "off GPU %",
    "memory",
    "limit",
  ];
  const limit = target_ms(stats);
  const rows = stats.clients.map((client, index) => {
    const { rates, memory } = client;
    const state = stateOf(client, stats);
    const p99 = rates?.requests.p99_ms ?? null;
    const over = client.class === "high" && limit !== undefined && p99 !== null && p99 > limit;
    return [
      { text: client.name, colour: colourOf(index) },
      client.class,
      { text: state, className: state },
      { text: digits(p99), className: over ? "over" : "" },
      digits(rates?.requests.p50_ms ?? null),
      client.requests.source === null ? "-" : rateText(rates?.requests_per_s),
      rateText(rates?.launches_per_s),
      shareText(client.gpu_share),
      percentText(wait_ms_per_s(client)),
      percentText(rates?.suspended_ms_per_s),
      sizeText(memory.used_bytes),
      memory.limit_bytes === null ? "none" : sizeText(memory.limit_bytes),
    ];
  });
  return table(header, rows, 3, 1);
}

/** Who hangs, in what, and because of whom; in words where nobody does. */
function hangsOf({ hung, threshold_s }: SegmentHangs): Node {
  if (hung.length === 0)
    return element(
      "p",
      "none",
      `Nothing hangs: no client has waited for more than ${durationText(threshold_s)} for work that does not finish, or for another rank.`,
    );
  const rows = hung.map(({ name, pid, rank, seconds, why }) => [
    { text: name, className: "over" },
    rank === null ? `process ${pid}` : `rank ${rank}, process ${pid}`,
    { text: why, className: "words" },
    durationText(seconds),
  ]);
  return table(["hangs", "who", "why", "for"], rows, 3, 1);
}

/* ---- All of them */

const launches = new Map<string, Launch>();
const place = byId("launches");

/** A new segment under an old name is another one. */
function keyOf({ segment }: Stats): string {
  return `${segment.id} ${segment.created_ms}`;
}

function show(segments: readonly Stats[], hangs: readonly SegmentHangs[]): void {
  const keys = new Set(segments.map(keyOf));
  for (const [key, launch] of launches)
    if (!keys.has(key)) {
      launch.remove();
      launches.delete(key);
    }
  if (segments.length === 0) {
    place.replaceChildren(emptyState());
    return;
  }
  place.querySelector(".empty")?.remove();
  for (const stats of segments.map(highFirst)) {
    const known = launches.get(keyOf(stats));
    const launch = known ?? new Launch();
    if (!known) {
      launches.set(keyOf(stats), launch);
      place.append(launch.element);
    }
    launch.add(
      stats,
      hangs.find(({ segment }) => segment === stats.segment.id),
    );
  }
}

/** The clients that others stand aside for come first; those of a class as they have attached. */
function highFirst(stats: Stats): Stats {
  return {
    ...stats,
    clients: stats.clients.toSorted((a, b) => Number(b.class === "high") - Number(a.class === "high")),
  };
}

function emptyState(): HTMLElement {
  return element(
    "div",
    "launch card empty",
    element("p", "", "Nothing runs under Rigel at the moment."),
    element(
      "p",
      "",
      "A launch of this user, for example ",
      element("code", "", "rigel launch jobs.json"),
      ", appears here by itself.",
    ),
  );
}

/* ---- What happened */

interface Happened {
  at: string;
  segment: string;
  client?: string;
  class?: string;
  pid?: number;
  state?: string;
  rank?: number | null;
  why?: string;
  slo?: Stats["slo"];
}

const list = byId("events");

function happened(event: string, data: Happened): void {
  const text = wording(event, data);
  if (text === undefined) return;
  byId("happened").hidden = false;
  const time = element("time", "", new Date(data.at).toLocaleTimeString("en-GB"));
  list.prepend(element("li", "", time, text));
  while (list.children.length > EVENTS_SHOWN) list.lastElementChild?.remove();
}

function wording(event: string, happening: Happened): string | undefined {
  const { segment, client, class: kind, pid, state, rank, why, slo } = happening;
  switch (event) {
    case "segment":
      return state === "live" ? `launch ${segment} has begun` : `launch ${segment} has ended`;
    case "attach":
      return `${client} (${kind}) has attached, process ${pid}`;
    case "exit":
      return `${client} ${state === "dead" ? "was killed" : "has ended"}, process ${pid}`;
    case "hang":
      return `${client} hangs, process ${pid}${typeof rank === "number" ? `, rank ${rank}` : ""}: it ${why}`;
    case "slo":
      if (!slo) return `${segment}: nobody moves its settings any more`;
      return slo.unreachable
        ? `${segment}: the target is not reached even by the strictest settings`
        : `${segment}: settings are at step ${slo.rung}`;
    default:
      return undefined;
  }
}

/* ---- The connection */

let source: EventSource | undefined;
let heard_ms = Date.now();
let lost_ms: number | undefined;

/** An event of the server that this page came with, and its data. */
interface Told {
  event: string;
  data: ReturnType<typeof JSON.parse>;
}

/**
 * One connection for all tabs of this page: a browser has six to a server, and a seventh tab would wait for one without end. Whoever has the lock
 * is connected, tells the others, and has it until it is closed. Over plain HTTP from another machine there are no locks, and each has its own.
 */
const ONE = "rigel events";
const tabs = "locks" in navigator ? new BroadcastChannel(ONE) : undefined;
tabs?.addEventListener("message", ({ data }: MessageEvent<Told>) => told(data));

function told({ event, data }: Told): void {
  if (event === "lost") return lost();
  if (event !== "stats") return happened(event, data);
  heard();
  show(data.segments, data.hangs);
}

function tell(all: Told): void {
  told(all);
  tabs?.postMessage(all);
}

function connect(): void {
  source?.close();
  const opened = new EventSource("/v1/events");
  source = opened;
  for (const event of ["stats", "segment", "attach", "exit", "hang", "slo"])
    opened.addEventListener(event, (message) => tell({ event, data: JSON.parse(String(message.data)) }));
  opened.addEventListener("error", () => {
    tell({ event: "lost", data: null });
    // The browser tries again by itself unless the server has answered with an error.
    if (opened.readyState === EventSource.CLOSED) setTimeout(() => source === opened && connect(), RETRY_ms);
  });
}

/** Gives back what this tab has of it, which a page that the browser keeps for the way back would have for a while. */
let leave: AbortController | undefined;

function connectOnce(): void {
  if (!tabs) return connect();
  const { signal } = (leave = new AbortController());
  const untilLeft = async () => {
    connect();
    await new Promise((resolve) => signal.addEventListener("abort", resolve));
    source?.close();
    source = undefined;
  };
  // Who leaves before has never had it.
  navigator.locks.request(ONE, { signal }, untilLeft).catch(() => {});
}

function heard(): void {
  heard_ms = Date.now();
  lost_ms = undefined;
  status("live", "live, once a second");
}

function lost(): void {
  lost_ms ??= heard_ms;
  const seconds = Math.round((Date.now() - lost_ms) / 1000);
  status("lost", `not connected to rigel serve for ${durationText(seconds)}; what is shown is old; trying again`);
}

function status(state: "live" | "lost", text: string): void {
  const connection = byId("connection");
  document.body.classList.toggle("stale", state === "lost");
  connection.className = state;
  if (connection.textContent !== text) connection.textContent = text;
}

setInterval(() => {
  if (Date.now() - heard_ms > SILENCE_ms) {
    lost();
    // A connection that is open and silent: the machine has slept, or the server hangs.
    if (source?.readyState === EventSource.OPEN) connect();
  }
}, 1000);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const launch of launches.values()) launch.redraw();
});
window.addEventListener("pagehide", () => leave?.abort());
window.addEventListener("pageshow", ({ persisted }) => {
  if (persisted) connectOnce();
});
launchForm();
connectOnce();
