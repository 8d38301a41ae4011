/**
 * chromium.ts: a headless Chromium, driven over the DevTools protocol, for pictures of pages and tests of them.
 *
 * With a profile of its own in a scratch folder; the browser and the folder are gone when it is disposed of. Knows nothing of Rigel.
 */

import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { z } from "zod";
import { RigelError } from "./errors.ts";

const NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
const START_ms = 60_000;
const UNTIL_ms = 60_000;

/** Where the browser is; null if there is none on PATH. */
export function chromium(): string | null {
  return NAMES.map((name) => Bun.which(name)).find((path) => path !== null) ?? null;
}

const messageSchema = z.object({
  id: z.int().optional(),
  sessionId: z.string().optional(),
  method: z.string().optional(),
  params: z.unknown().optional(),
  result: z.unknown().optional(),
  error: z.object({ message: z.string() }).optional(),
});
type Message = z.infer<typeof messageSchema>;

export class Browser implements AsyncDisposable {
  readonly #child: ReturnType<typeof spawn>;
  readonly #folder: string;
  readonly #socket: WebSocket;
  readonly #pending = new Map<number, PromiseWithResolvers<unknown>>();
  readonly #pages = new Map<string, Tab>();
  #last = 0;

  private constructor(child: ReturnType<typeof spawn>, folder: string, socket: WebSocket) {
    this.#child = child;
    this.#folder = folder;
    this.#socket = socket;
    socket.addEventListener("message", (event) => this.#take(messageSchema.parse(JSON.parse(String(event.data)))));
    socket.addEventListener("close", () => {
      for (const { reject } of this.#pending.values()) reject(new Error("the browser has gone"));
    });
  }

  /** Starts it. Throws if there is none. */
  static async open(): Promise<Browser> {
    const path = chromium();
    if (path === null)
      throw new RigelError("command", "expected Chromium on PATH (Debian, Ubuntu: apt-get install chromium)");
    const folder = mkdtempSync(join(tmpdir(), "rigel-chromium-"));
    const child = spawn(path, folder);
    try {
      const socket = new WebSocket(await addressOf(child.stderr));
      const { promise, resolve, reject } = Promise.withResolvers<void>();
      socket.addEventListener("open", () => resolve());
      socket.addEventListener("error", () => reject(new Error(`${path}: its DevTools port cannot be connected to`)));
      await promise;
      return new Browser(child, folder, socket);
    } catch (thrown) {
      child.kill("SIGKILL");
      await child.exited;
      rmSync(folder, { recursive: true, force: true });
      throw thrown;
    }
  }

  /** A new tab, empty. */
  async tab(): Promise<Tab> {
    const made = z
      .object({ targetId: z.string() })
      .parse(await this.send("Target.createTarget", { url: "about:blank" }));
    const { sessionId } = z
      .object({ sessionId: z.string() })
      .parse(await this.send("Target.attachToTarget", { targetId: made.targetId, flatten: true }));
    const tab = new Tab((method, params) => this.send(method, params, sessionId));
    this.#pages.set(sessionId, tab);
    for (const domain of ["Page", "Runtime", "Log", "Network"]) await this.send(`${domain}.enable`, {}, sessionId);
    return tab;
  }

  /** One command of the protocol, and what came of it. */
  async send(method: string, params: object, sessionId?: string): Promise<unknown> {
    const id = ++this.#last;
    const answer = Promise.withResolvers<unknown>();
    this.#pending.set(id, answer);
    this.#socket.send(JSON.stringify({ id, method, params, ...(sessionId !== undefined && { sessionId }) }));
    return await answer.promise;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#socket.close();
    this.#child.kill("SIGKILL");
    await this.#child.exited;
    // Its helpers may still be writing for a moment.
    rmSync(this.#folder, { recursive: true, force: true, maxRetries: 20, retryDelay: 100 });
  }

  #take(message: Message): void {
    if (message.id === undefined) {
      if (message.method !== undefined) this.#pages.get(message.sessionId ?? "")?.take(message.method, message.params);
      return;
    }
    const waiting = this.#pending.get(message.id);
    this.#pending.delete(message.id);
    if (message.error) waiting?.reject(new Error(message.error.message));
    else waiting?.resolve(message.result);
  }
}

function spawn(path: string, folder: string) {
  return Bun.spawn(
    [
      path,
      "--headless=new",
      "--remote-debugging-port=0",
      `--user-data-dir=${folder}`,
      "--no-first-run",
      "--no-default-browser-check",
      "--disable-background-networking",
      "--disable-component-update",
      "--disable-extensions",
      "--disable-gpu",
      "--disable-sync",
      "--hide-scrollbars",
      // Its own sandbox refuses to work for root, as which CI runs; only pages of this machine are shown.
      ...(process.getuid?.() === 0 ? ["--no-sandbox"] : []),
      "about:blank",
    ],
    // It leaves a lock in the folder for temporary files.
    { stdin: "ignore", stdout: "ignore", stderr: "pipe", env: { ...process.env, TMPDIR: folder } },
  );
}

async function addressOf(stderr: ReadableStream<Uint8Array<ArrayBuffer>>): Promise<string> {
  let said = "";
  const { promise: late, reject } = Promise.withResolvers<never>();
  const timer = setTimeout(() => reject(new Error(`no DevTools port within ${START_ms / 1000} s: ${said}`)), START_ms);
  const decoder = new TextDecoder();
  const reader = stderr.getReader();
  try {
    for (;;) {
      const { done, value } = await Promise.race([reader.read(), late]);
      if (done) throw new Error(`Chromium ended at once: ${said}`);
      said += decoder.decode(value, { stream: true });
      const address = /^DevTools listening on (ws:\S+)/m.exec(said)?.[1];
      if (address !== undefined) return address;
    }
  } finally {
    clearTimeout(timer);
    // What it says later is of no interest, but must not fill the pipe.
    void drain(reader);
  }
}

async function drain(reader: { read: () => Promise<{ done: boolean }> }): Promise<void> {
  for (;;) if ((await reader.read()).done) return;
}

const textSchema = z.object({
  type: z.string().optional(),
  args: z.array(z.object({ value: z.unknown().optional(), description: z.string().optional() })).optional(),
  exceptionDetails: z
    .object({ text: z.string(), exception: z.object({ description: z.string() }).partial().optional() })
    .optional(),
  entry: z.object({ level: z.string(), text: z.string(), url: z.string().optional() }).optional(),
});

/** What the browser says in place of an answer where the page has given way to another one. */
const NAVIGATED = /navigated or closed|context was destroyed/;

function unlessNavigated(thrown: unknown): undefined {
  if (!(thrown instanceof Error) || !NAVIGATED.test(thrown.message)) throw thrown;
}

/** One tab. */
export class Tab {
  /** What the page's console has of errors and warnings, exceptions and refused loads. */
  readonly problems: string[] = [];
  /** Every address that it asked for. */
  readonly requests: string[] = [];
  readonly #send: (method: string, params: object) => Promise<unknown>;

  constructor(send: (method: string, params: object) => Promise<unknown>) {
    this.#send = send;
  }

  /** An event of the protocol. */
  take(method: string, params: unknown): void {
    const told = textSchema.safeParse(params);
    switch (method) {
      case "Network.requestWillBeSent":
        this.requests.push(z.object({ request: z.object({ url: z.string() }) }).parse(params).request.url);
        return;
      case "Runtime.consoleAPICalled":
        if (told.success && ["error", "warning", "assert"].includes(told.data.type ?? ""))
          this.problems.push(
            (told.data.args ?? []).map(({ value, description }) => String(value ?? description)).join(" "),
          );
        return;
      case "Runtime.exceptionThrown":
        this.problems.push(
          told.data?.exceptionDetails?.exception?.description ?? told.data?.exceptionDetails?.text ?? "an exception",
        );
        return;
      case "Log.entryAdded":
        if (told.success && told.data.entry && ["error", "warning"].includes(told.data.entry.level))
          this.problems.push(`${told.data.entry.text} ${told.data.entry.url ?? ""}`.trim());
    }
  }

  async goto(url: string): Promise<void> {
    await this.#send("Page.navigate", { url });
  }

  /** To the page before; the browser may have kept it. */
  async back(): Promise<void> {
    await this.evaluate("setTimeout(() => history.back())").catch(unlessNavigated);
  }

  /** The value of an expression in the page. */
  async evaluate(expression: string): Promise<unknown> {
    const { result, exceptionDetails } = z
      .object({
        result: z.object({ value: z.unknown().optional() }),
        exceptionDetails: z.object({ text: z.string() }).optional(),
      })
      .parse(await this.#send("Runtime.evaluate", { expression, returnByValue: true, awaitPromise: true }));
    if (exceptionDetails) throw new Error(`${exceptionDetails.text}: ${expression}`);
    return result.value;
  }

  /** Polls until an expression in the page is true; throws with what the console has if it never is. */
  async until(expression: string): Promise<void> {
    const until_ms = performance.now() + UNTIL_ms;
    while ((await this.evaluate(expression).catch(unlessNavigated)) !== true) {
      if (performance.now() > until_ms)
        throw new Error(`never true: ${expression}; ${this.problems[0] ?? "no errors"}`);
      await Bun.sleep(50);
    }
  }

  /** Text typed into what has the focus. */
  async type(text: string): Promise<void> {
    await this.#send("Input.insertText", { text });
  }

  /** The size of the window in CSS pixels; a phone's has two of its own for each. */
  async resize(width: number, height: number, phone = false): Promise<void> {
    await this.#send("Emulation.setDeviceMetricsOverride", {
      width,
      height,
      deviceScaleFactor: phone ? 2 : 1,
      mobile: phone,
    });
  }

  async scheme(scheme: "light" | "dark"): Promise<void> {
    await this.#send("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: scheme }] });
  }

  /** The whole page as PNG, or its upper part of this size. */
  async screenshot(part?: { width: number; height: number }): Promise<Uint8Array<ArrayBuffer>> {
    const clip = part && { x: 0, y: 0, ...part, scale: 1 };
    const { data } = z.object({ data: z.string() }).parse(
      await this.#send("Page.captureScreenshot", {
        format: "png",
        captureBeyondViewport: true,
        ...(clip && { clip }),
      }),
    );
    return Uint8Array.fromBase64(data);
  }
}
