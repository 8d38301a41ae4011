/**
 * soak-load.ts: the load of `bun run soak`: event streams that are read, and requests at a steady rate, whatever came of earlier ones.
 *
 * Counts, and knows nothing of what the load is for. Bounded: so many streams, and so many requests under way.
 */

import { reason } from "./errors.ts";

/** What is asked for, in turn. */
const PATHS = [
  "/v1/stats",
  "/metrics",
  "/v1/clients",
  "/v1/config",
  "/v1/contexts",
  "/healthz",
  "/grafana.json",
] as const;
const TICK_ms = 5;
/** Together with the streams below the 256 that Bun has under way at most. */
const UNDER_WAY = 96;
/** A request that is not answered by then has failed. */
const PATIENCE_ms = 30_000;

export class SoakLoad {
  sent = 0;
  answered = 0;
  /** Requests that fell due while too many were under way. */
  unsent = 0;
  /** What went wrong with requests and in opening streams, and how often. */
  readonly errors = new Map<string, number>();
  /** How long each answer took. */
  readonly answers_ms: number[] = [];
  opened = 0;
  /** Streams that ended before they were to, or never opened. */
  lost = 0;
  /** Streams on which nothing came. */
  silent = 0;
  events = 0;
  readonly #url: string;
  readonly #streams: number;
  readonly #rate: number;
  #underWay = new Set<Promise<void>>();
  #running: { timer: ReturnType<typeof setInterval>; streams: Stream[] } | undefined;

  constructor(url: string, { streams, rate }: { streams: number; rate: number }) {
    this.#url = url;
    this.#streams = streams;
    this.#rate = rate;
  }

  /** Opens the streams and begins to send. */
  async start(): Promise<void> {
    const streams = Array.from({ length: this.#streams }, () => new Stream(`${this.#url}/v1/events`));
    const from_ms = performance.now();
    let due = 0;
    const timer = setInterval(() => {
      const now_due = Math.floor(((performance.now() - from_ms) / 1000) * this.#rate);
      for (; due < now_due; due++) {
        if (this.#underWay.size >= UNDER_WAY) this.unsent++;
        else this.#send();
      }
    }, TICK_ms);
    this.#running = { timer, streams };
    await Promise.all(streams.map(({ first }) => first));
  }

  /** Sends nothing more, waits for what is under way, then closes the streams. */
  async stop(): Promise<void> {
    const running = this.#running;
    if (!running) return;
    this.#running = undefined;
    clearInterval(running.timer);
    await Promise.all(this.#underWay);
    for (const stream of running.streams) {
      if (stream.opened) this.opened++;
      if (stream.problem !== undefined) {
        this.lost++;
        this.#failed(`event stream: ${stream.problem}`);
      } else if (stream.events === 0) this.silent++;
      this.events += stream.events;
    }
    await Promise.all(running.streams.map((stream) => stream.close()));
  }

  #send(): void {
    const path = PATHS[this.sent++ % PATHS.length] ?? "/healthz";
    const sent_ms = performance.now();
    const answer = fetch(`${this.#url}${path}`, { signal: AbortSignal.timeout(PATIENCE_ms) })
      .then(async (response) => {
        await response.arrayBuffer();
        if (response.status !== 200) throw new Error(`status ${response.status}`);
        this.answered++;
        this.answers_ms.push(performance.now() - sent_ms);
      })
      .catch((thrown: unknown) => this.#failed(`GET ${path}: ${reason(thrown)}`))
      .finally(() => this.#underWay.delete(answer));
    this.#underWay.add(answer);
  }

  #failed(what: string): void {
    this.errors.set(what, (this.errors.get(what) ?? 0) + 1);
  }
}

/** One reader of /v1/events. */
class Stream {
  opened = false;
  events = 0;
  /** Why it has ended, though nobody closed it. */
  problem: string | undefined;
  /** Settles with its first event, or when there will be none. */
  readonly first: Promise<void>;
  readonly #abort = new AbortController();
  readonly #ended: Promise<void>;

  constructor(url: string) {
    const { promise, resolve } = Promise.withResolvers<void>();
    this.first = promise;
    const timer = setTimeout(() => {
      this.problem ??= `nothing came within ${PATIENCE_ms / 1000} s`;
      resolve();
    }, PATIENCE_ms);
    void promise.then(() => clearTimeout(timer));
    this.#ended = this.#read(url, resolve)
      .catch((thrown: unknown) => {
        if (!this.#abort.signal.aborted) this.problem ??= reason(thrown);
      })
      .finally(resolve);
  }

  async close(): Promise<void> {
    this.#abort.abort();
    await this.#ended;
  }

  async #read(url: string, first: () => void): Promise<void> {
    const response = await fetch(url, { signal: this.#abort.signal });
    if (response.status !== 200 || !response.body) throw new Error(`status ${response.status}`);
    this.opened = true;
    const decoder = new TextDecoder();
    for await (const chunk of response.body) {
      // An event begins with its name on a line of its own; JSON has no line ends in it.
      this.events += decoder.decode(chunk, { stream: true }).match(/^event: /gm)?.length ?? 0;
      if (this.events > 0) first();
    }
    if (!this.#abort.signal.aborted) throw new Error("the server ended it");
  }
}
