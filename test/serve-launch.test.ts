/** serve-launch.test.ts: launches that are asked for over HTTP: how they run, are refused, found again and ended. */

import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { appendFileSync, cpSync, existsSync, readFileSync, readdirSync, statSync, watch, writeFileSync } from "node:fs";
import { join } from "node:path";
import { launchDetailSchema } from "../src/launches.ts";
import { living, startedWith } from "../src/proc.ts";
import { Place, Server, until } from "./serving.ts";

let place: Place;
beforeEach(() => {
  place = new Place();
});
afterEach(() => place[Symbol.dispose]());

const folder = (): string => join(place.state, "rigel", "launches");
const mode = (path: string): number => statSync(path).mode & 0o777;

/** The same as `pair`, with paths that only a `cwd` gives a meaning to. */
function relative(rest: object = {}): object {
  const replay = { profile: "tiny.csv" };
  return {
    device: "simulated",
    clients: [
      { name: "serve", class: "high", replay: { ...replay, rate_per_s: 50 } },
      { name: "train", class: "best-effort", replay },
    ],
    ...rest,
  };
}

async function started(server: Server, body: object) {
  const answer = await server.ask("/v1/launch", { method: "POST", body });
  expect(answer, answer.text).toMatchObject({ status: 201 });
  return launchDetailSchema.parse(answer.body);
}

async function shown(server: Server, id: string) {
  return launchDetailSchema.parse((await server.ask(`/v1/launches/${id}`)).body);
}

const stop = async (server: Server, id: string) => await server.ask(`/v1/launches/${id}`, { method: "DELETE" });

async function over(server: Server, id: string) {
  return await until(async () => {
    const launch = await shown(server, id);
    return launch.state === "running" ? undefined : launch;
  });
}

/** Clients of this launcher that are there. */
const clientsOf = (pid: number | null) =>
  living().filter((one) => startedWith(one.pid, [`RIGEL_LAUNCH=rigel-${process.getuid?.()}-${pid}-0`]));

describe("a launch over HTTP", () => {
  test("runs as `rigel launch` does, with its files in a folder of this user's alone, and leaves its report", async () => {
    await using server = await Server.start(place);
    expect((await server.ask("/v1/launches")).body).toEqual({ launches: [] });
    expect(existsSync(folder())).toBe(false);
    const begun = await started(server, relative({ duration_s: 0.5, cwd: place.path }));
    expect(begun).toMatchObject({ state: "running", report: null, stops: 0, exit_status: null, cwd: place.path });
    const ended = await over(server, begun.id);
    expect(ended, ended.stderr.join("\n")).toMatchObject({
      state: "ended",
      pid: begun.pid,
      exit_status: 0,
      report: {
        schema: 1,
        device: { simulated: true },
        clients: [
          { name: "serve", attached: true },
          { name: "train", attached: true },
        ],
      },
    });
    expect(ended.stderr[0]).toStartWith("rigel: NVIDIA H200 (simulated)");
    const { report: _, stderr: __, ...listed } = ended;
    expect((await server.ask("/v1/launches")).body).toEqual({ launches: [listed] });
    expect(mode(folder())).toBe(0o700);
    expect(mode(ended.folder)).toBe(0o700);
    expect(Object.fromEntries(readdirSync(ended.folder).map((name) => [name, mode(join(ended.folder, name))]))).toEqual(
      { "config.json": 0o600, "launch.json": 0o600, "log.txt": 0o600, "report.json": 0o600, status: 0o600 },
    );
    // To end what has ended changes nothing.
    expect(await stop(server, begun.id)).toMatchObject({ status: 200, body: { state: "ended", stops: 0 } });
    expect(await server.ask("/v1/launches/../x")).toMatchObject({ status: 404 });
    expect(await stop(server, "20260101T000000-00000000")).toMatchObject({
      status: 404,
      body: { error: { code: "no_launch" } },
    });
    expect((await server.ask("/openapi/json")).body).toMatchObject({
      paths: {
        "/v1/launch": {
          post: {
            requestBody: {
              content: { "application/json": { schema: { properties: { clients: { type: "array" }, cwd: {} } } } },
            },
            responses: { 201: {} },
          },
        },
        "/v1/launches": { get: {} },
        "/v1/launches/{id}": { get: {}, delete: {} },
      },
    });
  });

  test("is refused field by field, or for want of the token, and then nothing is started", async () => {
    await using server = await Server.start(place);
    const client = { name: "a", class: "high", command: ["sleep", "60"] };
    const refused = async (body: unknown, ...issues: [string, string][]) => {
      const answer = await server.ask("/v1/launch", { method: "POST", body });
      expect(answer, answer.text).toMatchObject({
        status: 422,
        body: {
          error: {
            code: "invalid",
            issues: issues.map(([path, message]) => ({ path, message: expect.stringContaining(message) })),
          },
        },
      });
    };
    await refused(
      { clients: [{ ...client, class: "low", nme: 1 }], duration_s: -1 },
      ["duration_s", "expected a number above 0, got -1"],
      ["clients[0].class", 'expected one of "high", "best-effort", got "low"'],
      ["clients[0].nme", "unknown field; expected one of name"],
    );
    await refused([], ["", "expected an object, got []"]);
    await refused({ cwd: "here", clients: [client] }, ["cwd", 'the absolute path of a folder, got "here"']);
    await refused({ cwd: "/nowhere", clients: [client] }, ["cwd", "expected a folder that exists, got /nowhere"]);
    await refused(
      relative(),
      ["clients[0].replay.profile", 'expected an absolute path, as no "cwd" is given, got tiny.csv'],
      ["clients[1].replay.profile", "got tiny.csv"],
    );
    await refused({ clients: [{ ...client, command: ["./a"] }] }, ["clients[0].command[0]", "got ./a"]);
    await refused({ clients: [{ ...client, command: ["no-such-program"] }] }, [
      "clients[0].command[0]",
      "no-such-program is not found",
    ]);
    await refused({ clients: [{ arch: "gpt", kernel_file: "k.csv" }] }, ["clients[0].kernel_file", "got k.csv"]);
    await refused(`${"[".repeat(5000)}${"]".repeat(5000)}`, ["", "nested at most"]);
    expect(await server.ask("/v1/launch", { method: "POST", body: '{\n  "clients": [}' })).toMatchObject({
      status: 400,
      // As `rigel launch` says it of a file.
      body: {
        error: { code: "not_json", message: expect.stringMatching(/^body:2:15: not valid JSON: expected a value/) },
      },
    });
    const twice = JSON.stringify(relative({ cwd: place.path })).replace("{", '{"clients": [], ');
    expect(await server.ask("/v1/launch", { method: "POST", body: twice })).toMatchObject({
      status: 400,
      body: { error: { message: expect.stringContaining('expected each field once, got "clients" again') } },
    });
    const others: Record<string, Record<string, string>> = {
      no_token: {},
      wrong_token: { authorization: `Bearer ${server.token}x` },
    };
    for (const [code, headers] of Object.entries(others))
      for (const [method, path] of [
        ["POST", "/v1/launch"],
        ["GET", "/v1/launches"],
        ["GET", "/v1/launches/20260101T000000-00000000"],
        ["DELETE", "/v1/launches/20260101T000000-00000000"],
      ] as const) {
        const body = method === "POST" ? { body: relative({ cwd: place.path }) } : {};
        expect(await server.ask(path, { method, headers, ...body })).toMatchObject({
          status: 401,
          body: { error: { code } },
        });
      }
    expect((await server.ask("/v1/launches")).body).toEqual({ launches: [] });
    expect(existsSync(folder())).toBe(false);
  });

  test("goes on when the server is killed; the next one lists it and ends it, clients and all", async () => {
    const first = await Server.start(place);
    const { id, pid } = await started(first, relative({ cwd: place.path }));
    await until(async () => ((await first.ask("/v1/clients/train")).status === 200 ? true : undefined));
    first.child.kill("SIGKILL");
    await first.child.exited;
    await using server = await Server.start(place);
    expect((await server.ask("/v1/launches")).body).toMatchObject({ launches: [{ id, pid, state: "running" }] });
    // Killed before it could write down which process it had started.
    const record = join(folder(), id, "launch.json");
    const written = JSON.parse(readFileSync(record, "utf8"));
    writeFileSync(record, JSON.stringify({ ...written, pid: null, started_ticks: null }));
    expect(await shown(server, id)).toMatchObject({ pid, state: "running" });
    expect(clientsOf(pid).length).toBeGreaterThan(0);
    expect(await stop(server, id)).toMatchObject({ status: 202, body: { id, stops: 1 } });
    const ended = await over(server, id);
    expect(ended, ended.stderr.join("\n")).toMatchObject({
      state: "ended",
      // Written down by the launch itself: this server is not its parent.
      exit_status: 130,
      report: {
        clients: [
          { name: "serve", stopped: true },
          { name: "train", stopped: true },
        ],
      },
    });
    expect(clientsOf(pid)).toEqual([]);
    expect(ended.stderr.join("\n")).toContain("SIGINT: stopping the clients");
    // A number that is another process's by now is nobody's launch.
    writeFileSync(record, JSON.stringify({ ...written, pid: process.pid, stops: 0 }));
    expect(await stop(server, id)).toMatchObject({ status: 200, body: { state: "ended", stops: 0 } });
  });

  test("leaves nothing behind where the server was killed while it looked for its GPU", async () => {
    const left = await until(async () => {
      await using server = await Server.start(place);
      // The first file is that of the simulated GPU which the server looks at.
      const watcher = watch(place.segments, () => void server.child.kill("SIGKILL"));
      await server
        .ask("/v1/launch", { method: "POST", body: relative({ cwd: place.path, duration_s: 0.1 }) })
        .catch(() => undefined);
      await server.child.exited;
      watcher.close();
      const [file, ...more] = readdirSync(place.segments);
      return more.length === 0 ? file : undefined;
    });
    const next = place.file("next.json", relative({ duration_s: 0.1 }));
    const { status, stderr } = await place.rigel("launch", next, "--segment", place.segments);
    expect(status, stderr).toBe(0);
    expect(readdirSync(place.segments), left).toEqual([]);
  });

  test("is ended harder when asked again, and one that leaves no report has failed", async () => {
    await using server = await Server.start(place);
    const deaf = {
      name: "deaf",
      class: "high",
      command: ["sh", "-c", "trap '' INT TERM; echo deaf; while :; do sleep 0.1; done"],
    };
    // It is ended harder by itself after 5 s: where it was asked again no sooner, as on a busy machine, it is tried again.
    for (let inTime = false; !inTime;) {
      const begun = await started(server, { device: "simulated", clients: [deaf] });
      const says = (text: string) =>
        until(async () => (await shown(server, begun.id)).stderr.some((line) => line.includes(text)) || undefined);
      await says("deaf | deaf");
      const asked_ms = performance.now();
      await stop(server, begun.id);
      await says("SIGINT: stopping");
      await Bun.sleep(300);
      const again = await stop(server, begun.id);
      inTime = performance.now() - asked_ms < 4500;
      const ended = await over(server, begun.id);
      expect(ended).toMatchObject({ state: "ended", exit_status: 130, report: { clients: [{ name: "deaf" }] } });
      expect(clientsOf(begun.pid)).toEqual([]);
      if (!inTime) continue;
      expect(again).toMatchObject({ body: { stops: 2 } });
      expect(ended.stderr.join("\n")).toContain("killing the clients");
      expect(ended.stops).toBe(2);
    }

    const other = { name: "other", class: "high", command: ["sh", "-c", "echo up; exec sleep 600"] };
    const lost = await started(server, { device: "simulated", clients: [other] });
    await until(async () => ((await shown(server, lost.id)).stderr.includes("other | up") ? true : undefined));
    process.kill(lost.pid ?? 0, "SIGKILL");
    expect(await over(server, lost.id)).toMatchObject({ state: "failed", exit_status: 137, report: null });
    // The launcher's guard sees to its clients.
    await until(() => (clientsOf(lost.pid).length === 0 ? true : undefined));
  });

  test("whose log ends in a very long line shows the end of that", async () => {
    await using server = await Server.start(place);
    const begun = await started(server, relative({ duration_s: 0.1, cwd: place.path }));
    const ended = await over(server, begun.id);
    const log = join(ended.folder, "log.txt");
    // The 64 KiB that are read begin within a letter.
    appendFileSync(log, `${"é".repeat(50_000)}the end\n\n`);
    expect((await shown(server, begun.id)).stderr).toEqual([`…${"é".repeat(32_763)}the end`]);
    appendFileSync(log, "last\n");
    expect((await shown(server, begun.id)).stderr).toEqual([expect.stringMatching(/^…é+the end$/), "last"]);
    appendFileSync(log, "\n".repeat(70_000));
    expect((await shown(server, begun.id)).stderr).toEqual([]);
  });

  test("of those that have ended the last 50 are kept", async () => {
    await using server = await Server.start(place);
    const short = relative({ duration_s: 0.1, cwd: place.path });
    const { id } = await started(server, short);
    await over(server, id);
    for (let index = 0; index < 60; index++) {
      const old = `20200101T000000-${index.toString(16).padStart(8, "0")}`;
      const path = join(folder(), old);
      cpSync(join(folder(), id), path, { recursive: true });
      const record = JSON.parse(readFileSync(join(path, "launch.json"), "utf8"));
      writeFileSync(join(path, "launch.json"), JSON.stringify({ ...record, id: old }));
    }
    const next = await started(server, short);
    const kept = readdirSync(folder()).toSorted().toReversed();
    expect(kept).toHaveLength(50);
    expect(kept.slice(0, 2).toSorted()).toEqual([id, next.id].toSorted());
    expect(kept[2]).toBe("20200101T000000-0000003b");
    await over(server, next.id);
  });
});
