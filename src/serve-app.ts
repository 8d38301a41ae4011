/**
 * serve-app.ts: the routes of the HTTP interface: what can be asked of Rigel and what it answers, as data.
 *
 * Who may ask is decided before (serve-access.ts), where requests come in (serve.ts). Every error has one shape,
 * {error: {code, message, issues?: [{path, message}]}}. Other modules add routes of their own as plugins.
 */

import { openapi } from "@elysiajs/openapi";
import { Elysia } from "elysia";
import { z } from "zod";
import packageJson from "../package.json" with { type: "json" };
import { dashboard } from "./dashboard.ts";
import { processContextsSchema } from "./contexts.ts";
import {
  LONGEST_PAUSE_s,
  changeClient,
  changePolicy,
  clientChangeSchema,
  findClient,
  policyChange,
  policyChangeSchema,
} from "./control.ts";
import { RigelError } from "./errors.ts";
import { grafanaDashboard } from "./grafana.ts";
import { allHangs, allHangsSchema } from "./hangs.ts";
import { checkDepth, decoded, parseJson } from "./json.ts";
import type { Launches } from "./launches.ts";
import { progress } from "./log.ts";
import { METRICS_TYPE } from "./metrics.ts";
import type { Native } from "./native.ts";
import { fields, problemsOf } from "./schema.ts";
import type { Segment } from "./segment.ts";
import { RequestError, errorBody } from "./serve-error.ts";
import { launchRoutes } from "./serve-launch.ts";
import { type ClientStats, type Stats, statsSchema } from "./stats.ts";
import { type TraceOptions, tracePieces } from "./trace.ts";
import type { Event, Watcher } from "./watcher.ts";

const clientSchema = statsSchema.shape.clients.element.extend({
  /** `segment:name`, for /v1/clients/:id. */
  id: z.string(),
  segment: z.string(),
});
type Client = z.infer<typeof clientSchema>;

/** What is changed of a client is in force within a tenth of a second; how often that is looked for, and for how long. */
const LOOK_ms = 20;
const TAKEN_UP_ms = 2000;

/** What can be changed of a segment. */
const configSchema = z.object({
  segment: z.string(),
  policy: statsSchema.shape.policy,
  target: z.union([z.object({ p99_over_alone: z.number() }), z.object({ p99_ms: z.number() })]).nullable(),
  settings: statsSchema.shape.settings,
});

function configOf({ segment, policy, settings }: Stats, live: readonly Segment[]): z.infer<typeof configSchema> {
  const target = policy === "slo" ? live.find(({ id }) => id === segment.id)?.target : undefined;
  return { segment: segment.id, policy, target: target ?? null, settings };
}

/** That an answer lists. */
const MOST_ISSUES = 100;

/** Of errors that are not about what was sent. */
const STATUS: ReadonlyMap<RigelError["code"], number> = new Map([
  ["no_client", 404],
  ["ambiguous", 409],
]);

/** Whether a path is one of a route's, whose parts that begin with a colon are any. */
function isAt(route: string, path: string): boolean {
  const parts = path.split("/");
  const own = route.split("/");
  return own.length === parts.length && own.every((part, i) => part.startsWith(":") || part === parts[i]);
}

/** A parameter of a query; what is no number stays the text that it is, so that errors show it. */
const secondsInQuery = z.preprocess((value) => {
  const number = typeof value === "string" && value.trim() !== "" ? Number(value) : Number.NaN;
  return Number.isNaN(number) ? value : number;
}, z.number().positive().max(86_400));

const allStats = z.object({ at: z.string(), segments: z.array(statsSchema) });

/** For the description of the routes. Of "one of these, or null" the plugin makes one schema, in which null has to be one of these. */
function jsonSchemaOf(schema: z.ZodType): object {
  return z.toJSONSchema(schema, {
    io: "input",
    unrepresentable: "any",
    override: ({ jsonSchema: { anyOf } }) => {
      const [values, none] = anyOf ?? [];
      if (none?.type === "null" && values?.enum?.includes(null) === false) values.enum.push(null);
    },
  });
}

/** The server's routes over what a watcher sees. */
export function serveApp(watcher: Watcher, native: Native, launches: Launches) {
  let routes: readonly { method: string; path: string }[] = [];
  // Whatever the host is called: without this, paths are looked for from the fourth character of its name on.
  const app = new Elysia({ handler: { standardHostname: false } })
    .onError(({ code, error, set, request }) => {
      if (error instanceof RequestError) {
        set.status = error.status;
        return errorBody(error.code, error.message, error.issues);
      }
      if (error instanceof RigelError) {
        set.status = STATUS.get(error.code) ?? (error.exitStatus === 2 ? 422 : 409);
        return errorBody(error.code, error.message);
      }
      switch (code) {
        case "NOT_FOUND": {
          const { pathname } = new URL(request.url);
          const methods = routes.filter(({ path }) => isAt(path, pathname)).map(({ method }) => method);
          set.status = 404;
          if (methods.length === 0) return errorBody("not_found", `there is nothing at ${request.method} ${pathname}`);
          set.status = 405;
          set.headers["allow"] = methods.join(", ");
          return errorBody("method", `${pathname} takes ${methods.join(" or ")}, not ${request.method}`);
        }
        case "PARSE":
          set.status = 400;
          return errorBody("not_json", error.cause instanceof RigelError ? error.cause.message : error.message);
        case "VALIDATION": {
          set.status = error.type === "response" ? 500 : 422;
          const issues = issuesOf(error.validator, error.value);
          const what = issues.length === 1 ? "a field is" : `${issues.length} fields are`;
          return errorBody("invalid", `${what} not as expected`, issues.slice(0, MOST_ISSUES));
        }
        default:
          set.status = 500;
          progress(
            `error in ${request.method} ${request.url}: ${error instanceof Error ? error.stack : String(error)}`,
          );
          return errorBody("internal", "Rigel has failed to answer this; its standard error says why");
      }
    })
    .use(
      openapi({
        provider: null,
        // What has a dot in its path would be left out.
        exclude: { staticFile: false },
        documentation: {
          info: { title: "Rigel", version: packageJson.version, description: packageJson.description },
        },
        mapJsonSchema: { zod: jsonSchemaOf },
      }),
    )
    .use(dashboard())
    .onParse(async ({ request }, type) =>
      type === "application/json"
        ? parseJson(decoded(await request.bytes(), "body", ""), "body", { once: true })
        : undefined,
    )
    .use(launchRoutes(launches))
    .onTransform(refuseDeep)
    .get("/healthz", () => ({ ok: true, version: packageJson.version }), {
      response: z.object({ ok: z.boolean(), version: z.string() }),
      detail: { summary: "Whether the server answers" },
    })
    .get("/v1/stats", () => ({ at: new Date().toISOString(), segments: watcher.now() }), {
      response: allStats,
      detail: { summary: "Every live segment: settings, devices and clients, with rates over the last second" },
    })
    .get("/v1/clients", () => ({ clients: clientsOf(watcher.now()) }), {
      response: z.object({ clients: z.array(clientSchema) }),
      detail: { summary: "The clients of all segments" },
    })
    .get("/v1/contexts", () => ({ processes: watcher.contexts() }), {
      response: z.object({ processes: z.array(processContextsSchema) }),
      detail: { summary: "Contexts, threads and calls of every process, and handles used in a wrong context" },
    })
    .get("/v1/hangs", ({ query: { threshold_s } }) => allHangs(watcher.hangs(threshold_s)), {
      query: fields({
        /** What waits for longer hangs; left out: what the server was started with. */
        threshold_s: secondsInQuery.optional(),
      }),
      response: allHangsSchema,
      detail: { summary: "What every thread of every process is in, who hangs, and because of whom" },
    })
    .get("/v1/traces", ({ query: { client, segment, last_s } }) => traceOf(watcher, segment, { client, last_s }), {
      query: fields({
        /** A client's name, or a process number; left out: all. */
        client: z.string().optional(),
        /** Only of this segment. */
        segment: z.string().optional(),
        last_s: secondsInQuery.optional(),
      }),
      detail: {
        summary: "What clients launched and waited for last, as a trace for Perfetto",
        responses: { 200: { description: "Chrome's Trace Event Format", content: { "application/json": {} } } },
      },
    })
    .get("/v1/clients/:id", ({ params }) => clientOf(params.id, watcher.now()), {
      params: z.object({ id: z.string() }),
      response: clientSchema,
      detail: { summary: "One client, by its name, or `segment:name` where several have that name" },
    })
    .patch(
      "/v1/clients/:id",
      async ({ params, body: { paused, pause_s, ...change } }) => {
        const target = findClient(params.id, watcher.live());
        const isPause = paused !== undefined || pause_s !== undefined;
        if (!isPause && Object.keys(change).length === 0)
          throw new RequestError(422, "invalid", "body: expected class, memory, weight, paused or pause_s");
        if (paused === false && pause_s !== undefined)
          throw new RequestError(422, "invalid", "body: expected no pause_s where paused is false");
        const seconds = paused === false ? 0 : (pause_s ?? Number.POSITIVE_INFINITY);
        const { notes } = changeClient(target, change, isPause ? seconds : undefined);
        const asked = (client: Client): Client => ({
          ...client,
          class: change.class ?? client.class,
          weight: change.weight ?? client.weight,
        });
        // Its processes take those two up a moment later, unless they are stopped: who asks next is to see it.
        const until_ms = performance.now() + TAKEN_UP_ms;
        for (;;) {
          watcher.changed();
          const client: Client = clientOf(`${target.segment.id}:${target.name}`, watcher.now());
          const { class: kind, weight } = asked(client);
          const isSo = client.class === kind && client.weight === weight;
          if (isSo || performance.now() >= until_ms) return { ...asked(client), notes };
          await Bun.sleep(LOOK_ms);
        }
      },
      {
        params: z.object({ id: z.string() }),
        body: fields({
          ...clientChangeSchema.shape,
          /** True: until it is resumed, or for `pause_s` seconds. */
          paused: z.boolean().optional(),
          pause_s: z.number().positive().max(LONGEST_PAUSE_s).optional(),
        }),
        response: clientSchema.extend({
          /** What was changed and has no effect under the policy in force. */
          notes: z.array(z.string()),
        }),
        detail: { summary: "Change a client's class, memory or weight, pause it or let it go on" },
      },
    )
    .get("/v1/config", () => ({ segments: watcher.now().map((stats) => configOf(stats, watcher.live())) }), {
      response: z.object({ segments: z.array(configSchema) }),
      detail: { summary: "Policy, target and settings of every segment" },
    })
    .put(
      "/v1/config",
      ({ body: { policy, segment } }) => {
        const all = watcher.live().filter(({ id }) => segment === undefined || id === segment);
        if (all.length === 0)
          throw new RequestError(404, "no_segment", "there is no such segment; /v1/config lists them");
        const changed = changePolicy(all, policyChange(policy, "policy"), native);
        watcher.changed();
        return {
          notes: [...new Set(changed.flatMap(({ notes }) => notes))],
          segments: watcher
            .now()
            .filter(({ segment: { id } }) => all.some((one) => one.id === id))
            .map((stats) => configOf(stats, all)),
        };
      },
      {
        body: fields({ policy: policyChangeSchema, segment: z.string().optional() }),
        response: z.object({
          segments: z.array(configSchema),
          /** Fields that have no effect under the policy in force. */
          notes: z.array(z.string()),
        }),
        detail: { summary: "Change the policy of one segment, or of all, while they run; fields left out stay" },
      },
    )
    .get("/metrics", () => new Response(watcher.metrics(), { headers: { "content-type": METRICS_TYPE } }), {
      detail: {
        summary: "For Prometheus",
        responses: { 200: { description: "Metrics", content: { "text/plain": {} } } },
      },
    })
    .get("/grafana.json", () => grafanaDashboard(), {
      detail: { summary: "A dashboard over /metrics, for Grafana to import" },
    })
    .head("/v1/events", noEvents, { detail: { hide: true } })
    .get("/v1/events", ({ request }) => eventStream(watcher, request.signal), {
      detail: {
        summary: "Server-sent events: stats once a second; segment, attach, exit, hang and slo as they happen",
        responses: { 200: { description: "A stream of events", content: { "text/event-stream": {} } } },
      },
    });
  routes = app.routes.filter(({ method }) => method !== "HEAD");
  return app;
}

/** Checking what is nested without end, and saying what is wrong with it, takes the server's time, or its stack. */
function refuseDeep({ body }: { body: unknown }): void {
  checkDepth(body, "body");
}

function clientsOf(segments: readonly Stats[]): Client[] {
  return segments.flatMap(({ segment, clients }) =>
    clients.map((client: ClientStats) => ({ id: `${segment.id}:${client.name}`, segment: segment.id, ...client })),
  );
}

/** The client that is meant; of several with one name, the one that lives. */
export function clientOf(id: string, segments: readonly Stats[]): Client {
  const all = clientsOf(segments);
  const exact = all.find((client) => client.id === id);
  if (exact) return exact;
  const named = all.filter(({ name }) => name === id);
  const live = named.filter(({ state }) => state === "live");
  const [first, ...more] = live.length > 0 ? live : named;
  if (!first)
    throw new RequestError(
      404,
      "no_client",
      `there is no client ${JSON.stringify(id)}; /v1/clients lists those there are`,
    );
  if (more.length > 0)
    throw new RequestError(
      409,
      "ambiguous",
      `several clients are named ${JSON.stringify(id)}: ${[first, ...more].map((client) => client.id).join(", ")}`,
    );
  return first;
}

/** Written while it is sent. */
function traceOf(watcher: Watcher, id: string | undefined, options: TraceOptions): Response {
  const segments = watcher.live().filter((segment) => id === undefined || segment.id === id);
  if (id !== undefined && segments.length === 0)
    throw new RequestError(
      404,
      "no_segment",
      `there is no segment ${JSON.stringify(id)}; /v1/config lists those there are`,
    );
  const pieces = tracePieces(segments, options);
  const stream = new ReadableStream<Uint8Array>({
    pull(controller) {
      const { done, value } = pieces.next();
      if (done) controller.close();
      else controller.enqueue(encoder.encode(value));
    },
  });
  return new Response(stream, {
    headers: {
      "content-type": "application/json",
      "content-disposition": 'attachment; filename="rigel-trace.json"',
      "cache-control": "no-store",
    },
  });
}

/** What is wrong with what a schema has refused, in the words of the command line: Elysia tells no more than zod's texts. */
function issuesOf(validator: unknown, value: unknown): { path: string; message: string }[] {
  const { schema } = z.object({ schema: z.instanceof(z.ZodType) }).parse(validator);
  const result = schema.safeParse(value, { reportInput: true });
  return result.success ? [] : problemsOf(result.error);
}

/** Encoded once for all who look on. */
const encoded = new WeakMap<readonly Event[], Uint8Array<ArrayBuffer>>();
const encoder = new TextEncoder();

function bytesOf(events: readonly Event[]): Uint8Array<ArrayBuffer> {
  const known = encoded.get(events);
  if (known) return known;
  const bytes = encoder.encode(
    events.map(({ event, data }) => `event: ${event}\ndata: ${JSON.stringify(data)}\n\n`).join(""),
  );
  encoded.set(events, bytes);
  return bytes;
}

/** How many events a stream that is not read may have waiting before it is ended: its reader connects again. */
const BACKLOG = 30;

function eventStream(watcher: Watcher, signal: AbortSignal): Response {
  const ended = new AbortController();
  signal.addEventListener("abort", () => ended.abort(), { signal: ended.signal });
  const stream = new ReadableStream<Uint8Array>(
    {
      start(controller) {
        const stop = watcher.subscribe((events) => {
          if ((controller.desiredSize ?? 1) > -BACKLOG) {
            controller.enqueue(bytesOf(events));
            return;
          }
          ended.abort();
          controller.close();
        });
        ended.signal.addEventListener("abort", stop);
      },
      cancel: () => ended.abort(),
    },
    new CountQueuingStrategy({ highWaterMark: 1 }),
  );
  return eventsAnswer(stream);
}

/** What HEAD answers: Elysia's own reads what GET answers to its end, which has none. */
function noEvents(): Response {
  return eventsAnswer(new ReadableStream());
}

function eventsAnswer(stream: ReadableStream<Uint8Array>): Response {
  return new Response(stream, {
    headers: { "content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no" },
  });
}
