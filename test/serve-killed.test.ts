/**
 * serve-killed.test.ts: a server that is killed ten times while clients run whose settings it moves: each time it finds them again,
 * nothing that they launched is lost from the counts, and no client waits for it.
 */

import { afterAll, beforeAll, expect, test } from "bun:test";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { Segments } from "../src/discover.ts";
import { Native } from "../src/native.ts";
import type { Segment } from "../src/segment.ts";
import { readingOf, statsOf } from "../src/stats.ts";
import { Place, Server, until } from "./serving.ts";

const KILLS = 10;

let place: Place;
let native: Native;
beforeAll(async () => {
  place = new Place();
  native = await Native.load();
});
afterAll(() => place[Symbol.dispose]());

const answerSchema = z.object({
  clients: z.array(z.object({ name: z.string(), state: z.string(), launches: z.int() })),
});
/** What rigel-replay prints when it has ended: `launches` are its own count. */
const replaySchema = z.object({ iterations: z.int(), launches: z.int() });

/** A replay that goes on until it is told to end; every launch of it is counted by itself too. */
function client(kind: "high" | "best-effort", name: string, ...more: string[]) {
  const options = ["--device", "simulated", "--segment", place.segments, "--class", kind, "--name", name];
  const replay = [native.files.replay, "--profile", join(place.path, "tiny.csv"), "--warmup", "0", ...more];
  return place.start(["run", ...options, "--", ...replay]);
}

test(`a server killed ${KILLS} times loses no count and delays no client`, async () => {
  const segments = new Segments(native, place.segments);
  await using serve = client("high", "serve", "--rate", "50");
  await using train = client("best-effort", "train");
  const names = ["serve", "train"];
  /** Also of those that have ended. */
  const counts = (all: readonly Segment[]): number[] => {
    const clients = all.flatMap((segment) => statsOf(readingOf(segment)).clients);
    return names.map((name) => clients.find((one) => one.name === name)?.launches ?? 0);
  };
  /** The counts, once every one of them is above what it was. */
  const grown = async (before: number[]): Promise<number[]> =>
    await until(() => {
      const now = counts(segments.live());
      return now.every((count, index) => count > (before[index] ?? 0)) ? now : undefined;
    });

  let before = await grown([0, 0]);
  const [shared] = segments.live();
  if (!shared) throw new Error("no segment");
  using _ = endings(shared);
  // The commands go on, and with nobody else left it is the server that runs the control loop of their policy, slo.
  for (const child of [serve, train]) {
    child.kill("SIGKILL");
    await child.exited;
  }
  const found: string[] = [];
  for (let kill = 0; kill < KILLS; kill++) {
    await using server = await Server.start(place);
    // The first answer that it gives.
    const { clients } = answerSchema.parse((await server.ask("/v1/clients")).body);
    for (const [index, name] of names.entries()) {
      const shown = clients.find((one) => one.name === name && one.state === "live");
      if (shown && shown.launches >= (before[index] ?? 0)) found.push(name);
    }
    await until(() => (shared.loop?.holder_pid === server.child.pid ? true : undefined));
    server.child.kill("SIGKILL");
    await server.child.exited;
    // With no server there at all, both go on.
    before = await grown(counts([shared]));
  }
  expect(found).toEqual(Array.from({ length: KILLS }, () => names).flat());

  const ended = [];
  for (const [index, child] of [serve, train].entries()) {
    const slot = shared.slots().find(({ name }) => name === names[index]);
    if (!slot) throw new Error(`${names[index]} is gone`);
    process.kill(slot.pid, "SIGTERM");
    ended.push(replaySchema.parse(JSON.parse(await child.stdout.text())));
  }
  expect(counts([shared])).toEqual(ended.map(({ launches }) => launches));
  // A high client waits for nobody.
  expect(statsOf(readingOf(shared)).clients.find(({ name }) => name === "serve")?.gate).toMatchObject({
    waits: 0,
    inflight_waits: 0,
  });
});

/** Kills, at the end of its scope, whatever runs in a segment. */
function endings(segment: Segment): Disposable {
  return {
    [Symbol.dispose]() {
      for (const { pid, finished } of segment.slots())
        if (!finished && existsSync(`/proc/${pid}`)) process.kill(pid, "SIGKILL");
    },
  };
}
