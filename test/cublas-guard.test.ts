/**
 * cublas-guard.test.ts: a launch says which cuBLAS calls the guard found wrong, and its configuration decides what is done.
 *
 * The client is native/test/cublas-program.c's s5b: two threads on one handle at once, which the stand-in cuBLAS refuses.
 */

import { beforeAll, expect, test } from "bun:test";
import { join } from "node:path";
import { z } from "zod";
import { processContextsSchema } from "../src/contexts.ts";
import { make } from "../src/native.ts";
import { Scratch, rigel, root, start } from "./rigel.ts";
import { until } from "./serving.ts";

const build = join(root, "native", "build");

beforeAll(() => make(join(root, "native"), "build/cublas-program"), 300_000);

const schema = z.object({
  clients: z.tuple([
    z.object({
      exit_code: z.number(),
      guard: z.object({
        mode: z.string(),
        null_handle: z.number(),
        in_use_elsewhere: z.number(),
        repaired: z.number(),
        events: z.array(
          z.object({
            cause: z.string(),
            call: z.string(),
            thread: z.number(),
            device: z.number(),
            context: z.string(),
            call_index: z.number(),
            times: z.number(),
          }),
        ),
      }),
    }),
  ]),
});

async function launched(guard: string | undefined, ...args: string[]) {
  using scratch = new Scratch();
  const command = [join(build, "cublas-program"), "s5b"];
  const config = scratch.file("jobs.json", {
    ...(guard !== undefined && { guard }),
    device: "simulated",
    clients: [{ name: "shared", class: "high", command }],
  });
  return await rigel("launch", config, ...args);
}

const EVENT = {
  cause: "in_use_elsewhere",
  call: "cublasSgemm_v2",
  thread: expect.any(Number),
  device: 0,
  context: expect.stringMatching(/^0x[\da-f]+$/),
  call_index: 2,
  times: 1,
};

test.each([
  [undefined, { exit_code: 0, mode: "repair", counted: 1, repaired: 1 }],
  ["repair", { exit_code: 0, mode: "repair", counted: 1, repaired: 1 }],
  ["warn", { exit_code: 1, mode: "warn", counted: 1, repaired: 0 }],
  ["off", { exit_code: 1, mode: "off", counted: 0, repaired: 0 }],
])("guard: %s", async (guard, { exit_code, mode, counted, repaired }) => {
  const result = await launched(guard, "--json");
  const [client] = schema.parse(JSON.parse(result.stdout)).clients;
  expect(client).toEqual({
    exit_code,
    guard: {
      mode,
      null_handle: 0,
      in_use_elsewhere: counted,
      repaired,
      events: counted > 0 ? [EVENT] : [],
    },
  });
  expect(result.status).toBe(exit_code);
});

test("people are told only where something happened", async () => {
  const repaired = await launched("repair");
  expect(repaired.stdout).toMatch(
    /^guard: shared: in_use_elsewhere 1 \(1 repaired\)\nguard: shared: last in_use_elsewhere: cublasSgemm_v2, thread \d+, device 0, context 0x[\da-f]+$/m,
  );
  const off = await launched("off");
  expect(off.stdout).not.toContain("guard:");
});

const contextsSchema = z.object({ processes: z.array(processContextsSchema) });

function firstProcess(contexts: string) {
  return contextsSchema.safeParse(JSON.parse(contexts || "{}")).data?.processes[0];
}

test("rigel contexts says which cuBLAS handles were used in a wrong context, and where (S22)", async () => {
  using scratch = new Scratch();
  const config = scratch.file("jobs.json", {
    device: "simulated",
    simulated: { devices: 2 },
    clients: [
      { name: "mixed", class: "high", command: ["sh", "-c", `${join(build, "cublas-program")} s5a; exec sleep 600`] },
    ],
  });
  await using launch = start(["launch", config, "--segment", scratch.path]);
  const look = async (...flags: string[]) => await rigel("contexts", "mixed", "--segment", scratch.path, ...flags);
  const found = await until(async () => {
    const seen = firstProcess((await look("--json")).stdout);
    return seen && seen.cublas.repaired > 0 && seen.cublas.last.length > 0 ? seen : undefined;
  });
  const text = await look();
  launch.kill("SIGINT");
  await launch.exited;
  // The matrices' context was current, and is the one that was worked in; the handle was the other device's.
  expect(found.cublas).toMatchObject({
    calls: { wrong_context: 1 },
    repaired: 1,
    last: [{ cause: "wrong_context", call: "cublasSgemm_v2", device: 1, context: found.contexts[0]?.context }],
  });
  expect(text.stdout).toMatch(
    /wrong_context 1 wrong, 1 repaired\n    wrong_context: cublasSgemm_v2, thread \d+, device 1, context 0x/,
  );
});

test("a mode that there is not is refused", async () => {
  const { status, stderr } = await launched("sometimes");
  expect(stderr).toMatch(/guard: expected .*"off".*"warn".*"repair"/);
  expect(status).not.toBe(0);
});

test("a handle that the client's memory limit forbids is explained by that limit", async () => {
  using scratch = new Scratch();
  const command = [join(build, "cublas-program"), "s4"];
  const config = scratch.file("jobs.json", {
    device: "simulated",
    clients: [{ name: "capped", class: "high", command, memory: "200MiB" }],
  });
  const { status, stderr } = await rigel("launch", config);
  expect(stderr).toMatch(
    /cublasCreate failed with status 3 \(out of memory\) on device 0: \d+ of \d+ MiB free; this client has reached its limit of 200 MiB \(192 in use\)/,
  );
  expect(stderr).toContain("this process 192 MiB (handles: 3); not tried again");
  expect(stderr).toContain("raise the client's memory, or make one handle per thread");
  expect(status).toBe(1);
});
