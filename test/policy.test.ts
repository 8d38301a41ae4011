/**
 * policy.test.ts: what policies do to real processes on the simulated GPU. The rules themselves, worked out by hand, are in
 * native/test/test-policy.c, and in virtual time in native/test/test-scenario.c.
 *
 * Only counts of clients that run at the same time are compared, with room for a loaded machine: what is expected is far
 * from what comes out without the policy. Where the machine does not let each of them run in time the GPU is anybody's, so a launch is
 * repeated until that is what comes out; without the policy it never does.
 */

import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { Scratch, reportOf, rigel } from "./rigel.ts";
import { until } from "./serving.ts";

const RIGEL = `# rigel-profile 1; device=NVIDIA H200
name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns
`;
/** A kernel of 0.2 ms on all SMs, much shorter than a time slice, again and again, waited for by nobody. */
const RESTLESS = `${RIGEL}"gemm",kernel,0,1056,1,1,256,1,1,32,0,0,200000,0\n`;

/** Enough in flight, and enough of a lead, for clients that a loaded machine lets run every few milliseconds. */
const UNHURRIED = { inflight: 64, quantum_us: 10_000 };

setDefaultTimeout(300_000);

let scratch: Scratch;
beforeAll(() => {
  scratch = new Scratch();
  scratch.file("restless.csv", RESTLESS);
  scratch.file("compute.csv", "Name,Profile,Memory_footprint,SM_usage,Duration\ngemm,1,0,60,200000\n");
  scratch.file("memory.csv", "Name,Profile,Memory_footprint,SM_usage,Duration\nrelu,0,0,60,20000\n");
});
afterAll(() => scratch[Symbol.dispose]());

let configs = 0;

/** Runs clients for a while; their reports. */
async function together(policy: object, clients: object[], rest: object = {}) {
  const config = { device: "simulated", duration_s: 2.5, warmup_s: 0.5, policy, clients, ...rest };
  const result = await rigel("launch", scratch.file(`config-${configs++}.json`, config), "--json");
  const { clients: reports } = reportOf(result);
  expect(result.status, result.stderr).toBe(0);
  return reports;
}

function replaying(name: string, kind: "high" | "best-effort", profile: string, rest: object = {}): object {
  return { name, class: kind, replay: { profile }, ...rest };
}

describe("fair", () => {
  test("four equal clients, one of class high, get the same", async () => {
    const clients = await until(async () => {
      const ran = await together({ name: "fair", ...UNHURRIED }, [
        replaying("a", "high", "restless.csv"),
        ...["b", "c", "d"].map((name) => replaying(name, "best-effort", "restless.csv")),
      ]);
      const iterations = ran.map((client) => client.iterations ?? 0);
      const mean = iterations.reduce((sum, count) => sum + count) / 4;
      return mean > 10 && iterations.every((count) => count > 0.6 * mean && count < 1.6 * mean) ? ran : undefined;
    });
    for (const client of clients) expect(client.charged_ms).toBeGreaterThan(0);
  });

  test("weights of 1, 2 and 4 are followed", async () => {
    await until(async () => {
      const clients = await together({ name: "fair", ...UNHURRIED }, [
        replaying("a", "high", "restless.csv", { weight: 1 }),
        replaying("b", "best-effort", "restless.csv", { weight: 2 }),
        replaying("c", "best-effort", "restless.csv", { weight: 4 }),
      ]);
      const [one = 0, two = 0, four = 0] = clients.map(({ iterations }) => iterations ?? 0);
      // 2 and 4, and 1 without weights.
      const [second, third] = [two / one, four / one];
      return (one > 10 && second > 1.25 && second < 2.8 && third > 1.6 && third < 5.6) || undefined;
    });
  });
});

/**
 * What best-effort work does in the shadow of a high client that never rests, against what that one does; and what of it was let out
 * while that one was busy. On a loaded machine it may rest after all, as it is not let run, and then the GPU is anybody's.
 */
async function shadowed(policy: object) {
  const clients = [replaying("a", "high", "restless.csv"), replaying("b", "best-effort", "restless.csv")];
  const [high, low] = await together(policy, clients);
  const of = (count: number | null | undefined): number => (count ?? 0) / (high?.iterations ?? 1);
  return { part: of(low?.iterations), shared: of(low?.gate.shared), starved: of(low?.gate.starved) };
}

describe("a high client that never rests", () => {
  test.each(["priority", "slo"])("leaves others min_share of the GPU's time under %s", async (name) => {
    await until(async () => {
      const { part, shared } = await shadowed({ name, min_share: 0.3, inflight: 256, preempt: false });
      return (part > 0.15 && shared < 1.5) || undefined;
    });
  });

  // It is idle for an instant after each of its kernels, as training is that reads its loss after each step.
  test.each([true, false])(
    "leaves others min_share of the GPU's time that take turns with it (suspend: %p)",
    async (suspend) => {
      await until(async () => {
        const { part, starved } = await shadowed({ name: "priority", min_share: 0.3, suspend });
        return (part > 0.05 && starved > 0) || undefined;
      });
    },
  );

  test("leaves others a launch for each starvation period without it", async () => {
    await until(async () => {
      const { part, shared, starved } = await shadowed({
        name: "priority",
        min_share: 0,
        inflight: 1,
        preempt: false,
      });
      expect(shared).toBe(0);
      return (part > 0 && starved < 0.1) || undefined;
    });
  });
});

describe("orion", () => {
  test("lets out kernels that are bound by something else, and fit", async () => {
    const high = replaying("a", "high", "compute.csv");
    const low = replaying("b", "best-effort", "memory.csv");
    const policy = { name: "orion", dur_threshold: 1 };
    const rest = { simulated: { mps: true } };
    /** For each iteration of the other, which has the same time for it. */
    const part = async (more: object) => {
      const [other, own] = await together({ ...policy, ...more }, [high, low], rest);
      expect(own?.gate.unprofiled).toBe(0);
      return (own?.iterations ?? 0) / (other?.iterations ?? 1);
    };
    await until(async () => {
      const beside = await part({});
      const tooWide = await part({ sm_threshold: 60 });
      return (tooWide > 0 && beside > 3 * tooWide) || undefined;
    });
  });
});
