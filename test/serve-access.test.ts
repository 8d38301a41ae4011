/** serve-access.test.ts: what the server refuses, says so, and does not do; whom its files are safe from. */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import {
  chmodSync,
  chownSync,
  linkSync,
  lstatSync,
  mkdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { connect, createServer } from "node:net";
import { join } from "node:path";
import { z } from "zod";
import { folderOfOwn, refusal, tokenIn } from "../src/serve-access.ts";
import { Place, Server, until } from "./serving.ts";

const isRoot = process.getuid?.() === 0;
const NOBODY = 65_534;

/** A command as another user, who has no rights of root's. */
async function asNobody(...command: string[]) {
  await using child = Bun.spawn(["setpriv", `--reuid=${NOBODY}`, `--regid=${NOBODY}`, "--clear-groups", ...command], {
    stdout: "ignore",
    stderr: "pipe",
  });
  return { stderr: await child.stderr.text(), status: await child.exited };
}

/** Maps a file for reading. */
const MAP = "import mmap, os, sys; mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ)";

/** What is answered to the very bytes of a request. */
async function answered(to: { port: number } | { path: string }, request: string): Promise<string> {
  const { promise, resolve, reject } = Promise.withResolvers<string>();
  let text = "";
  const socket = connect(to);
  socket.on("data", (data) => (text += data.toString()));
  socket.on("end", () => resolve(text));
  socket.on("error", reject);
  socket.write(request);
  return await promise;
}

/** What is wrong with such a request to a server at a port over TCP. */
function wrongWith(port: number, headers: Record<string, string>, path = "/v1/stats", method = "GET") {
  const request = new Request(`http://127.0.0.1:${port}${path}`, { method, headers });
  return refusal(request, path, { kind: "tcp", port, token: "x" });
}

const folder = (): string => join(place.path, "run", "rigel");
const served = async () => await place.rigel("serve", "--port", "0", "--segment", place.segments);

/** What a request could change. */
const stateSchema = z.object({
  segments: z.array(
    z.object({
      policy: z.string(),
      settings: z.record(z.string(), z.number()),
      clients: z.array(
        z.object({
          name: z.string(),
          class: z.string(),
          paused: z.boolean(),
          weight: z.number(),
          memory: z.object({ limit_bytes: z.number().nullable() }),
        }),
      ),
    }),
  ),
});
const launchesSchema = z.object({ launches: z.array(z.unknown()) });

let place: Place;
beforeAll(() => {
  place = new Place();
});
afterAll(() => place[Symbol.dispose]());

test("a folder of one's own can be looked into, and a token read, whatever the umask takes", () => {
  const umask = process.umask(0o777);
  try {
    const own = folderOfOwn(join(place.path, "own"), "IT");
    expect(lstatSync(own).mode & 0o777).toBe(0o700);
    expect(tokenIn(join(own, "token"))).toHaveLength(43);
    expect(lstatSync(join(own, "token")).mode & 0o777).toBe(0o600);
  } finally {
    process.umask(umask);
  }
});

describe("requests that are refused", () => {
  test("each with its reason, one line on standard error, and nothing done", async () => {
    const server = await Server.start(place);
    // Something that could be changed, and does not change by itself.
    const config = place.file("pair.json", place.pair({ policy: { name: "priority" } }));
    await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    const state = async () => {
      const { segments } = stateSchema.parse((await server.ask("/v1/stats")).body);
      for (const { clients } of segments) clients.sort((a, b) => a.name.localeCompare(b.name));
      const { launches } = launchesSchema.parse((await server.ask("/v1/launches")).body);
      return { segments, launches };
    };
    const before = await until(async () => {
      const found = await state();
      return found.segments[0]?.clients.length === 2 ? found : undefined;
    });
    const { token } = server;
    const mine = { authorization: `Bearer ${token}` };
    const change = { method: "PUT", body: { policy: { inflight: 1 } } };
    const port = new URL(server.url).port;
    const refused = async (status: number, code: string, path: string, options: Parameters<Server["ask"]>[1]) => {
      const answer = await server.ask(path, options);
      expect(answer).toMatchObject({ status, body: { error: { code, message: expect.any(String) } } });
    };
    await refused(401, "no_token", "/v1/config", { ...change, headers: {} });
    await refused(401, "wrong_token", "/v1/config", { ...change, headers: { authorization: `Bearer ${token}x` } });
    await refused(401, "wrong_token", "/v1/config", { ...change, headers: { authorization: "Bearer x" } });
    await refused(401, "no_token", "/v1/config", { ...change, headers: { authorization: `Basic ${token}` } });
    const pause = { method: "PATCH", body: { paused: true } };
    await refused(401, "no_token", "/v1/clients/train", { ...pause, headers: {} });
    await refused(401, "no_token", "/v1/launch", { method: "POST", body: place.pair(), headers: {} });
    await refused(401, "no_token", "/v1/launches", { headers: {} });
    await refused(401, "no_token", "/v1/l%61unches/x", { headers: {} });
    await refused(403, "foreign_host", "/v1/stats", { headers: { host: "rigel.example" } });
    await refused(403, "foreign_host", "/v1/config", {
      ...change,
      headers: { ...mine, host: `rigel.example:${port}` },
    });
    await refused(403, "foreign_origin", "/v1/stats", { headers: { origin: "http://rigel.example" } });
    await refused(403, "foreign_origin", "/v1/stats", { headers: { origin: "null" } });
    await refused(403, "foreign_origin", "/v1/stats", { headers: { "sec-fetch-site": "cross-site" } });
    const form = { "content-type": "application/x-www-form-urlencoded" };
    await refused(403, "foreign_origin", "/v1/launch", {
      method: "POST",
      body: "clients=1",
      headers: { ...form, ...mine, origin: "http://rigel.example" },
    });
    // Of a browser that says nothing of where the page is from.
    await refused(401, "no_token", "/v1/launch", { method: "POST", body: "clients=1", headers: form });
    await refused(415, "no_json", "/v1/launch", { method: "POST", body: "clients=1", headers: { ...form, ...mine } });
    await refused(413, "too_large", "/v1/config", { ...change, body: "x".repeat(10 * 2 ** 20) });
    await refused(400, "not_json", "/v1/config", { ...change, body: '{"policy":' });
    const notText = await fetch(`${server.url}/v1/clients/train`, {
      method: "PATCH",
      headers: { ...mine, "content-type": "application/json" },
      body: Buffer.from('{"memory":"\u00ff"}', "latin1"),
    });
    expect(await notText.json()).toEqual({ error: { code: "not_json", message: "body: expected text in UTF-8" } });
    await refused(422, "invalid", "/v1/clients/train", { ...pause, body: { pause_s: 1e20 } });
    const deleted = await fetch(`${server.url}/v1/clients/train`, { method: "DELETE", headers: mine });
    expect(deleted.headers.get("allow")).toBe("GET, PATCH");
    expect(await deleted.json()).toMatchObject({
      error: { code: "method", message: "/v1/clients/train takes GET or PATCH, not DELETE" },
    });
    await refused(405, "method", "/metrics", { method: "POST", body: {} });
    await refused(404, "not_found", "/v1/clients/train/x", { method: "DELETE" });
    const unending = new ReadableStream({ pull: (controller) => controller.enqueue(Buffer.alloc(65_536, " ")) });
    const json = { ...mine, "content-type": "application/json" };
    const sent = await fetch(`${server.url}/v1/config`, { method: "PUT", body: unending, headers: json });
    expect(sent.status).toBe(411);
    // Without a Host, as HTTP/1.0 allows: there was a page with the server's source in it.
    const hostless = "GET /v1/stats HTTP/1.0\r\n";
    for (const [to, header] of [
      [{ port: Number(port) }, ""],
      [{ path: server.socket }, ""],
      [{ path: server.socket }, "Host: a b\r\n"],
    ] as const) {
      const [head = "", body = ""] = (await answered(to, `${hostless}${header}\r\n`)).split("\r\n\r\n");
      expect(head).toStartWith("HTTP/1.1 400 ");
      expect(JSON.parse(body)).toMatchObject({ error: { code: "no_host" } });
    }
    // Either all of a change or none of it.
    await refused(422, "command", "/v1/clients/serve", {
      method: "PATCH",
      body: { paused: true, weight: 7 },
    });
    await refused(422, "config", "/v1/config", {
      method: "PUT",
      body: { policy: { name: "fair", inflight: 0 } },
    });
    await refused(422, "invalid", "/v1/config", { method: "PUT", body: { policy: { inflight: -1 } } });
    // Far deeper than anything could mean: it took the server seconds to fail at that (500).
    const deep = "[".repeat(100_000) + "]".repeat(100_000);
    await refused(422, "config", "/v1/config", { method: "PUT", body: `{"policy":{"target":${deep}}}` });
    await refused(422, "config", "/v1/clients/train", { method: "PATCH", body: `{"memory":${deep}}` });
    await refused(404, "not_found", "/v1/../../etc/passwd", {});
    await refused(404, "not_found", "/%2e%2e/%2e%2e/etc/passwd", {});
    await refused(404, "no_client", "/v1/clients/..%2f..%2fetc%2fpasswd", {});
    // It still answers.
    expect(await server.ask("/healthz", { headers: {} })).toMatchObject({ status: 200 });
    const same = { origin: server.url, "sec-fetch-site": "same-origin" };
    expect(await server.ask("/v1/stats", { headers: same })).toMatchObject({ status: 200 });
    expect(await state()).toEqual(before);
    // What was refused is done for who may ask for it.
    for (const [path, { method, body }] of [
      ["/v1/config", change],
      ["/v1/clients/train", pause],
    ] as const)
      expect(await server.ask(path, { method, body, headers: { ...mine, ...same } })).toMatchObject({ status: 200 });
    expect(await state()).toMatchObject({
      segments: [{ settings: { inflight: 1 }, clients: [{ paused: false }, { paused: true }] }],
    });
    launch.kill("SIGINT");
    await launch.exited;
    await server[Symbol.asyncDispose]();
    const lines = (await server.log).split("\n").filter((line) => line.includes("refused "));
    const statuses = Map.groupBy(lines, (line) => /\((\d+)\)$/.exec(line)?.[1]);
    expect(Object.fromEntries([...statuses].map(([status, own]) => [status, own.length]))).toEqual({
      400: 5,
      401: 9,
      403: 6,
      404: 4,
      405: 2,
      411: 1,
      413: 1,
      415: 1,
      422: 6,
    });
    expect(lines).toContain("rigel: refused GET /etc/passwd over tcp: there is nothing at GET /etc/passwd (404)");
    // A token has no place in a log.
    expect(await server.log).not.toContain(token);
  });
});

test("a server at HTTP's own port, which browsers and curl leave out, is named without it", () => {
  for (const name of ["127.0.0.1", "localhost"]) {
    expect(wrongWith(80, { host: name, origin: `http://${name}` })).toBeUndefined();
    expect(wrongWith(80, { host: `${name}:80` })).toBeUndefined();
    expect(wrongWith(8080, { host: `${name}:8080`, origin: `http://${name}:8080` })).toBeUndefined();
    expect(wrongWith(8080, { host: name })).toMatchObject({ code: "foreign_host" });
    expect(wrongWith(8080, { host: `${name}:8080`, origin: `http://${name}` })).toMatchObject({
      code: "foreign_origin",
    });
  }
  expect(wrongWith(80, { host: "rigel.example" })).toMatchObject({ code: "foreign_host" });
});

test("a link to the dashboard can be followed from any page, which can neither frame it nor read anything", () => {
  for (const site of ["cross-site", "same-site"]) {
    const from = { host: "localhost:8080", "sec-fetch-site": site };
    const link = { ...from, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document" };
    const foreign = { code: "foreign_origin" };
    expect(wrongWith(8080, link, "/")).toBeUndefined();
    expect(wrongWith(8080, { ...link, "sec-fetch-dest": "iframe" }, "/")).toMatchObject(foreign);
    expect(wrongWith(8080, { ...from, "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script" }, "/")).toMatchObject(
      foreign,
    );
    expect(wrongWith(8080, link, "/", "POST")).toMatchObject(foreign);
    for (const path of ["/v1/stats", "/v1/launches"]) expect(wrongWith(8080, link, path)).toMatchObject(foreign);
  }
});

describe("files that are not to be trusted", () => {
  test("a token that is a link, open to others, has another name, or is none", async () => {
    const token = join(folder(), "token");
    const elsewhere = place.file("elsewhere", `${"a".repeat(43)}\n`);
    chmodSync(elsewhere, 0o600);
    const refusals: [string, () => void][] = [
      ["symbolic link|ELOOP", () => symlinkSync(elsewhere, token)],
      ["another name", () => linkSync(elsewhere, token)],
      ["mode is 644", () => writeFileSync(token, readFileSync(elsewhere), { mode: 0o644 })],
      ["no token", () => writeFileSync(token, "short", { mode: 0o600 })],
      ["no plain file", () => mkdirSync(token)],
    ];
    for (const [why, make] of refusals) {
      rmSync(token, { recursive: true, force: true });
      make();
      const { status, stderr } = await served();
      expect(stderr).toMatch(new RegExp(`the token file .* cannot be used: .*(${why})`));
      expect(status).toBe(1);
    }
    rmSync(token, { recursive: true, force: true });
    expect(readFileSync(elsewhere, "utf8")).toBe(`${"a".repeat(43)}\n`);
  });

  test("a lock that is no file", async () => {
    const lock = join(folder(), "serve.lock");
    for (const [make, why] of [
      [() => mkdirSync(lock), "EISDIR"],
      [() => symlinkSync("nowhere", lock), "ELOOP"],
    ] as const) {
      rmSync(lock, { force: true, recursive: true });
      make();
      const { status, stderr } = await served();
      expect(stderr).toStartWith(`rigel: the file ${lock} cannot be locked: ${why}`);
      expect({ status, lines: stderr.trimEnd().split("\n").length }).toEqual({ status: 1, lines: 1 });
    }
    rmSync(lock);
  });

  test("a socket that somebody listens on, and what is no socket", async () => {
    const socket = join(folder(), "serve.sock");
    const other = createServer();
    const { promise, resolve } = Promise.withResolvers<void>();
    other.listen(socket, resolve);
    await promise;
    const listened = await served();
    expect(listened.stderr).toContain("is listening on");
    expect(listened.status).toBe(1);
    expect(lstatSync(socket).isSocket()).toBe(true);
    other.close();
    rmSync(socket, { force: true });
    writeFileSync(socket, "mine");
    const file = await served();
    expect(file.stderr).toContain("is no socket");
    expect(file.status).toBe(1);
    rmSync(socket);
  });

  test("a folder that others can look into", async () => {
    chmodSync(folder(), 0o755);
    const { status, stderr } = await served();
    chmodSync(folder(), 0o700);
    expect(stderr).toContain("not a folder that belongs to this user alone");
    expect(status).toBe(1);
  });

  test.skipIf(!isRoot)("a folder, a socket and a token of another user (only root can make them)", async () => {
    const [socket, token] = [join(folder(), "serve.sock"), join(folder(), "token")];
    rmSync(token, { force: true });
    writeFileSync(token, `${"a".repeat(43)}\n`, { mode: 0o600 });
    chownSync(token, NOBODY, NOBODY);
    expect((await served()).stderr).toContain(`it belongs to user ${NOBODY}`);
    rmSync(token);
    const other = createServer();
    const { promise, resolve } = Promise.withResolvers<void>();
    other.listen(socket, resolve);
    await promise;
    chownSync(socket, NOBODY, NOBODY);
    expect((await served()).stderr).toContain(`a socket of user ${NOBODY}`);
    other.close();
    rmSync(socket, { force: true });
    chownSync(folder(), NOBODY, NOBODY);
    expect((await served()).stderr).toContain("not a folder that belongs to this user alone");
    chownSync(folder(), 0, 0);
  });

  test.skipIf(!isRoot)(
    "a segment, the socket and the token are closed to other users (only root can be one)",
    async () => {
      await using server = await Server.start(place);
      chmodSync(place.path, 0o755);
      chmodSync(join(place.path, "run"), 0o755);
      const config = place.file("pair.json", place.pair());
      await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
      const path = await until(async () => {
        const { text } = await server.ask("/v1/stats");
        return /"path":"([^"]*)"/.exec(text)?.[1];
      });
      // Readable at all from there, so that what is refused is refused for the file's own sake.
      expect(await asNobody("stat", path)).toMatchObject({ status: 0 });
      const map = ["python3", "-c", MAP, path];
      // And by their owner they are.
      expect(await Bun.spawn(map).exited).toBe(0);
      const commands = [path, join(folder(), "token"), server.socket].flatMap((file) => [
        ["cat", file],
        ["sh", "-c", 'echo x >>"$0"', file],
      ]);
      // Nor by way of a process that has it mapped.
      const maps = `/proc/${launch.pid}/map_files`;
      for (const command of [...commands, map, ["ls", maps], ["cat", `/proc/${launch.pid}/environ`]]) {
        const { stderr, status } = await asNobody(...command);
        expect(stderr).toMatch(/permission denied/i);
        expect(status).not.toBe(0);
      }
      launch.kill("SIGINT");
      await launch.exited;
    },
  );
});
