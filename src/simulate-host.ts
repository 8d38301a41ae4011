/**
 * simulate-host.ts: how fast a real host was from moment to moment, from the requests alone that `rigel bench --live --json` measured there,
 * for `rigel simulate --host`.
 *
 * A host whose processors are shared is faster and slower within a tenth of a second, and most of a PyTorch request is the host's: what a
 * policy can foresee of one depends on that.
 */

import { z } from "zod";
import { requireMeasured, waitSchema } from "./bench-report.ts";
import { ALONE } from "./bench-stats.ts";
import { RigelError } from "./errors.ts";
import { inputName, readJson } from "./json.ts";
import { parse } from "./schema.ts";
import { longMedian } from "./slo-alone.ts";

/** From then on a request takes its program so long, from its first launch until it waits for all it has launched. */
export interface Moment {
  at_ms: number;
  work_ms: number;
}

const benchSchema = z.object({
  // They differ in what is not read here.
  schema: z.literal([1, 2]),
  simulated: z.boolean(),
  measurements: z.array(z.object({ pair: z.string(), way: z.string(), waits: z.array(waitSchema).optional() })),
});

/** What is shorter than this part of most is no request: a program copies input, or reads a result, and waits for that by itself. */
const SHORT = 0.1;
/** So few requests say nothing of a host. */
const LEAST = 100;

/** Windows of requests alone, one after the other; in a file of several pairs those of one high program, the only one there is. */
export async function readHost(path: string): Promise<Moment[]> {
  const file = inputName(path);
  const { simulated, measurements } = parse(benchSchema, await readJson(path), file);
  requireMeasured(file, simulated);
  const alone = measurements.filter(({ way, waits }) => way === ALONE && waits);
  const programs = new Set(alone.map(({ pair }) => pair.split("+")[0]));
  if (programs.size > 1)
    throw new RigelError(
      "config",
      `${file}: measurements: expected one high program, whose requests are compared, got ${[...programs].join(" and ")}`,
    );
  const moments: Moment[] = [];
  let from_ms = 0;
  for (const { waits = [] } of alone) {
    const least_ms = SHORT * longMedian(waits);
    const [first, ...others] = waits
      .flatMap(({ began_ms, worked_ms, waited_ms }) =>
        worked_ms === 0 || worked_ms + waited_ms < least_ms
          ? []
          : [{ began_ms, worked_ms, end_ms: began_ms + worked_ms + waited_ms }],
      )
      .toSorted((a, b) => a.began_ms - b.began_ms);
    if (!first) continue;
    const requests = [first, ...others.filter(({ began_ms }, i) => began_ms > (others[i - 1] ?? first).began_ms)];
    moments.push(
      ...requests.map(({ began_ms, worked_ms }) => ({
        at_ms: from_ms + began_ms - first.began_ms,
        work_ms: worked_ms,
      })),
    );
    from_ms += Math.max(...requests.map(({ end_ms }) => end_ms)) - first.began_ms;
  }
  if (moments.length < LEAST)
    throw new RigelError(
      "config",
      `${file}: measurements: expected ${LEAST} requests alone or more, and how long each worked and waited, as ` +
        `rigel bench --live --json FILE writes it, got ${moments.length}`,
    );
  return moments;
}
