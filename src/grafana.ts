/**
 * grafana.ts: a dashboard over what /metrics exports, as the JSON that Grafana imports.
 *
 * Grafana's classic JSON model (https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/) at
 * schemaVersion 36, the default of its own schema (kinds/dashboard/dashboard_kind.cue in grafana/grafana); a newer Grafana converts
 * it when it imports. What the types of Grafana 11's package @grafana/schema call required is there. Which Prometheus is asked is a variable of the dashboard, so that the file names no data source of anybody's.
 */

/** The Prometheus that was chosen at the top of the dashboard. */
const DATASOURCE = { type: "prometheus", uid: "${datasource}" } as const;

const OF_CLIENT = '{segment=~"$segment",client=~"$client"}';

interface Panel {
  title: string;
  /** One of Grafana's units: s, ops, bytes, percentunit (1 is 100%), short. */
  unit: string;
  description: string;
  /** What is asked, by what follows the client in the name of a series. */
  queries: Record<string, string>;
}

/** A panel of clients; with one query a series is called as its client. */
function panel(title: string, unit: string, description: string, queries: string | Record<string, string>): Panel {
  return { title, unit, description, queries: typeof queries === "string" ? { "": queries } : queries };
}

/** What was added to a counter in a second, by client. */
function rate(counter: string): string {
  return `sum by (client) (rate(${counter}${OF_CLIENT}[$__rate_interval]))`;
}

function quantile(q: number, histogram: string): string {
  return `histogram_quantile(${q}, sum by (le, client) (rate(${histogram}_bucket${OF_CLIENT}[$__rate_interval])))`;
}

/** A gauge as it stands, by client. */
function gauge(by: "sum" | "max", name: string, labels = "client"): string {
  return `${by} by (${labels}) (${name}${OF_CLIENT})`;
}

const REQUEST = "rigel_request_duration_seconds";
const WAIT = "rigel_gate_wait_duration_seconds";
const PANELS: readonly Panel[] = [
  panel("Requests: p50", "s", "Median latency, interpolated within the buckets of /metrics.", quantile(0.5, REQUEST)),
  panel(
    "Requests: p99",
    "s",
    "What one request in a hundred takes longer than, interpolated within the buckets of /metrics.",
    quantile(0.99, REQUEST),
  ),
  panel("Requests", "ops", "Requests or iterations that ended, a second.", rate(`${REQUEST}_count`)),
  panel("Launches", "ops", "Kernels and CUDA graphs launched, a second.", {
    " kernels": rate("rigel_launches_total"),
    " graphs": rate("rigel_graph_launches_total"),
  }),
  panel(
    "Share of the GPU",
    "percentunit",
    "Part of a second or so for which kernels of a client ran on its GPU; nothing where that is not known.",
    gauge("max", "rigel_gpu_share_ratio"),
  ),
  panel(
    "GPU time charged (policy fair)",
    "percentunit",
    "GPU time that policy fair has charged, of the time that went by; nothing under other policies.",
    rate("rigel_charged_seconds_total"),
  ),
  panel(
    "Gate: time waited",
    "percentunit",
    "Of each second; all threads of a client together, so it may exceed 100%.",
    rate(`${WAIT}_sum`),
  ),
  panel("Gate: waits", "ops", "Waits at the gate, and for work in flight to end, a second.", {
    " gate": rate(`${WAIT}_count`),
    " in flight": rate("rigel_inflight_waits_total"),
  }),
  panel("Gate: p99 of a wait", "s", "What one wait at the gate in a hundred takes longer than.", quantile(0.99, WAIT)),
  panel(
    "Suspensions",
    "ops",
    "Times a client was taken off the GPU, and calls for that that the driver held up, a second.",
    {
      "": rate("rigel_suspensions_total"),
      " held up": rate("rigel_slow_suspension_calls_total"),
    },
  ),
  panel("Time off the GPU", "percentunit", "Of each second, by suspensions.", rate("rigel_suspended_seconds_total")),
  panel("Device memory", "bytes", "What each client has allocated, and its limit where it has one.", {
    "": gauge("sum", "rigel_memory_used_bytes"),
    " limit": gauge("sum", "rigel_memory_limit_bytes"),
  }),
  panel("Clients", "short", "1 while a process of the client runs; and whether it is held back by a pause.", {
    " runs": gauge("max", "rigel_client_up"),
    " paused": gauge("max", "rigel_client_paused"),
  }),
  panel(
    "Clients that hang",
    "short",
    "1 while a process of the client hangs for this reason; `rigel hangs` tells more.",
    {
      ": {{reason}}": `${gauge("max", "rigel_client_hung", "client, reason")} > 0`,
    },
  ),
];

/** Panels beside each other, and the size of one; a dashboard is 24 wide. */
const COLUMNS = 2;
const WIDTH = 24 / COLUMNS;
const HEIGHT = 8;

function panelOf({ title, description, unit, queries }: Panel, index: number): object {
  return {
    id: index + 1,
    type: "timeseries",
    title,
    description,
    datasource: DATASOURCE,
    gridPos: { x: (index % COLUMNS) * WIDTH, y: Math.floor(index / COLUMNS) * HEIGHT, w: WIDTH, h: HEIGHT },
    fieldConfig: { defaults: { unit, min: 0, custom: { fillOpacity: 10, showPoints: "never" } }, overrides: [] },
    options: {
      legend: { showLegend: true, displayMode: "list", placement: "bottom", calcs: [] },
      tooltip: { mode: "multi", sort: "none" },
    },
    targets: Object.entries(queries).map(([suffix, expr], number) => ({
      refId: String.fromCharCode("A".charCodeAt(0) + number),
      datasource: DATASOURCE,
      expr,
      // Grafana puts the label in.
      legendFormat: `{{client}}${suffix}`,
      range: true,
    })),
  };
}

/** A variable with the values that a label has; all of them unless some are chosen. */
function labelVariable(label: string, title: string): object {
  const query = `label_values(rigel_client_up, ${label})`;
  return {
    type: "query",
    name: label,
    label: title,
    datasource: DATASOURCE,
    definition: query,
    query: { query, refId: label },
    // Asked anew whenever the range of time changes.
    refresh: 2,
    multi: true,
    includeAll: true,
    allValue: ".*",
    current: { selected: true, text: ["All"], value: ["$__all"] },
    sort: 1,
  };
}

/** The dashboard, to be written as JSON. */
export function grafanaDashboard(): object {
  return {
    // Grafana numbers it when it is imported; the uid stays, so that importing it anew replaces it.
    id: null,
    uid: "rigel-clients",
    title: "Rigel",
    description: "What the clients of Rigel got: latencies, launches, waits at the gate, suspensions, memory.",
    tags: ["rigel", "gpu"],
    schemaVersion: 36,
    version: 1,
    timezone: "browser",
    editable: true,
    graphTooltip: 1,
    refresh: "10s",
    time: { from: "now-15m", to: "now" },
    timepicker: {},
    links: [],
    annotations: { list: [] },
    templating: {
      list: [
        {
          type: "datasource",
          name: "datasource",
          label: "Data source",
          query: "prometheus",
          refresh: 1,
          // None yet: Grafana takes the first that there is.
          current: { selected: false, text: "", value: "" },
        },
        labelVariable("segment", "Segment"),
        labelVariable("client", "Client"),
      ],
    },
    panels: PANELS.map(panelOf),
  };
}
