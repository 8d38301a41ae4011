/**
 * serving.ts: what the tests of `rigel serve` share: a server of its own in a scratch folder, and waiting for a condition.
 */

import { mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { make } from "../src/native.ts";
import { commandOf, living } from "../src/proc.ts";
import { Scratch, TINY_PROFILE, plainEnvironment, root, start } from "./rigel.ts";

const addressSchema = z.object({ socket: z.string(), url: z.string(), token_file: z.string() });

/** Polls until a condition gives something. */
export async function until<T>(condition: () => T | undefined | Promise<T | undefined>): Promise<T> {
  for (;;) {
    const found = await condition();
    if (found !== undefined) return found;
    await Bun.sleep(20);
  }
}

/** A folder with a profile, and an environment in which everything that Rigel keeps while it runs lies in it. */
export class Place extends Scratch {
  readonly env: Record<string, string | undefined>;
  readonly segments: string;
  readonly state: string;

  constructor() {
    super();
    this.file("tiny.csv", TINY_PROFILE);
    mkdirSync(join(this.path, "run"), { mode: 0o700 });
    this.segments = join(this.path, "segments");
    mkdirSync(this.segments);
    this.state = join(this.path, "state");
    this.env = { ...plainEnvironment(), XDG_RUNTIME_DIR: join(this.path, "run"), XDG_STATE_HOME: this.state };
  }

  /** `rigel` as a child that ends with its scope. */
  start(args: string[]) {
    return start(args, { cwd: this.path, env: this.env });
  }

  /** Runs `rigel` to its end. */
  async rigel(...args: string[]): Promise<{ status: number; stdout: string; stderr: string }> {
    await using child = this.start(args);
    const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    return { status, stdout, stderr };
  }

  /** With launches that were asked for over HTTP, which end with nobody: their guards see to their clients. */
  override [Symbol.dispose](): void {
    for (const { pid } of living().filter((one) => commandOf(one.pid).includes(` launch ${this.state}/`)))
      try {
        process.kill(pid, "SIGKILL");
      } catch {
        // It has just ended.
      }
    super[Symbol.dispose]();
  }

  /** A configuration on the simulated GPU with a client of each class that go on until they are ended. */
  pair(rest: object = {}): object {
    return {
      device: "simulated",
      clients: [
        { name: "serve", class: "high", replay: { profile: join(this.path, "tiny.csv"), rate_per_s: 50 } },
        { name: "train", class: "best-effort", replay: { profile: join(this.path, "tiny.csv") } },
      ],
      ...rest,
    };
  }
}

/** A configuration of one client whose kernel never ends, on the simulated GPU. */
export async function spinning(): Promise<object> {
  await make(join(root, "native"), "check-build");
  const command = [join(root, "native", "build", "hang-program"), "spin"];
  return { device: "simulated", hang_s: 0, clients: [{ name: "train", class: "best-effort", command }] };
}

/** A server on a port and a socket of its own. */
export class Server implements AsyncDisposable {
  readonly socket: string;
  readonly url: string;
  readonly token: string;
  readonly child: ReturnType<Place["start"]>;
  readonly log: Promise<string>;

  private constructor(child: ReturnType<Place["start"]>, address: z.infer<typeof addressSchema>) {
    this.child = child;
    this.log = child.stderr.text();
    this.socket = address.socket;
    this.url = address.url;
    this.token = readFileSync(address.token_file, "utf8").trim();
  }

  static async start(place: Place, port = 0, ...more: string[]): Promise<Server> {
    const child = place.start(["serve", "--port", String(port), "--json", "--segment", place.segments, ...more]);
    const reader = child.stdout.getReader();
    let text = "";
    while (!text.includes("\n")) {
      const { done, value } = await reader.read();
      if (done) throw new Error(`rigel serve ended: ${await child.stderr.text()}`);
      text += new TextDecoder().decode(value);
    }
    return new Server(child, addressSchema.parse(JSON.parse(text)));
  }

  /** A request over TCP; with the token unless `headers` say otherwise. */
  async ask(
    path: string,
    options: { method?: string; body?: unknown; headers?: Record<string, string> } = {},
  ): Promise<{ status: number; body: unknown; text: string }> {
    const { method = "GET", body, headers = { authorization: `Bearer ${this.token}` } } = options;
    const response = await fetch(`${this.url}${path}`, {
      method,
      headers: { ...(body !== undefined && { "content-type": "application/json" }), ...headers },
      ...(body !== undefined && { body: typeof body === "string" ? body : JSON.stringify(body) }),
    });
    const text = await response.text();
    return {
      status: response.status,
      text,
      body: response.headers.get("content-type")?.includes("json") ? JSON.parse(text) : text,
    };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.child.kill("SIGTERM");
    await this.child.exited;
  }
}
