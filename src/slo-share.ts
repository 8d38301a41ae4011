/**
 * slo-share.ts: how often policy `slo` lets best-effort work have its least share, where it is taken off the GPU for requests that follow each other.
 *
 * Pure. Each piece of it delays what a high client has under way by as much as the piece is, and two or three requests next to it by the 0.2 to 0.5 ms of each
 * call that lets best-effort work on and takes it off (docs/measurements.md, "Requests back to back"): at the starvation bound that is 5 ms ten times a
 * second, and more than one in a hundred of such requests. So it comes less often, in larger pieces, of which a 99th percentile tells nothing. Where
 * requests come by themselves, others wait behind the one that is delayed, and where they are few one in a hundred is delayed in any case: there it
 * comes as often as that bound says, in pieces as small as that makes them.
 */

import { pause_ms, type Request, requestsOf, type Wait } from "./slo-delay.ts";
import type { Observation } from "./slo-known.ts";

/** It comes once in so many requests of the client that has the fewest, and once in so long at least. */
const REQUESTS = 500;
const PERIOD_MOST_S = 1;
/** A share of a period is no longer, as it is of a second with 0.05; a piece is that and a share of a high client's slice. */
const PIECE_MOST_S = 0.055;
/** With fewer requests than so many between two pieces it is no use, nor once it is in force with fewer than this part of them: one in a hundred is delayed. */
const FEWEST = 160;
const FEWER = 0.8;
/**
 * Requests follow each other where all but this part of them begin within this part of a request after the one before, or a millisecond; twice as many where
 * it is in force. Of those that come by themselves and keep a client busy for 0.9 of the time one in sixteen begins later (it has nothing to do after
 * one in ten, and then has to wait for an exponential time), of PyTorch's requests in a loop next to none (`waits` of the file of `--json`, docs/measurements.md, "Requests back to back").
 */
const STRAYS = 0.01;
const GAP_PART = 0.5;
const GAP_MS = 1;
/** So many have to be known for that, and for so long; what is old counts half. */
const KNOWN = 50;
const KNOWN_S = 2;
const HALF_LIFE_S = 4;
/** Whoever had none for so long has none now. */
const HEARD_S = 10;
/** As many of a client in a tick that there may have been more (RG_WAITED of native/segment.h, less the one that is being written). */
const ALL_SEEN = 255;
/** What applies where nobody says otherwise: RG_SETTINGS_DEFAULT of native/segment.h. */
const STARVATION_S = 0.1;
const MIN_SHARE = 0.05;
/** Less counts as that much (native/policy.c). */
const MIN_SHARE_LEAST = 0.01;
/** A piece that comes more periods than so many after the one before belongs to a new spell of requests. */
const APART = 1.5;

interface Client {
  last: Request | undefined;
  heard_s: number;
  seconds: number;
  requests: number;
  gaps: number;
  strays: number;
}

/** What is known of high clients' requests, and how often they are to be delayed by a piece of the least share. */
export class LeastShare {
  readonly #clients = new Map<number, Client>();
  /** Of all clients, as they are counted for their latencies: a program that reports its own has several waits in one. */
  #seconds = 0;
  #requests = 0;
  #period_s = 0;
  #starved_s = Number.NEGATIVE_INFINITY;

  /** How often it is to come; 0: as the starvation bound says. */
  get period_s(): number {
    return this.#period_s;
  }

  /** What is known of the requests of other programs. */
  clear(): void {
    this.#clients.clear();
    this.#seconds = this.#requests = this.#period_s = 0;
  }

  /**
   * One tick, at its end; `isOff`: best-effort work is taken off the GPU, in time slices, for requests. Returns for how long it was starved before it was let
   * on in that tick.
   */
  step(seen: Observation, t_s: number, isOff: boolean): number {
    const starved_s = this.#starvedFor_s(seen, t_s);
    const kept = 0.5 ** (seen.elapsed_s / HALF_LIFE_S);
    this.#seconds = kept * this.#seconds + seen.elapsed_s;
    this.#requests = kept * this.#requests + seen.requests.total;
    for (const known of this.#clients.values()) {
      for (const what of ["seconds", "requests", "gaps", "strays"] as const) known[what] *= kept;
      known.seconds += seen.elapsed_s;
    }
    for (const [id, waits] of Map.groupBy(seen.waits ?? [], ({ client }) => client))
      this.#add(id, waits, t_s, seen.elapsed_s);
    for (const [id, { heard_s }] of this.#clients) if (t_s - heard_s > HEARD_S) this.#clients.delete(id);
    this.#period_s = isOff ? this.#wanted_s(seen) : 0;
    return starved_s;
  }

  #starvedFor_s({ starved = 0, starvation_s = STARVATION_S }: Observation, t_s: number): number {
    if (starved === 0) return 0;
    const since_s = t_s - this.#starved_s;
    this.#starved_s = t_s;
    const goesOn = since_s <= APART * this.#period_s;
    return starved * (goesOn ? Math.max(starvation_s, this.#period_s) : starvation_s);
  }

  #add(id: number, waits: readonly Wait[], t_s: number, elapsed_s: number): void {
    let known = this.#clients.get(id);
    if (!known) {
      known = { last: undefined, heard_s: t_s, seconds: elapsed_s, requests: 0, gaps: 0, strays: 0 };
      this.#clients.set(id, known);
    }
    known.heard_s = t_s;
    if (waits.length >= ALL_SEEN) known.last = undefined;
    for (const request of requestsOf(waits, () => undefined)) {
      known.requests++;
      const gap_ms = known.last ? pause_ms(known.last, request) : Number.NaN;
      const long_ms = Math.max(GAP_MS, GAP_PART * (known.last?.took_ms ?? 0));
      known.last = request;
      if (Number.isNaN(gap_ms)) continue;
      known.gaps++;
      known.strays += Number(gap_ms > long_ms);
    }
  }

  #wanted_s({ sharers = 1, min_share = MIN_SHARE, starvation_s = STARVATION_S }: Observation): number {
    const clients = [...this.#clients.values()];
    const inForce = this.#period_s > 0;
    const strays = STRAYS * (inForce ? 2 : 1);
    if (clients.length === 0 || clients.some((of) => of.seconds < KNOWN_S || of.gaps < KNOWN)) return 0;
    if (clients.some((of) => of.strays > strays * of.gaps)) return 0;
    // Each best-effort client has its own.
    const rates = clients.map(({ requests, seconds }) => requests / seconds);
    const per_s = Math.min(...rates, this.#requests / this.#seconds) / Math.max(1, sharers);
    const share = Math.max(MIN_SHARE_LEAST, min_share);
    const most_s = Math.min(PERIOD_MOST_S, (PIECE_MOST_S * (1 - share)) / share);
    if (per_s * most_s < FEWEST * (inForce ? FEWER : 1)) return 0;
    // In tenths of a second, so that it changes seldom.
    const period_s = Math.min(most_s, Math.ceil((10 * REQUESTS) / per_s) / 10);
    return period_s > starvation_s ? period_s : 0;
  }
}
