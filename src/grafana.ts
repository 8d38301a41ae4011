/**
 * grafana.ts: a dashboard over what /metrics exports, as the JSON that Grafana imports.
 *
 * Grafana's classic JSON model (https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/) at
 * schemaVersion 36, the default of its own schema (kinds/dashboard/dashboard_kind.cue in grafana/grafana); a newer Grafana converts
 * it when it imports. Which Prometheus is asked is a variable of the dashboard, so that the file names no data source of anybody's.
 */

/** The Prometheus that was chosen at the top of the dashboard. */
const DATASOURCE = { type: "prometheus", uid: "${datasource}" } as const;

const OF_CLIENT = '{segment=~"$segment",client=~"$client"}';

interface Query {
  expr: string;
  /** Name of each series; `{{client}}` is replaced by Grafana. */
  legend: string;
}

interface Panel {
  title: string;
  description: string;
  /** One of Grafana's units: s, ops, bytes, percentunit (1 is 100%), short. */
  unit: string;
  queries: Query[];
}

/** What was added to a counter in a second, by client. */
function rate(counter: string): string {
  return `sum by (client) (rate(${counter}${OF_CLIENT}[$__rate_interval]))`;
}

function quantile(q: number, histogram: string): string {
  return `histogram_quantile(${q}, sum by (le, client) (rate(${histogram}_bucket${OF_CLIENT}[$__rate_interval])))`;
}

const PANELS: readonly Panel[] = [
  {
    title: "Requests: p50",
    description: "Median latency, interpolated within the buckets of /metrics.",
    unit: "s",
    queries: [{ expr: quantile(0.5, "rigel_request_duration_seconds"), legend: "{{client}}" }],
  },
  {
    title: "Requests: p99",
    description: "What one request in a hundred takes longer than, interpolated within the buckets of /metrics.",
    unit: "s",
    queries: [{ expr: quantile(0.99, "rigel_request_duration_seconds"), legend: "{{client}}" }],
  },
  {
    title: "Requests",
    description: "Requests or iterations that ended, a second.",
    unit: "ops",
    queries: [{ expr: rate("rigel_request_duration_seconds_count"), legend: "{{client}}" }],
  },
  {
    title: "Launches",
    description: "Kernels and CUDA graphs launched, a second.",
    unit: "ops",
    queries: [
      { expr: rate("rigel_launches_total"), legend: "{{client}} kernels" },
      { expr: rate("rigel_graph_launches_total"), legend: "{{client}} graphs" },
    ],
  },
  {
    title: "Share of the GPU (policy fair)",
    description: "GPU time that policy fair has charged, of the time that went by; nothing under other policies.",
    unit: "percentunit",
    queries: [{ expr: rate("rigel_charged_seconds_total"), legend: "{{client}}" }],
  },
  {
    title: "Gate: time waited",
    description: "Of each second; all threads of a client together, so it may exceed 100%.",
    unit: "percentunit",
    queries: [{ expr: rate("rigel_gate_wait_duration_seconds_sum"), legend: "{{client}}" }],
  },
  {
    title: "Gate: waits",
    description: "Waits at the gate, and for work in flight to end, a second.",
    unit: "ops",
    queries: [
      { expr: rate("rigel_gate_wait_duration_seconds_count"), legend: "{{client}} gate" },
      { expr: rate("rigel_inflight_waits_total"), legend: "{{client}} in flight" },
    ],
  },
  {
    title: "Gate: p99 of a wait",
    description: "What one wait at the gate in a hundred takes longer than.",
    unit: "s",
    queries: [{ expr: quantile(0.99, "rigel_gate_wait_duration_seconds"), legend: "{{client}}" }],
  },
  {
    title: "Suspensions",
    description: "Times a client was taken off the GPU, a second.",
    unit: "ops",
    queries: [{ expr: rate("rigel_suspensions_total"), legend: "{{client}}" }],
  },
  {
    title: "Time off the GPU",
    description: "Of each second, by suspensions.",
    unit: "percentunit",
    queries: [{ expr: rate("rigel_suspended_seconds_total"), legend: "{{client}}" }],
  },
  {
    title: "Device memory",
    description: "What each client has allocated, and its limit where it has one.",
    unit: "bytes",
    queries: [
      { expr: `sum by (client) (rigel_memory_used_bytes${OF_CLIENT})`, legend: "{{client}}" },
      { expr: `sum by (client) (rigel_memory_limit_bytes${OF_CLIENT})`, legend: "{{client}} limit" },
    ],
  },
  {
    title: "Clients",
    description: "1 while a process of the client runs; and whether it is held back by a pause.",
    unit: "short",
    queries: [
      { expr: `max by (client) (rigel_client_up${OF_CLIENT})`, legend: "{{client}} runs" },
      { expr: `max by (client) (rigel_client_paused${OF_CLIENT})`, legend: "{{client}} paused" },
    ],
  },
  {
    title: "Clients that hang",
    description: "1 while a process of the client hangs for this reason; `rigel hangs` tells more.",
    unit: "short",
    queries: [
      { expr: `max by (client, reason) (rigel_client_hung${OF_CLIENT}) > 0`, legend: "{{client}}: {{reason}}" },
    ],
  },
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
    options: { legend: { displayMode: "list", placement: "bottom" }, tooltip: { mode: "multi" } },
    targets: queries.map(({ expr, legend }, number) => ({
      refId: String.fromCharCode("A".charCodeAt(0) + number),
      datasource: DATASOURCE,
      expr,
      legendFormat: legend,
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
        { type: "datasource", name: "datasource", label: "Data source", query: "prometheus", refresh: 1, current: {} },
        labelVariable("segment", "Segment"),
        labelVariable("client", "Client"),
      ],
    },
    panels: PANELS.map(panelOf),
  };
}
