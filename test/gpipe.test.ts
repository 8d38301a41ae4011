/**
 * gpipe.test.ts: training as in GPipe, four client threads in each rank, that uses cuBLAS handles as users' programs did when they
 * failed (S1 to S5): without the guard, or behind naive interception, it fails in the way that was reported; with `repair` it
 * runs, and has the losses of the right program without Rigel, to the last bit.
 *
 * The program is native/test/gpipe-program.c, on the simulated GPU; gpu-gpipe.test.ts does the same with PyTorch on real ones.
 */

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { beforeAll, describe, expect, test } from "bun:test";
import { z } from "zod";
import { Native, make } from "../src/native.ts";
import { Segment } from "../src/segment.ts";
import { readingOf, statsOf } from "../src/stats.ts";
import { Scratch, plainEnvironment, rigel, root } from "./rigel.ts";

const native = await Native.load();
const build = join(root, "native", "build");
const program = join(build, "gpipe-program");
const interposer = join(build, "naive-preload.so");
beforeAll(() => make(join(root, "native"), "check-build"), 300_000);

const [ITERATIONS, CLIENTS, DEVICES] = [10, 4, 4];
/** Products of one micro-batch, forward and back. */
const PRODUCTS = 8;

type Counts = Partial<Record<"no_context" | "wrong_context" | "repaired", number>>;
interface Way {
  how: string;
  /** What the interposer of the report did (native/test/naive-preload.c); without one the program itself was wrong. */
  naive?: string;
  /** Call, and status of cuBLAS, that the report names. */
  fails: (ranks: number) => readonly [call: string, status: number];
  /** What the guard counts then. */
  counts: (ranks: number) => Counts;
  /** At least so many calls found their handle in use. */
  least?: (ranks: number) => number;
}

const sgemm = (status: number) => () => ["cublasSgemm_v2", status] as const;
const right: Pick<Way, "how" | "counts" | "least"> = { how: "right", counts: () => ({ repaired: 0 }) };
const WAYS: readonly Way[] = [
  { how: "s1", naive: "stream", fails: sgemm(13), counts: right.counts },
  {
    how: "s2",
    // Alone, the rank is on device 1 and device 0 is full; four ranks leave room on device 0, whose handles are of no use on theirs.
    fails: (ranks) => (ranks === 1 ? ["cublasCreate_v2", 3] : ["cublasSgemm_v2", 13]),
    // Each client, and the thread for backward passes.
    counts: (ranks) => ({ no_context: ranks * (CLIENTS + 1), repaired: ranks * (CLIENTS + 1) }),
  },
  { how: "s3", naive: "scheduler", fails: sgemm(13), counts: right.counts },
  { how: "s4", fails: () => ["cublasCreate_v2", 1], counts: right.counts },
  {
    how: "s5a",
    fails: sgemm(13),
    // Every product but those of the rank on device 0, where the handles were made.
    counts: (ranks) => {
      const products = Math.max(1, ranks - 1) * ITERATIONS * CLIENTS * PRODUCTS;
      return { wrong_context: products, repaired: products };
    },
  },
  {
    how: "s5b",
    fails: sgemm(14),
    counts: () => ({ wrong_context: 0 }),
    // The first calls of the clients meet; how many more do is chance.
    least: (ranks) => ranks * (CLIENTS - 1),
  },
];

/**
 * What an interposer did to a right program. One that takes a stream away (S1) is not here: only without it is there anything to be
 * seen of the stream that the program had set.
 */
const INTERCEPTIONS: readonly [naive: string, call: string, status: number][] = [
  ["create", "cublasSgemm_v2", 13],
  ["scheduler", "cublasSgemm_v2", 13],
  ["handle", "cublas\\w+_v2", 14],
];

/** A place to run the program in: a GPU, or several, and a segment. */
class World extends Scratch {
  readonly losses = join(this.path, "losses");
  readonly ranks: number;

  constructor(ranks: number) {
    super();
    this.ranks = ranks;
  }

  command(how: string): string[] {
    return [program, how, String(this.ranks), this.losses];
  }

  async run(how: string, env: Record<string, string>): Promise<{ status: number; stderr: string }> {
    await using child = Bun.spawn(this.command(how), {
      env: {
        ...plainEnvironment(),
        RIGEL_SIM_STATE: join(this.path, "gpu"),
        RIGEL_SIM_DEVICES: String(DEVICES),
        ...env,
      },
      stdout: "ignore",
      stderr: "pipe",
    });
    const [stderr, status] = await Promise.all([child.stderr.text(), child.exited]);
    return { status, stderr };
  }

  /** Under Rigel, which comes after a naive interposer, so that its guard sees what that one does; what its clients did. */
  async runUnder(guard: string, how: string, naive?: string) {
    const segment = Segment.create(native, join(this.path, "segment"));
    segment.configure({ policy: "priority" });
    const result = await this.run(how, {
      LD_PRELOAD: naive === undefined ? native.files.interposer : `${interposer}:${native.files.interposer}`,
      ...(naive !== undefined && { NAIVE: naive }),
      RIGEL_SEGMENT: segment.path,
      RIGEL_CLASS: "best-effort",
      RIGEL_NAME: "gpipe",
      RIGEL_GUARD: guard,
      ...(guard === "off" && { MEET: "1" }),
    });
    return { ...result, clients: new Map(statsOf(readingOf(segment)).clients.map((client) => [client.name, client])) };
  }

  /** Of every rank. */
  results(): string[] {
    return Array.from({ length: this.ranks }, (_, rank) => readFileSync(`${this.losses}.${rank}`, "utf8"));
  }
}

/** The right program's losses, without Rigel. */
async function expected(ranks: number): Promise<string[]> {
  using world = new World(ranks);
  expect(await world.run("right", {})).toEqual({ status: 0, stderr: "" });
  const results = world.results();
  expect(results.map((text) => text.trim().split("\n").length)).toEqual(results.map(() => ITERATIONS));
  expect(new Set(results.flatMap((text) => text.split(/\s/))).size).toBeGreaterThan(ranks * ITERATIONS);
  return results;
}

const PLACES: readonly [string, number][] = [
  ["one rank, on the second of the GPUs", 1],
  ["a rank on each of four GPUs", 4],
];

describe.each(PLACES)("%s", (_place, ranks) => {
  let wanted: string[];
  beforeAll(async () => {
    wanted = await expected(ranks);
  });

  describe.concurrent("handles", () => {
    test.each([right, ...WAYS])("$how: runs with repair, with the same losses", async ({ how, counts, least }) => {
      using world = new World(ranks);
      const { status, stderr, clients } = await world.runUnder("repair", how);
      expect(stderr).toBe("");
      expect(status).toBe(0);
      expect(world.results()).toEqual(wanted);
      expect(clients.get("gpipe")?.guard).toMatchObject({ null_handle: 0, create_failed: 0, ...counts(ranks) });
      expect(clients.get("gpipe")?.guard.in_use_elsewhere).toBeGreaterThanOrEqual(least?.(ranks) ?? 0);
      for (let number = 0; number < CLIENTS; number++) {
        const client = clients.get(`gpipe/stage-${number}`);
        expect(client?.iterations).toBe(ITERATIONS * ranks);
        expect(client?.class).toBe(number % 2 ? "best-effort" : "high");
        // On one handle nobody has set a stream, so that what the shared thread multiplies is nobody's.
        expect(client?.launches).toBe(ITERATIONS * ranks * (how === "s5b" ? 3 : PRODUCTS));
      }
    });

    test.each(WAYS)("$how: fails as reported without that", async ({ how, naive, fails }) => {
      using world = new World(ranks);
      if (naive !== undefined) {
        expect(await world.run(how, {})).toEqual({ status: 0, stderr: "" });
        expect(world.results()).toEqual(wanted);
      }
      const { status, stderr } =
        naive === undefined
          ? await world.runUnder("off", how)
          : await world.run(how, { LD_PRELOAD: interposer, NAIVE: naive });
      const [call, code] = fails(ranks);
      expect(stderr).toMatch(new RegExp(`${call}\\(.*\\) is ${code}, expected 0`));
      expect(status).toBe(1);
    });
  });

  test.concurrent.each(INTERCEPTIONS)(
    "naive %s: fails as reported, and runs with repair",
    async (naive, call, code) => {
      using world = new World(ranks);
      const alone = await world.run("right", { LD_PRELOAD: interposer, NAIVE: naive, MEET: "1" });
      expect(alone.stderr).toMatch(new RegExp(`${call}\\(.*\\) is ${code}, expected 0`));
      expect(alone.status).toBe(1);
      const { status, stderr, clients } = await world.runUnder("repair", "right", naive);
      expect(world.results()).toEqual(wanted);
      // Calls that set something on a handle in use wait; only a multiplication that another thread came before is given a handle.
      expect(clients.get("gpipe")?.guard.repaired).toBeGreaterThanOrEqual(naive === "handle" ? 0 : 1);
      // That scheduler made itself a context on device 0; of this, which is its own, the program complains at its end.
      const complaint = naive === "scheduler" ? /^([^\n]*: active is 1, expected 0\n)+$/ : /^$/;
      expect(stderr).toMatch(complaint);
      expect(status).toBe(naive === "scheduler" ? 1 : 0);
    },
  );

  test("a launch shows what each client did, and what was repaired", async () => {
    using world = new World(ranks);
    const config = world.file("jobs.json", {
      policy: { name: "priority" },
      device: "simulated",
      simulated: { devices: DEVICES },
      clients: [{ name: "gpipe", class: "best-effort", command: world.command("s5a") }],
    });
    const { status, stdout, stderr } = await rigel("launch", config, "--json");
    expect(status, stderr).toBe(0);
    expect(world.results()).toEqual(wanted);
    const { clients } = reportSchema.parse(JSON.parse(stdout));
    const way = WAYS.find(({ how }) => how === "s5a");
    expect(clients[0]?.guard).toMatchObject({ ...way?.counts(ranks) });
    expect(clients[0]?.threads.toSorted((a, b) => a.name.localeCompare(b.name))).toEqual(
      Array.from({ length: CLIENTS }, (_, number) => ({
        name: `stage-${number}`,
        class: number % 2 ? ("best-effort" as const) : ("high" as const),
        launches: ITERATIONS * ranks * PRODUCTS,
        iterations: ITERATIONS * ranks,
        // By their numbers in the report: those that were worked on.
        devices: Array.from({ length: ranks }, (_device, index) => index),
      })),
    );
  });
});

const reportSchema = z.object({
  clients: z.array(
    z.object({
      guard: z.object({ wrong_context: z.number(), repaired: z.number() }),
      threads: z.array(
        z.object({
          name: z.string(),
          class: z.enum(["high", "best-effort"]),
          launches: z.number(),
          iterations: z.number().nullable(),
          devices: z.array(z.number()),
        }),
      ),
    }),
  ),
});
