/**
 * page/launch-form.ts: the part of the dashboard that starts launches, lists those that it or others have asked for, and ends them.
 *
 * All of it needs the server's token, which the reader types: it is kept in this tab alone (sessionStorage), sent to the server
 * that the page came from and nobody else, and shown nowhere.
 */

import type { Launch, LaunchDetail } from "../launches.ts";
import { byId, element } from "./element.ts";

const INTERVAL_ms = 2000;
const TOKEN = "rigel-token";
const EXAMPLE = `{
  "cwd": "/path/to/project",
  "duration_s": 60,
  "clients": [
    { "name": "serve",
      "class": "high",
      "command": ["python", "serve.py"] },
    { "name": "train",
      "class": "best-effort",
      "command": ["python", "train.py"] }
  ]
}`;

/** What the server has refused, with the fields that are wrong. */
class Refused extends Error {
  readonly issues: { path: string; message: string }[];

  constructor(message: string, issues: { path: string; message: string }[]) {
    super(message);
    this.issues = issues;
  }
}

const section = byId("start");
const form = byId("start-form");
const token = typedIn("token", HTMLInputElement);
const configuration = typedIn("configuration", HTMLTextAreaElement);
const button = typedIn("start-button", HTMLButtonElement);
const said = byId("start-said");
const errors = byId("start-errors");
const list = byId("asked");
const entries = new Map<string, Entry>();
/** It need not be tried again. */
let wrongToken = "";

function typedIn<Kind extends HTMLElement>(id: string, kind: new () => Kind): Kind {
  const found = byId(id);
  if (!(found instanceof kind)) throw new Error(`#${id} is another element`);
  return found;
}

/** An answer of the server; throws Refused. */
async function ask(method: string, path: string, body?: string): Promise<ReturnType<typeof JSON.parse>> {
  const response = await fetch(path, {
    method,
    headers: {
      authorization: `Bearer ${token.value.trim()}`,
      ...(body !== undefined && { "content-type": "application/json" }),
    },
    ...(body !== undefined && { body }),
  });
  const answer = await response.json();
  if (response.ok) return answer;
  if (response.status === 401) wrongToken = token.value;
  throw new Refused(answer.error.message, answer.error.issues ?? []);
}

/** One launch of the list. What its reader has unfolded stays so. */
class Entry {
  readonly element = element("li", "card");
  readonly #state = element("b");
  readonly #about = element("span");
  readonly #stop = document.createElement("button");
  readonly #more = document.createElement("details");
  readonly #lines = element("pre");
  readonly #id: string;

  constructor(id: string) {
    this.#id = id;
    this.#stop.type = "button";
    clickedOnce(this.#stop);
    this.#stop.addEventListener("click", () => void told(async () => this.update(await this.#ask("DELETE"))));
    this.#more.append(element("summary", "", "standard error and report"), this.#lines);
    this.#more.addEventListener("toggle", () => void told(async () => await this.refresh()));
    this.element.append(element("div", "line", this.#state, this.#about, this.#stop), this.#more);
  }

  update({ state, asked_at, pid, exit_status, stops, clients }: Launch): void {
    this.#state.textContent = state;
    this.#state.className = state === "running" ? "running" : state === "failed" ? "killed" : "";
    const names = clients.map(({ name }) => name).join(" + ");
    const status = exit_status === null ? "" : `, status ${exit_status}`;
    const process = state === "running" && pid !== null ? `, process ${pid}` : "";
    this.#about.textContent = `${names}, since ${new Date(asked_at).toLocaleString("en-GB")}${process}${status}`;
    this.#stop.hidden = state !== "running";
    this.#stop.textContent = stops === 0 ? "Stop" : "Kill";
    this.#stop.title = stops === 0 ? "as Ctrl-C: its clients are asked to end" : "its clients are killed";
  }

  async refresh(): Promise<void> {
    if (!this.#more.open) return;
    const { stderr, report } = await this.#ask("GET");
    const parts = [stderr.join("\n"), ...(report === null ? [] : [JSON.stringify(report, null, 2)])];
    const text = parts.filter((part) => part !== "").join("\n\n") || "nothing yet";
    // What has not changed stays as it is, marked and scrolled.
    if (this.#lines.textContent !== text) this.#lines.textContent = text;
  }

  async #ask(method: string): Promise<LaunchDetail> {
    return await ask(method, `/v1/launches/${this.#id}`);
  }
}

/** The second click of a double click is not another one: it would start a second launch, or kill what was asked to end. */
function clickedOnce(made: HTMLButtonElement): void {
  made.addEventListener("click", (event) => {
    if (event.detail <= 1) return;
    event.preventDefault();
    event.stopImmediatePropagation();
  });
}

/** Does something, and says what went wrong with it. */
async function told(action: () => Promise<void>): Promise<void> {
  try {
    await action();
  } catch (thrown) {
    show(thrown);
  }
}

function show(thrown: unknown): void {
  said.textContent = "";
  const issues = thrown instanceof Refused ? thrown.issues : [];
  const text = thrown instanceof Refused ? thrown.message : `no answer of rigel serve (${String(thrown)})`;
  errors.replaceChildren(
    ...(issues.length > 0
      ? issues.map(({ path, message }) =>
          element("li", "", ...(path === "" ? [] : [element("code", "", path), ": "]), message),
        )
      : [element("li", "", text)]),
  );
}

async function refresh(): Promise<void> {
  if (token.value.trim() === "" || token.value === wrongToken) return;
  const { launches }: { launches: Launch[] } = await ask("GET", "/v1/launches");
  for (const [id, entry] of entries)
    if (!launches.some((launch) => launch.id === id)) {
      entry.element.remove();
      entries.delete(id);
    }
  for (const launch of launches.toReversed()) {
    const known = entries.get(launch.id);
    const entry = known ?? new Entry(launch.id);
    entry.update(launch);
    if (!known) {
      entries.set(launch.id, entry);
      list.prepend(entry.element);
    }
  }
  await Promise.all(entries.values().map((entry) => entry.refresh()));
}

async function submit(): Promise<void> {
  errors.replaceChildren();
  let body: string;
  try {
    body = JSON.stringify(JSON.parse(configuration.value));
  } catch (thrown) {
    said.textContent = "";
    errors.replaceChildren(element("li", "", `not valid JSON: ${thrown instanceof Error ? thrown.message : ""}`));
    return;
  }
  said.textContent = "starting";
  button.disabled = true;
  try {
    const { id }: LaunchDetail = await ask("POST", "/v1/launch", body);
    said.textContent = `started ${id}`;
    await refresh();
  } finally {
    button.disabled = false;
  }
}

/** Brings the form to life. */
export function launchForm(): void {
  configuration.value = EXAMPLE;
  token.value = sessionStorage.getItem(TOKEN) ?? "";
  token.addEventListener("input", () => sessionStorage.setItem(TOKEN, token.value.trim()));
  token.addEventListener("change", () => {
    errors.replaceChildren();
    void told(refresh);
  });
  clickedOnce(button);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    wrongToken = "";
    void told(submit);
  });
  const look = (): void => {
    // An answer that does not come is told about by the dashboard.
    if (section.hasAttribute("open") && !document.hidden)
      refresh().catch((thrown: unknown) => (thrown instanceof Refused ? show(thrown) : undefined));
  };
  section.addEventListener("toggle", look);
  setInterval(look, INTERVAL_ms);
}
