/**
 * rigel.ts: what the tests share: running the command line, scratch folders, small profiles and configurations.
 *
 * Tests go through the command line wherever they can. Nothing here waits for a clock.
 */

import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { expect } from "bun:test";
import { z } from "zod";
import { POLICIES } from "../src/config.ts";
import { Native } from "../src/native.ts";
import { commandLine } from "../src/self.ts";

export const root = resolve(import.meta.dir, "..");

export interface Result {
  status: number;
  stdout: string;
  stderr: string;
}

/** What Rigel keeps from one launch to the next goes here, not to the user's own; setup.ts removes it. */
export const cache = join(tmpdir(), `rigel-test-cache-${process.pid}`);

/** An environment without anything of Rigel's or a terminal's. */
export function plainEnvironment(): Record<string, string | undefined> {
  const kept = Object.entries(process.env).filter(([name]) => !/^(RIGEL_|LD_PRELOAD$|FORCE_COLOR$)/.test(name));
  return { ...Object.fromEntries(kept), NO_COLOR: "1", XDG_CACHE_HOME: cache };
}

/** Starts `rigel` with these arguments; standard output and error are pipes. */
export function start(args: string[], options: { cwd?: string; env?: Record<string, string | undefined> } = {}) {
  return Bun.spawn([...commandLine(), ...args], {
    cwd: options.cwd ?? root,
    env: { ...plainEnvironment(), ...options.env },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
}

/** Runs `rigel` to its end. */
export async function rigel(...args: string[]): Promise<Result> {
  await using child = start(args);
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { status, stdout, stderr };
}

/** The same where no file can become longer than 4 KiB: a write that begins well, and then fails. */
export async function cramped(...args: string[]): Promise<Result> {
  return after("ulimit -f 8", root, args);
}

/** The same in a folder, by a shell that has done something before. */
export async function after(first: string, folder: string, args: readonly string[]): Promise<Result> {
  await using child = Bun.spawn(["sh", "-c", `${first} && exec "$@"`, "sh", ...commandLine(), ...args], {
    cwd: folder,
    env: plainEnvironment(),
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { status, stdout, stderr };
}

/** A folder that is removed at the end of its scope. */
export class Scratch implements Disposable {
  readonly path = mkdtempSync(join(tmpdir(), "rigel-test-"));

  /** Writes a file and returns its path. */
  file(name: string, content: string | object): string {
    const path = join(this.path, name);
    writeFileSync(path, typeof content === "string" ? content : JSON.stringify(content));
    return path;
  }

  [Symbol.dispose](): void {
    rmSync(this.path, { recursive: true, force: true });
  }
}

/**
 * Why the replay client refuses a profile; undefined: it takes it. It reads one before it looks for the driver, and then finds none,
 * whatever this machine has: the file of that name in `scratch` is empty.
 */
export async function replayRefuses(scratch: Scratch, profile: string): Promise<string | undefined> {
  scratch.file("libcuda.so.1", "");
  const { files } = await Native.load();
  await using child = Bun.spawn([files.replay, "--profile", profile, "--iterations", "1"], {
    env: { ...plainEnvironment(), LD_LIBRARY_PATH: scratch.path },
    stdin: "ignore",
    stdout: "ignore",
    stderr: "pipe",
  });
  const [stderr, status] = await Promise.all([child.stderr.text(), child.exited]);
  if (status === 2) return stderr;
  expect({ status, stderr }).toEqual({ status: 1, stderr: expect.stringContaining("libcuda.so.1: file too short") });
  return undefined;
}

/** One kernel of 132 blocks and 0.2 ms, then a wait for it. */
export const TINY_PROFILE = `# rigel-profile 1; device=NVIDIA H200
name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns
"void gemm<float, 4>(int, ""x"")",kernel,7,132,1,1,256,1,1,32,0,0,200000,1000
wait,sync,7,0,0,0,0,0,0,0,0,0,0,1000
`;

const requestsSchema = z.object({
  count: z.number(),
  p50_ms: z.number().nullable(),
  p95_ms: z.number().nullable(),
  p99_ms: z.number().nullable(),
});

const clientSchema = z.object({
  name: z.string(),
  class: z.enum(["high", "best-effort"]),
  exit_code: z.number().nullable(),
  attached: z.boolean(),
  attach_problem: z.string().nullable(),
  stopped: z.boolean(),
  mps: z.boolean(),
  counted_s: z.number(),
  launches: z.number(),
  requests: requestsSchema,
  iterations: z.number().nullable(),
  iterations_per_s: z.number().nullable(),
  durations: z.object({ seeded: z.number(), samples: z.number() }),
  gate: z.object({
    waits: z.number(),
    wait_ms: z.number(),
    starved: z.number(),
    shared: z.number(),
    unprofiled: z.number(),
    graph_pieces: z.number(),
  }),
  preemption: z.object({
    state: z.string(),
    suspensions: z.number(),
    stays: z.number(),
    ahead: z.number(),
    foreseen: z.number(),
  }),
  charged_ms: z.number(),
  memory: z.object({
    limit_bytes: z.number().nullable(),
    used_bytes: z.number(),
    peak_bytes: z.number(),
    denied: z.number(),
  }),
  versus_alone: z
    .object({ p50: z.number().nullable(), p99: z.number().nullable(), share: z.number().nullable() })
    .optional(),
});

/** The public document of a launch: what the issue names, and what tests read besides. */
const reportSchema = z.object({
  schema: z.literal(1),
  device: z.object({ name: z.string(), uuid: z.string(), simulated: z.boolean() }),
  policy: z.object({ name: z.enum(POLICIES), inflight: z.number() }),
  sharing: z.object({
    mode: z.enum(["mps", "time-slice"]),
    daemon: z.enum(["private", "adopted"]).nullable(),
    pipe_directory: z.string().nullable(),
  }),
  duration_s: z.number(),
  clients: z.array(clientSchema),
  compare: z.array(z.object({ mode: z.enum(["alone", "ungoverned", "governed"]), clients: z.array(clientSchema) })),
  notes: z.array(z.string()),
});

/** Errors without line and column of the fields of JSON files in them: json.test.ts and config.test.ts have those. */
export function withoutPlaces(text: string): string {
  return text.replaceAll(/(\.json):\d+:\d+: /g, "$1: ");
}

/** Parses the report on standard output; it must be the only thing there. */
export function reportOf(result: Result): z.infer<typeof reportSchema> {
  expect(result.stdout, result.stderr).toStartWith("{");
  return reportSchema.parse(JSON.parse(result.stdout));
}
