/**
 * page/launch.ts: the script of a launch's page: reads the report that is in the page, and shows it.
 *
 * Runs in the browser and asks nobody. Whatever is in the report is shown as text, never as HTML.
 */

import type { Report } from "../report.ts";
import { digits, durationText, rateText, targetText, throughput, turnsText } from "../show.ts";
import type { Measured } from "../stats.ts";
import { byId, colourOf, element, table, withUnit } from "./element.ts";
import { type Line, Plot } from "./plot.ts";

const ALONE = "#7f7f7f";
const TARGET = "#d11";

/** As launch.ts has written it. */
function reportOf(): Report {
  return JSON.parse(byId("report").textContent ?? "");
}

function heading({ device, policy, sharing, duration_s }: Report): HTMLElement[] {
  const how = sharing.mode === "mps" ? "under MPS" : "in time slices";
  return [
    element("h2", "", device.name),
    element("p", "about", `policy ${policy.name}, ${how}, counted for ${durationText(duration_s)}`),
    ...(device.simulated ? [element("p", "about", "Simulated: a model of a GPU, no measurement of one.")] : []),
  ];
}

function clients({ clients: all }: Report): HTMLElement {
  const header = [
    "client",
    "class",
    "end",
    "p50 ms",
    "p95 ms",
    "p99 ms",
    "requests",
    "iterations/s",
    "launches/s",
    "gate waits",
  ];
  const rows = all.flatMap((client, index) => [
    [
      { text: client.name, colour: colourOf(index) },
      client.class,
      client.stopped ? "stopped" : client.exit_code === null ? "not started" : `exit ${client.exit_code}`,
      ...counts(client),
    ],
    // What they did is not in the counts of their process.
    ...(client.threads ?? []).map((own) => [`${client.name}/${own.name}`, own.class, "", ...counts(own)]),
  ]);
  return element("div", "card scroll", table(header, rows, 3, 1));
}

function counts({ requests, iterations_per_s, launches_per_s, gate }: Measured): string[] {
  return [
    digits(requests.p50_ms),
    digits(requests.p95_ms),
    digits(requests.p99_ms),
    String(requests.count),
    rateText(iterations_per_s),
    rateText(launches_per_s),
    String(gate.waits),
  ];
}

function ratio(value: number | null | undefined): string {
  return value === null || value === undefined ? "" : ` (x${value.toFixed(2)})`;
}

function compared({ compare }: Report): HTMLElement[] {
  if (compare.length === 0) return [];
  const names = [...new Set(compare.flatMap(({ clients: own }) => own.map(({ name }) => name)))];
  const rows = names.flatMap((name) => {
    const own = compare.map(({ clients: all }) => all.find((client) => client.name === name));
    const row = (what: string, cell: (client: Report["clients"][number]) => string): string[] => [
      name,
      what,
      ...own.map((client) => (client ? cell(client) : "-")),
    ];
    const { unit, of } = throughput(own);
    return own.some((client) => client?.class === "high")
      ? [
          row("p50 ms", (client) => digits(client.requests.p50_ms) + ratio(client.versus_alone?.p50)),
          row("p99 ms", (client) => digits(client.requests.p99_ms) + ratio(client.versus_alone?.p99)),
        ]
      : [row(unit, (client) => digits(of(client)) + ratio(client.versus_alone?.share))];
  });
  const grid = table(["compared", "", ...compare.map(({ mode }) => mode)], rows, 2);
  return [element("div", "card scroll below", grid)];
}

function plots({ slo, policy }: Report): HTMLElement[] {
  if (!slo)
    return [
      element("p", "about", `Policy ${policy.name} has no control loop, and no record second by second; slo has.`),
    ];
  const { seconds, alone, target, marks } = slo;
  if (seconds.length < 2)
    return [element("p", "about", "The launch was over before there was anything to draw second by second.")];
  const times_s = seconds.map(({ t_s }) => t_s);
  const limit_ms =
    "p99_ms" in target ? target.p99_ms : alone.p99_ms === null ? null : target.p99_over_alone * alone.p99_ms;
  const level = (value: number | null): (number | null)[] => seconds.map(() => value);
  const drawn = (
    title: string,
    lines: (Line & { values: (number | null)[] })[],
    format: (value: number | null) => string,
    { logarithmic = false, named = false } = {},
  ): HTMLElement => {
    const plot = new Plot(title, lines, format, {
      logarithmic,
      seconds: true,
      marks: marks.map(({ t_s, client, what }) => ({ x: t_s, text: named ? `${client} ${what}` : "" })),
    });
    plot.set(
      times_s,
      lines.map(({ values }) => values),
    );
    return plot.element;
  };
  const place = element("div", "plots");
  place.append(
    drawn(
      "Latency of the high clients' requests, by second, ms",
      [
        { label: "p99", colour: colourOf(0), values: seconds.map(({ p99_ms }) => p99_ms) },
        { label: "p50", colour: colourOf(5), values: seconds.map(({ p50_ms }) => p50_ms) },
        ...(alone.p99_ms === null
          ? []
          : [{ label: "p99 alone", colour: ALONE, dashed: true, values: level(alone.p99_ms) }]),
        ...(limit_ms === null
          ? []
          : [{ label: `target (${targetText(target)})`, colour: TARGET, dashed: true, values: level(limit_ms) }]),
      ],
      withUnit(digits, " ms"),
      { logarithmic: true, named: true },
    ),
    drawn(
      "Requests of the high clients, by second",
      [{ label: "requests", colour: colourOf(0), values: seconds.map(({ requests, over_s }) => requests / over_s) }],
      withUnit(rateText, "/s"),
    ),
    drawn(
      "Best-effort launches, by second",
      [
        {
          label: "launches",
          colour: colourOf(1),
          values: seconds.map((second) => second.best_effort_launches_per_s),
        },
      ],
      withUnit(rateText, "/s"),
    ),
    drawn(
      "Step of the settings, from 0, the safest for the high clients",
      [{ label: "step", colour: colourOf(2), stepped: true, values: seconds.map(({ rung }) => rung) }],
      (value) => (value === null ? "-" : String(value)),
    ),
    drawn(
      "Best-effort work held to learn what requests take alone, % of the second",
      [
        {
          label: "held",
          colour: colourOf(3),
          stepped: true,
          values: seconds.map(({ held_s, over_s }) => (held_s / over_s) * 100),
        },
      ],
      withUnit(digits, "%"),
    ),
  );
  const came = marks.map(({ t_s, client, what }) => `${client} ${what} at ${t_s.toFixed(1)} s`).join(", ");
  const turns = turnsText(seconds);
  return [
    place,
    ...(came === "" ? [] : [element("p", "about below", `Dotted lines: ${came}.`)]),
    ...(turns === ""
      ? []
      : [element("p", "about below", `Best-effort clients had the GPU in turns of 1 s: ${turns}.`)]),
  ];
}

function notes({ notes: said, findings }: Report): HTMLElement[] {
  const lines = [
    ...said,
    ...findings.map(
      ({ status, found, remedy }) => `${status}: ${found}${remedy === null ? "" : `; remedy: ${remedy}`}`,
    ),
  ];
  if (lines.length === 0) return [];
  return [element("h2", "below", "Notes"), element("ul", "", ...lines.map((line) => element("li", "", line)))];
}

const report = reportOf();
byId("launch").append(...heading(report), clients(report), ...compared(report), ...plots(report), ...notes(report));
