/** grafana.test.ts: /metrics as Prometheus' own promtool reads it, and that Grafana's dashboard asks for what is exported. */

import { afterAll, beforeAll, expect, test } from "bun:test";
import { z } from "zod";
import { SegmentNumbers } from "../src/metrics.ts";
import { Place, Server, until } from "./serving.ts";

let place: Place;
/** What a server with clients that work exports, and its dashboard. */
let metrics: string;
let served: unknown;
beforeAll(async () => {
  place = new Place();
  await using server = await Server.start(place);
  const pair = place.file("pair.json", place.pair({ policy: { name: "priority" } }));
  await using launch = place.start(["launch", pair, "--duration", "600", "--segment", place.segments]);
  await until(async () => ((await server.ask("/v1/clients/train")).status === 200 ? true : undefined));
  await place.rigel("set", "train", "memory=1GiB", "--segment", place.segments);
  metrics = await until(async () => {
    const { text } = await server.ask("/metrics");
    const has = (metric: string, name: string, value: string): boolean =>
      new RegExp(`^${metric}\\{[^}]*client="${name}"[^}]*\\} ${value}`, "m").test(text);
    // What clients have of the GPU is known from the server's second look on.
    const works = (name: string): boolean =>
      has("rigel_launches_total", name, "[1-9]") && has("rigel_gpu_share_ratio", name, "(0\\.\\d*[1-9]|1$)");
    return works("serve") && works("train") ? text : undefined;
  });
  served = (await server.ask("/grafana.json")).body;
  launch.kill("SIGINT");
  await launch.exited;
}, 300_000);
afterAll(() => place[Symbol.dispose]());

const promtool = Bun.which("promtool");
if (promtool === null) console.warn("skipped: promtool is not installed (Debian, Ubuntu: apt-get install prometheus)");

const datasource = z.strictObject({ type: z.literal("prometheus"), uid: z.literal("${datasource}") });
/** What is chosen: VariableOption of Grafana's types. */
const texts = z.union([z.string(), z.array(z.string())]);
const current = z.strictObject({ selected: z.boolean(), text: texts, value: texts });
const labels = z.object({
  type: z.literal("query"),
  current,
  name: z.enum(["segment", "client"]),
  datasource,
  query: z.object({ query: z.string(), refId: z.string() }),
});
const part = z.int().nonnegative();
/** Options of a panel of type timeseries: all that VizLegendOptions and VizTooltipOptions of Grafana's types require. */
const timeseries = z.strictObject({
  legend: z.strictObject({
    showLegend: z.boolean(),
    displayMode: z.enum(["list", "table", "hidden"]),
    placement: z.enum(["bottom", "right"]),
    calcs: z.array(z.string()),
  }),
  tooltip: z.strictObject({ mode: z.enum(["single", "multi", "none"]), sort: z.enum(["asc", "desc", "none"]) }),
});
/**
 * What Grafana's import needs, of https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/, and what
 * the types of @grafana/schema 11.6 (Dashboard, Panel, VariableModel) require.
 */
const dashboardSchema = z.object({
  // A number would replace a dashboard of somebody's; null is a new one.
  id: z.null(),
  uid: z.string().min(8).max(40),
  title: z.string().min(1),
  schemaVersion: z.int().min(36),
  version: z.int(),
  time: z.object({ from: z.string(), to: z.string() }),
  annotations: z.object({ list: z.array(z.unknown()) }),
  templating: z.object({
    list: z.tuple([
      z.object({
        type: z.literal("datasource"),
        name: z.literal("datasource"),
        query: z.literal("prometheus"),
        current,
      }),
      labels,
      labels,
    ]),
  }),
  panels: z.array(
    z.object({
      id: z.int().positive(),
      type: z.literal("timeseries"),
      title: z.string().min(1),
      datasource,
      gridPos: z.object({ x: part.max(23), y: part, w: part.min(1).max(24), h: part.min(1) }),
      options: timeseries,
      fieldConfig: z.object({ defaults: z.object({ unit: z.string() }), overrides: z.array(z.unknown()) }),
      targets: z.array(z.object({ refId: z.string(), datasource, expr: z.string(), legendFormat: z.string() })).min(1),
    }),
  ),
});

/** What promtool says of a text. */
async function checked(args: string[], text: string) {
  await using child = Bun.spawn([promtool ?? "", "check", ...args], {
    stdin: new Blob([text]),
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { status, said: stdout + stderr };
}

async function dashboard() {
  const printed = await place.rigel("serve", "--print-grafana");
  expect(printed.status).toBe(0);
  const parsed = dashboardSchema.parse(JSON.parse(printed.stdout));
  const [, ...variables] = parsed.templating.list.map((one) => (typeof one.query === "string" ? "" : one.query.query));
  return { text: printed.stdout, ...parsed, variables, exprs: parsed.panels.flatMap((panel) => panel.targets) };
}

test.skipIf(promtool === null)("promtool finds nothing to say about /metrics of a server with clients", async () => {
  // Policy slo, which alone fills this one, has to learn first.
  const type = /^# TYPE rigel_slo_delay_ratio \w+\n/m;
  expect(metrics).toMatch(type);
  const delayed = metrics.replace(type, (line) => `${line}rigel_slo_delay_ratio{segment="s",quantile="0.5"} 1.02\n`);
  for (const text of [metrics, delayed]) expect(await checked(["metrics"], text)).toEqual({ status: 0, said: "" });
});

const createdAt = (created_ms: number) => ({ id: `rigel-0-${created_ms}`, created_ms });

test("a segment has the same number as long as it lives, and the next one has what is free", () => {
  const numbers = new SegmentNumbers();
  const of = (...ids: number[]) => Object.fromEntries(numbers.of(ids.map(createdAt)));
  expect(of(7, 3)).toEqual({ "rigel-0-3": 0, "rigel-0-7": 1 });
  expect(of(7)).toEqual({ "rigel-0-7": 1 });
  expect(of(7, 9, 8)).toEqual({ "rigel-0-7": 1, "rigel-0-8": 0, "rigel-0-9": 2 });
  expect(of()).toEqual({});
  expect(of(10)).toEqual({ "rigel-0-10": 0 });
});

test("what the dashboard asks for is exported", async () => {
  const { exprs, variables, text } = await dashboard();
  expect(served).toEqual(JSON.parse(text));
  const exported = new Set(metrics.split("\n").map((line) => /^\w+/.exec(line)?.[0]));
  const asked = [...exprs.map(({ expr }) => expr), ...variables].flatMap((query) => query.match(/\brigel_\w+/g) ?? []);
  expect(asked.length).toBeGreaterThan(12);
  expect(asked.filter((name) => !exported.has(name))).toEqual([]);
});

test("the dashboard is whole: panels of their own number and place, its variables declared", async () => {
  const { panels, exprs, templating } = await dashboard();
  expect(new Set(panels.map(({ id }) => id)).size).toBe(panels.length);
  expect(new Set(panels.map(({ gridPos: { x, y } }) => `${x} ${y}`)).size).toBe(panels.length);
  for (const { gridPos } of panels) expect(gridPos.x + gridPos.w).toBeLessThanOrEqual(24);
  for (const { targets } of panels) expect(new Set(targets.map(({ refId }) => refId)).size).toBe(targets.length);
  const used = exprs.flatMap(({ expr }) => [...expr.matchAll(/\$(\w+)/g)].map(([, name]) => name));
  const known = new Set(["__rate_interval", ...templating.list.map(({ name }) => name)]);
  expect(used.filter((name) => name === undefined || !known.has(name))).toEqual([]);
});

test.skipIf(promtool === null)("its queries are PromQL", async () => {
  const { exprs } = await dashboard();
  // A rules file is what promtool reads queries from without a server; Grafana's variables as Grafana would put them in.
  const rules = exprs.map(({ expr }, index) => ({
    record: `query:${index}`,
    expr: expr.replaceAll("$__rate_interval", "1m").replaceAll(/\$\w+/g, ".*"),
  }));
  const file = place.file("rules.json", { groups: [{ name: "dashboard", rules }] });
  const { status, said } = await checked(["rules", file], "");
  expect(said).toContain(`SUCCESS: ${rules.length} rules found`);
  expect(status).toBe(0);
});
