/**
 * gpu-hangs.test.ts: what `rigel hangs` tells of programs of PyTorch that hang on real GPUs: a rank that is late, a rank that leaves a
 * collective out, a kernel that does not end; and of one that Rigel holds back. Skipped, with the reason, without PyTorch and a
 * GPU, or two of them where there are ranks.
 *
 * The programs are test/gpu/hangs.py. That a rank is named shows that NCCL's functions, as libtorch_cuda calls them, come through Rigel.
 */

import { expect, test } from "bun:test";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { lacks, memoryOfAll } from "./gpus.ts";
import { Scratch, rigel, root, start } from "./rigel.ts";

const RANKS = 2;
const THRESHOLD_s = 3;
/** After the threshold. */
const FOUND_WITHIN_s = 5;
const START_ms = 45_000;
const LIMIT_ms = 180_000;

const cannot = lacks("gpu-hangs.test.ts", 1, "torch.distributed");
const fewGpus = cannot || lacks("gpu-hangs.test.ts: a job of several ranks", RANKS);

const threadSchema = z.object({
  call: z.string().nullable(),
  seconds: z.number(),
  last: z.object({ operation: z.string(), seconds_ago: z.number() }).nullable(),
});
const foundSchema = z.object({
  name: z.string(),
  rank: z.int().nullable(),
  verdict: z.string(),
  hung: z.boolean(),
  seconds: z.number(),
  why: z.string(),
  thread: threadSchema.nullable(),
  collective: z
    .object({
      operation: z.string(),
      number: z.int(),
      ranks: z.int(),
      missing: z.array(z.object({ rank: z.int(), entered: z.int().nullable() })),
    })
    .nullable(),
  unfinished: z.object({ launches: z.int(), oldest: z.string(), oldest_seconds_ago: z.number() }).nullable(),
});
type Found = z.infer<typeof foundSchema>;
const hangsSchema = z.object({ segments: z.array(z.object({ processes: z.array(foundSchema) })) });

/** A launch of hangs.py, and what `rigel hangs` says of its processes. */
class Patient implements AsyncDisposable {
  readonly #scratch = new Scratch();
  readonly #launch: ReturnType<typeof start>;
  readonly #output: Promise<string>;
  readonly #marker: string;
  /** Only processes that are a rank are of interest. */
  readonly #ranks: boolean;

  /** The first client that is named writes the marker that is waited for. */
  constructor(clients: { what: string; class: "high" | "best-effort"; ranks?: number }[], policy: object) {
    this.#marker = join(this.#scratch.path, clients[0]?.what ?? "");
    this.#ranks = clients.some(({ ranks }) => ranks !== undefined);
    const config = this.#scratch.file("jobs.json", {
      policy,
      sharing: "time-slice",
      hang_s: 0,
      clients: clients.map(({ what, class: kind, ranks }) => ({
        name: nameOf(what),
        class: kind,
        cwd: root,
        env: { OMP_NUM_THREADS: "1" },
        command: [
          "python3",
          ...(ranks === undefined ? [] : ["-m", "torch.distributed.run", "--standalone", `--nproc-per-node=${ranks}`]),
          join(root, "test", "gpu", "hangs.py"),
          what,
          "--marker",
          join(this.#scratch.path, what),
        ],
        device: ranks === undefined ? 0 : Array.from({ length: ranks }, (_, index) => index),
      })),
    });
    this.#launch = start(["launch", config, "--json"]);
    this.#output = Promise.all([this.#launch.stdout.text(), this.#launch.stderr.text()]).then((texts) =>
      texts.join(""),
    );
  }

  /** Looks until the processes are as expected; returns them by rank, with the seconds since the marker was written. */
  async until(expected: (found: Found[]) => boolean): Promise<{ found: Found[]; took_s: number }> {
    const begun_ms = performance.now();
    while (!existsSync(this.#marker)) {
      if (this.#launch.exitCode !== null || performance.now() - begun_ms > START_ms)
        await this.#fail("it did not come");
      await Bun.sleep(50);
    }
    const marked_ms = performance.now();
    for (;;) {
      const { stdout, stderr } = await rigel("hangs", "--json", "--threshold", `${THRESHOLD_s}s`);
      const took_s = (performance.now() - marked_ms) / 1000;
      expect(stdout, stderr).toStartWith("{");
      const found = hangsSchema
        .parse(JSON.parse(stdout))
        .segments.flatMap(({ processes }) => processes)
        .filter(({ name, rank }) => name.endsWith(OWN) && (rank !== null || !this.#ranks))
        .toSorted((a, b) => (a.rank ?? 0) - (b.rank ?? 0) || a.name.localeCompare(b.name));
      if (expected(found)) {
        console.warn(
          `gpu-hangs.test.ts: after ${took_s.toFixed(1)} s:\n${found.map(({ why }) => `  ${why}`).join("\n")}`,
        );
        return { found, took_s };
      }
      if (took_s > 3 * (THRESHOLD_s + FOUND_WITHIN_s)) await this.#fail(JSON.stringify(found, null, 2));
    }
  }

  async #fail(what: string): Promise<never> {
    await this.#end();
    throw new Error(`${what}\n${await this.#output}`);
  }

  async #end(): Promise<void> {
    this.#launch.kill("SIGINT");
    // The second one kills the clients.
    const again = setTimeout(() => this.#launch.kill("SIGINT"), 5000);
    await this.#launch.exited;
    clearTimeout(again);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#end();
    await this.#output;
    this.#scratch[Symbol.dispose]();
  }
}

const OWN = `-${process.pid}`;
function nameOf(what: string): string {
  return `${what}${OWN}`;
}

const verdicts = (found: Found[]): string => found.map(({ verdict }) => verdict).join(" ");
const BLOCKED = /Synchronize|^cuMemcpy/;

test.skipIf(fewGpus)(
  "a rank that sleeps in data loading, under DistributedDataParallel",
  async () => {
    using _ = await memoryOfAll();
    await using patient = new Patient([{ what: "late", class: "high", ranks: RANKS }], { name: "priority" });
    const { found, took_s } = await patient.until((all) => verdicts(all) === "collective behind");
    expect(took_s).toBeLessThan(THRESHOLD_s + FOUND_WITHIN_s);
    const [waiting, late] = found;
    expect(waiting).toMatchObject({ rank: 0, hung: true, collective: { ranks: RANKS, missing: [{ rank: 1 }] } });
    expect(waiting?.thread?.call).toMatch(BLOCKED);
    expect(waiting?.thread?.seconds).toBeGreaterThanOrEqual(THRESHOLD_s);
    expect(waiting?.why).toMatch(/: rank 1 has not entered ncclAllReduce \d+ of a communicator of 2 ranks$/);
    expect(late).toMatchObject({ rank: 1, hung: true });
    expect(late?.thread?.call).toBeNull();
    expect(late?.thread?.last?.operation).toMatch(BLOCKED);
    expect(late?.thread?.last?.seconds_ago).toBeGreaterThanOrEqual(THRESHOLD_s);
    expect(late?.why).toMatch(/^rank 0 waits for it in ncclAllReduce \d+, which it has not entered; it last did cu/);
  },
  LIMIT_ms,
);

test.skipIf(fewGpus)(
  "a rank that leaves an all_reduce out and goes on",
  async () => {
    using _ = await memoryOfAll();
    await using patient = new Patient([{ what: "skip", class: "high", ranks: RANKS }], { name: "priority" });
    const { found, took_s } = await patient.until((all) => verdicts(all) === "collective behind");
    expect(took_s).toBeLessThan(THRESHOLD_s + FOUND_WITHIN_s);
    const [waiting, left] = found;
    expect(waiting?.thread?.call).toMatch(BLOCKED);
    const number = waiting?.collective?.number ?? 0;
    expect(waiting?.collective).toMatchObject({
      operation: "ncclAllReduce",
      ranks: RANKS,
      missing: [{ rank: 1, entered: number - 1 }],
    });
    expect(left).toMatchObject({ rank: 1, hung: true });
    expect(left?.why).toStartWith(
      `rank 0 waits for it in ncclAllReduce ${number}, which it has not entered; it last did `,
    );
    // It works, but not on what the other one waits for.
    expect(left?.thread?.last?.seconds_ago).toBeLessThan(THRESHOLD_s);
  },
  LIMIT_ms,
);

test.skipIf(cannot)(
  "a kernel that does not end",
  async () => {
    await using patient = new Patient([{ what: "spin", class: "high" }], { name: "priority" });
    const { found, took_s } = await patient.until((all) => verdicts(all) === "synchronise");
    expect(took_s).toBeLessThan(THRESHOLD_s + FOUND_WITHIN_s);
    const [spin] = found;
    expect(spin).toMatchObject({ hung: true, unfinished: { launches: 2 } });
    expect(spin?.thread?.call).toMatch(/Synchronize/);
    expect(spin?.unfinished?.oldest).toContain("spin_kernel");
    expect(spin?.unfinished?.oldest_seconds_ago).toBeGreaterThanOrEqual(THRESHOLD_s);
  },
  LIMIT_ms,
);

test.skipIf(cannot)(
  "a best-effort client that is held at the gate does not hang",
  async () => {
    const never = { name: "priority", preempt: false, starvation_us: 600_000_000, min_share: 0 };
    await using patient = new Patient(
      [
        { what: "busy", class: "high" },
        { what: "loop", class: "best-effort" },
      ],
      never,
    );
    // In one wait for longer than what would be a hang.
    const { found } = await patient.until(
      (all) => verdicts(all) === "working gate" && (all[1]?.thread?.seconds ?? 0) > THRESHOLD_s,
    );
    expect(found.map(({ hung }) => hung)).toEqual([false, false]);
    expect(found[1]?.thread?.call).toBe("wait_high");
    expect(found[1]?.why).toBe(`is held at Rigel's gate while ${nameOf("busy")} is busy: no hang`);
  },
  LIMIT_ms,
);
