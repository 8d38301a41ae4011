/** serve.test.ts: what the server shows of what runs, that killing it changes nothing, and how it starts and ends. */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync, readFileSync, statSync } from "node:fs";
import { connect } from "node:net";
import { join } from "node:path";
import { z } from "zod";
import { commandOf, living, startedWith } from "../src/proc.ts";
import { statsSchema } from "../src/stats.ts";
import { root } from "./rigel.ts";
import { Place, Server, spinning, until } from "./serving.ts";

let place: Place;
beforeAll(() => {
  place = new Place();
});
afterAll(() => place[Symbol.dispose]());

const segmentsSchema = z.object({ segments: z.array(statsSchema) });
const clientSchema = z.object({
  segment: z.string(),
  launches: z.int(),
  processes: z.array(z.object({ pid: z.int() })),
});
const changedSchema = z.object({ weight: z.number() });
/** Whether the whole format is right is for trace.test.ts. */
const traceSchema = z.object({
  traceEvents: z.array(z.object({ ph: z.string(), pid: z.int(), cat: z.string().optional() })),
});
/** The best-effort client of the pair, once both have launched for a while. */
async function working(server: Server): Promise<z.infer<typeof clientSchema>> {
  return await until(async () => {
    const answers = await Promise.all(["serve", "train"].map((name) => server.ask(`/v1/clients/${name}`)));
    const [serve, train] = answers.map(({ body }) => clientSchema.safeParse(body).data);
    return serve && train && serve.launches > 0 && train.launches > 100 ? train : undefined;
  });
}

const openapiSchema = z.object({ paths: z.record(z.string(), z.record(z.string(), z.unknown())) });
const eventSchema = z.object({ event: z.string(), data: z.record(z.string(), z.unknown()) });

/** Server-sent events from the moment that this returns. */
async function eventsOf(url: string) {
  const abort = new AbortController();
  const response = await fetch(url, { signal: abort.signal });
  expect(response.headers.get("content-type")).toBe("text/event-stream");
  const chunks = response.body ?? new ReadableStream<Uint8Array<ArrayBuffer>>();
  /** All of them, until `enough` is content. */
  return async (enough: (seen: z.infer<typeof eventSchema>[]) => boolean) => {
    const decoder = new TextDecoder();
    const seen: z.infer<typeof eventSchema>[] = [];
    let rest = "";
    for await (const chunk of chunks) {
      const blocks = (rest + decoder.decode(chunk, { stream: true })).split("\n\n");
      rest = blocks.pop() ?? "";
      for (const block of blocks) {
        const [, event, data = ""] = /^event: (.*)\ndata: (.*)$/.exec(block) ?? [];
        seen.push(eventSchema.parse({ event, data: JSON.parse(data) }));
      }
      if (enough(seen)) break;
    }
    abort.abort();
    return seen
      .filter(({ event }) => event !== "stats" && event !== "slo")
      .map(({ event, data }) => `${event} ${String(data["client"] ?? data["state"])}`);
  };
}

/** Until that is shown: of a program that a busy machine lets do nothing for seconds it is told that it is stopped, for so long. */
async function shows(expected: object, look: () => Promise<unknown>): Promise<void> {
  await until(async () => Bun.deepMatch(expected, await look()) || undefined);
}

describe("the server", () => {
  test("shows a launch: stats, clients, events; the same after it was killed and started again", async () => {
    await using server = await Server.start(place);
    expect((await server.ask("/v1/stats")).body).toMatchObject({ segments: [] });
    const seen = await eventsOf(`${server.url}/v1/events`);
    const config = place.file("pair.json", place.pair());
    await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    const said = launch.stderr.text();
    const found = await until(async () => {
      const { segments } = segmentsSchema.parse((await server.ask("/v1/stats")).body);
      return segments[0]?.clients.length === 2 && segments[0].clients.every(({ rates }) => rates)
        ? segments
        : undefined;
    });
    expect(found).toMatchObject([{ segment: { creator_pid: launch.pid }, policy: "slo" }]);
    const id = found[0]?.segment.id;
    expect((await server.ask("/v1/clients")).body).toMatchObject({
      clients: [{ segment: id }, { segment: id }],
    });
    expect((await server.ask("/v1/clients/train")).body).toMatchObject({ id: `${id}:train`, class: "best-effort" });
    expect((await server.ask(`/v1/clients/${id}:serve`)).body).toMatchObject({ name: "serve", class: "high" });
    // What each has of the GPU is known from the second look on.
    const shares = await until(async () => {
      const { segments } = segmentsSchema.parse((await server.ask("/v1/stats")).body);
      const known = segments[0]?.clients.flatMap(({ gpu_share }) => gpu_share ?? []) ?? [];
      return known.length === 2 && known.every((share) => share > 0) ? known : undefined;
    });
    for (const share of shares) expect(share).toBeLessThanOrEqual(1);
    expect((await server.ask("/v1/clients/train")).body).toMatchObject({ gpu_share: expect.any(Number) });
    expect((await server.ask("/openapi/json")).text).toContain('"gpu_share"');
    expect(await server.ask("/v1/clients/nobody")).toMatchObject({
      status: 404,
      body: { error: { code: "no_client" } },
    });

    const first = await seen((all) => all.filter(({ event }) => event === "attach").length === 2);
    expect(first.toSorted()).toEqual(["attach serve", "attach train", "segment live"]);
    server.child.kill("SIGKILL");
    await server.child.exited;
    await using again = await Server.start(place);
    expect(again.token).toBe(server.token);
    const after = await until(async () => {
      const { segments } = segmentsSchema.parse((await again.ask("/v1/stats")).body);
      return segments[0]?.clients.every(({ rates }) => (rates?.requests.count ?? 0) > 0) ? segments : undefined;
    });
    const requests = (all: typeof found): number[] => all[0]?.clients.map((client) => client.requests.count) ?? [];
    for (const [index, count] of requests(after).entries()) expect(count).toBeGreaterThan(requests(found)[index] ?? 0);

    const more = await eventsOf(`${again.url}/v1/events`);
    launch.kill("SIGINT");
    const last = await more((all) => all.some(({ event, data }) => event === "segment" && data["state"] === "gone"));
    expect([...new Set(last)].toSorted(), await said).toEqual(["exit serve", "exit train", "segment gone"]);
    await launch.exited;
    // What is looked at is as old as a tenth of a second.
    await until(async () =>
      segmentsSchema.parse((await again.ask("/v1/stats")).body).segments.length === 0 ? true : undefined,
    );
  });

  test("changes policy and clients while they run, and counts for Prometheus", async () => {
    await using server = await Server.start(place);
    const config = place.file("pair.json", place.pair());
    await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    await working(server);
    const put = { method: "PUT", body: { policy: { name: "priority", inflight: 3 } } };
    const changed = await server.ask("/v1/config", put);
    expect(changed).toMatchObject({
      status: 200,
      body: { segments: [{ policy: "priority", settings: { inflight: 3 } }] },
    });
    const wrong = await server.ask("/v1/config", { method: "PUT", body: { policy: { inflight: -1 } } });
    expect(wrong).toMatchObject({ status: 422, body: { error: { code: "invalid" } } });
    const paused = await server.ask("/v1/clients/train", { method: "PATCH", body: { paused: true, weight: 2 } });
    expect(paused).toMatchObject({
      status: 200,
      body: { name: "train", paused: true, weight: 2, notes: [expect.stringContaining("weight has no effect")] },
    });
    // Its processes take up a weight a moment later, for which the answer waits, but not for ever.
    const taken = await until(async () => {
      const { body } = await server.ask("/v1/clients/train");
      return changedSchema.parse(body).weight === 2 ? body : undefined;
    });
    expect(taken).toMatchObject({ paused: true, weight: 2 });
    const resumed = await server.ask("/v1/clients/train", { method: "PATCH", body: { paused: false } });
    expect(resumed).toMatchObject({ status: 200, body: { paused: false } });
    expect(await server.ask("/v1/config")).toMatchObject({ body: { segments: [{ settings: { inflight: 3 } }] } });
    const { text } = await server.ask("/metrics");
    expect(text).toMatch(/^rigel_launches_total\{segment="0",client="train",class="best-effort"\} \d+$/m);
    const buckets = [
      ...text.matchAll(/^rigel_request_duration_seconds_bucket\{.*client="serve".*le="([^"]+)"\} (\d+)$/gm),
    ];
    const counts = buckets.map(([, , count]) => Number(count));
    expect(counts).toEqual(counts.toSorted((a, b) => a - b));
    expect(buckets.at(-1)?.[1]).toBe("+Inf");
    // Class and pause are looked at together, and nothing is changed where they do not fit.
    const unfit = await server.ask("/v1/clients/train", { method: "PATCH", body: { paused: true, class: "high" } });
    expect(unfit).toMatchObject({
      status: 422,
      body: { error: { message: expect.stringContaining("never held back") } },
    });
    expect(await server.ask("/v1/clients/train")).toMatchObject({ body: { class: "best-effort", paused: false } });
    const bare = await server.ask("/v1/clients/train", { method: "PATCH", body: { paused: false, pause_s: 5 } });
    expect(bare).toMatchObject({ status: 422, body: { error: { message: expect.stringContaining("pause_s") } } });
    const nobody = await server.ask("/v1/clients/nobody", { method: "PATCH", body: { weight: 2 } });
    expect(nobody).toMatchObject({ status: 404, body: { error: { code: "no_client" } } });
    const idle = await server.ask("/v1/config", { method: "PUT", body: { policy: { quantum_us: 500 } } });
    expect(idle).toMatchObject({
      status: 200,
      body: { notes: [expect.stringContaining("has no effect under policy")] },
    });
    const none = await server.ask("/v1/clients/train", { method: "PATCH", body: {} });
    expect(none).toMatchObject({ status: 422, body: { error: { code: "invalid" } } });
    const unlimited = await server.ask("/v1/config", { method: "PUT", body: { policy: { inflight: 0 } } });
    expect(unlimited.status).toBe(200);
    const fair = await server.ask("/v1/config", { method: "PUT", body: { policy: { name: "fair" } } });
    expect(fair).toMatchObject({ status: 422, body: { error: { message: expect.stringContaining("at least 1") } } });
    const slo = await server.ask("/v1/config", { method: "PUT", body: { policy: { name: "slo" } } });
    expect(slo).toMatchObject({ body: { segments: [{ policy: "slo", target: { p99_over_alone: 1.05 } }] } });
    launch.kill("SIGINT");
    await launch.exited;
  });

  test("gives a trace of what clients did last, as `rigel trace` writes it", async () => {
    await using server = await Server.start(place);
    const config = place.file("pair.json", place.pair());
    await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    const { processes, segment } = await working(server);
    const pid = processes[0]?.pid;
    const all = traceSchema.parse((await server.ask("/v1/traces", { headers: {} })).body);
    expect(new Set(all.traceEvents.map((event) => event.pid)).size).toBe(2);
    const one = traceSchema.parse((await server.ask(`/v1/traces?client=train&segment=${segment}&last_s=60`)).body);
    expect(new Set(one.traceEvents.map((event) => event.pid))).toEqual(new Set([pid ?? 0]));
    expect(one.traceEvents.filter(({ ph, cat }) => ph === "X" && cat === "launch").length).toBeGreaterThan(50);
    const other = await server.ask("/v1/traces?client=nobody");
    expect(other).toMatchObject({
      status: 404,
      body: { error: { message: expect.stringContaining("no client nobody") } },
    });
    expect(await server.ask("/v1/traces?last_s=0")).toMatchObject({
      status: 422,
      body: { error: { code: "invalid" } },
    });
    launch.kill("SIGINT");
    await launch.exited;
  });

  test("waits for who reads slowly", async () => {
    await using server = await Server.start(place);
    const config = place.file("pair.json", place.pair());
    await using launch = place.start(["launch", config, "--segment", place.segments]);
    // Far more than a socket holds.
    await until(async () => ((await server.ask("/v1/traces")).text.length > 1_000_000 ? true : undefined));
    const reader = connect(server.socket);
    const { promise, resolve, reject } = Promise.withResolvers<string>();
    let text = "";
    reader.setEncoding("utf8").on("data", (more: string) => (text += more));
    reader.on("end", () => resolve(text)).on("error", reject);
    reader.once("data", () => reader.pause());
    reader.write("GET /v1/traces HTTP/1.1\r\nHost: rigel\r\nConnection: close\r\n\r\n");
    await until(() => reader.isPaused() || undefined);
    // Bun takes a connection for left after ten seconds, and looks every four, unless it is told otherwise.
    await Bun.sleep(16_000);
    reader.resume();
    expect((await promise).slice(-20)).toEndWith("]}\n\r\n0\r\n\r\n");
    launch.kill("SIGINT");
    await launch.exited;
  });

  test("tells who hangs: as data, as an event and to Prometheus", async () => {
    await using server = await Server.start(place, 0, "--hang", "1s");
    const seen = await eventsOf(`${server.url}/v1/events`);
    const config = place.file("spin.json", await spinning());
    await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    const said = launch.stderr.text();
    const events = await seen((all) => all.some(({ event }) => event === "hang"));
    expect(events).toEqual(["segment live", "attach train", "hang train"]);
    const hang = {
      schema: 1,
      hung: 1,
      segments: [{ threshold_s: 1, processes: [{ name: "train", verdict: "synchronise", hung: true }] }],
    };
    await shows(hang, async () => (await server.ask("/v1/hangs")).body);
    const args = ["hangs", "--json", "--threshold", "1s", "--segment", place.segments];
    await shows(hang, async () => JSON.parse((await place.rigel(...args)).stdout));
    const patient = { hung: 0, segments: [{ processes: [{ verdict: "working", hung: false }] }] };
    await shows(patient, async () => (await server.ask("/v1/hangs?threshold_s=3600")).body);
    expect((await server.ask("/v1/hangs?threshold_s=soon")).status).toBe(422);
    const told = { collective: "0", behind: "0", synchronise: "1", call: "0", stopped: "0" };
    await shows(told, async () => {
      const { text } = await server.ask("/metrics");
      const hung = text.matchAll(/^rigel_client_hung\{.*client="train".*reason="(\w+)"\} (\d)$/gm);
      return Object.fromEntries([...hung].map(([, reason, value]) => [reason, value]));
    });
    launch.kill("SIGTERM");
    await said;
  });

  test("answers HEAD as GET, without a body, also where that has no end", async () => {
    await using server = await Server.start(place);
    // Ends what has no end before the test's own limit leaves the server behind; on a busy machine the page alone takes seconds.
    const signal = AbortSignal.timeout(100_000);
    for (const path of ["/v1/events", "/v1/stats", "/metrics", "/"]) {
      const [head, get] = await Promise.all(
        ["HEAD", "GET"].map(async (method) => await fetch(`${server.url}${path}`, { method, signal })),
      );
      expect([head?.status, head?.headers.get("content-type")]).toEqual([200, get?.headers.get("content-type")]);
      expect(head?.headers.get("cache-control")).toBe(get?.headers.get("cache-control") ?? null);
      expect(await head?.text()).toBe("");
      await get?.body?.cancel();
    }
  });

  test("says what is not there, or is there twice", async () => {
    await using server = await Server.start(place);
    const nothing = await server.ask("/v1/traces");
    expect(nothing).toMatchObject({
      status: 404,
      body: { error: { message: expect.stringContaining("nothing runs") } },
    });
    const unknown = await server.ask("/v1/clients/train", { method: "PATCH", body: { weigth: 2 } });
    const message = "unknown field; expected one of class, memory, weight, paused, pause_s";
    expect(unknown).toMatchObject({ status: 422, body: { error: { issues: [{ path: "weigth", message }] } } });
    const inner = await server.ask("/v1/config", {
      method: "PUT",
      body: { policy: { name: "slo", target: { p99: 1 } }, segmnt: "x" },
    });
    expect(inner).toMatchObject({
      status: 422,
      body: {
        error: {
          issues: [
            { path: "policy.target.p99", message: "unknown field; expected one of p99_over_alone, p99_ms" },
            { path: "policy.target", message: 'expected either "p99_over_alone" or "p99_ms", got neither' },
            { path: "segmnt", message: "unknown field; expected one of policy, segment" },
          ],
        },
      },
    });
    for (const [query, path, wrong] of [
      ["hangs?threshold=5", "threshold", "unknown field; expected one of threshold_s"],
      ["hangs?threshold_s=-1", "threshold_s", "expected a number above 0, got -1"],
      ["hangs?threshold_s=", "threshold_s", 'expected a number, got ""'],
      ["traces?last_s=abc", "last_s", 'expected a number, got "abc"'],
      ["traces?last=1", "last", "unknown field; expected one of client, segment, last_s"],
    ])
      expect(await server.ask(`/v1/${query}`)).toMatchObject({
        status: 422,
        body: { error: { issues: [{ path, message: wrong }] } },
      });
    const config = place.file("pair.json", place.pair());
    await using first = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    await using second = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    const body = { weight: 2 };
    const ambiguous = await until(async () => {
      const answer = await server.ask("/v1/clients/train", { method: "PATCH", body });
      return answer.status === 409 ? answer : undefined;
    });
    expect(ambiguous).toMatchObject({ body: { error: { code: "ambiguous" } } });
    // What is looked at is as old as a tenth of a second.
    await until(async () => ((await server.ask("/v1/clients/train")).status === 409 ? true : undefined));
    const client = await server.ask("/v1/traces?client=nobody");
    expect(client).toMatchObject({ status: 404, body: { error: { code: "no_client" } } });
    const segment = await server.ask("/v1/traces?segment=nope");
    expect(segment).toMatchObject({ status: 404, body: { error: { code: "no_segment" } } });
    for (const launch of [first, second]) launch.kill("SIGTERM");
    await Promise.all([first.exited, second.exited]);
  });

  test("ends where its port is another's, and leaves neither socket nor lock", async () => {
    using own = new Place();
    // As another user's server, or this one's with another XDG_RUNTIME_DIR, would have it.
    const options = { development: false, reusePort: true };
    using other = Bun.serve({ ...options, hostname: "127.0.0.1", port: 0, fetch: () => new Response("another") });
    const { status, stdout, stderr } = await own.rigel("serve", "--port", String(other.port), "--json");
    expect({ status, stdout }, stderr).toEqual({ status: 1, stdout: "" });
    expect(stderr).toContain(`127.0.0.1:${other.port} cannot be listened on`);
    expect(existsSync(join(own.path, "run", "rigel", "serve.sock"))).toBe(false);
    await using server = await Server.start(own);
    expect((await server.ask("/healthz")).status).toBe(200);
  });

  test("ends as asked by whoever was told that it listens, however soon", async () => {
    using own = new Place();
    for (let time = 0; time < 5; time++) {
      const server = await Server.start(own);
      await server[Symbol.asyncDispose]();
      expect(server.child.exitCode).toBe(0);
      expect(existsSync(server.socket)).toBe(false);
    }
  });

  test("ends as asked while it looks for GPUs for a launch, which is not started any more", async () => {
    using own = new Place();
    const source = own.file(
      "cuda.c",
      "#include <unistd.h>\n__attribute__((constructor)) static void stay(void) { sleep(1000); }\n",
    );
    const compile = ["cc", "-shared", "-fPIC", "-o", join(own.path, "libcuda.so.1"), source];
    expect(await Bun.spawn(compile, { stdout: "inherit", stderr: "inherit" }).exited).toBe(0);
    own.env["LD_LIBRARY_PATH"] = own.path;
    const server = await Server.start(own);
    const body = { clients: [{ name: "a", class: "high", command: ["sleep", "1000"] }] };
    const answer = server.ask("/v1/launch", { method: "POST", body }).catch(() => undefined);
    const looking = () =>
      living().find(
        ({ pid }) => commandOf(pid).endsWith(" --probe") && startedWith(pid, [`LD_LIBRARY_PATH=${own.path}`]),
      );
    await until(looking);
    await server[Symbol.asyncDispose]();
    expect(await answer).toBeUndefined();
    expect(server.child.exitCode).toBe(0);
    expect(existsSync(server.socket)).toBe(false);
    await until(() => (looking() ? undefined : true));
    expect(existsSync(own.state)).toBe(false);
  });

  test("has one instance, a socket and a token of this user's alone, and takes its socket away", async () => {
    const server = await Server.start(place);
    expect(statSync(server.socket).mode & 0o777).toBe(0o600);
    expect(statSync(join(place.path, "run", "rigel")).mode & 0o777).toBe(0o700);
    expect(statSync(join(place.path, "run", "rigel", "token")).mode & 0o777).toBe(0o600);
    const second = await place.rigel("serve");
    expect(second.stderr).toContain("runs already");
    expect(second.status).toBe(1);
    const overSocket = await fetch("http://rigel/healthz", { unix: server.socket });
    expect(await overSocket.json()).toMatchObject({ ok: true });
    // A name as short as this once had the path begin too late.
    const briefly = await fetch("http://r/v1/clients", { unix: server.socket });
    expect(briefly.status).toBe(200);
    const openapi = await server.ask("/openapi/json");
    expect(openapi.body).toMatchObject({ info: { title: "Rigel" }, paths: { "/v1/clients": {}, "/v1/events": {} } });
    const routes = Object.entries(openapiSchema.parse(openapi.body).paths).flatMap(([path, methods]) =>
      Object.keys(methods).map((method) => `${method.toUpperCase()} ${path.replace("{id}", "ID")}`),
    );
    // The description itself is not in it.
    routes.push("GET /openapi/json");
    const described = readFileSync(join(root, "docs", "watching.md"), "utf8").matchAll(/^\| `([A-Z]+ \/\S+)`/gm);
    expect([...described].map(([, route = ""]) => route).toSorted()).toEqual(routes.toSorted());
    // What may be null may be so too where it is one of a few values.
    const nullable = [...openapi.text.matchAll(/"type":\["string","null"\],"enum":(\[.*?\])/g)];
    expect(nullable.length).toBeGreaterThan(0);
    for (const [, values = ""] of nullable) expect(JSON.parse(values)).toContain(null);
    await server[Symbol.asyncDispose]();
    expect(server.child.exitCode).toBe(0);
    expect(existsSync(server.socket)).toBe(false);
  });
});
