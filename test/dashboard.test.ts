/** dashboard.test.ts: the page at `/` of `rigel serve`: what it may do, and, in a headless Chromium, what it shows of a launch. */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import { Browser, type Tab, chromium } from "../src/chromium.ts";
import { configOf } from "../src/config.ts";
import { policyOf } from "../src/dashboard.ts";
import { launchPage } from "../src/launch-page.ts";
import { decades, steps } from "../src/page/scale.ts";
import { buildPage } from "../src/page.ts";
import { type Mode, type Report, type ThreadClient, compared } from "../src/report.ts";
import { svgOf } from "../src/terminal-svg.ts";
import { type Stats, statsSchema } from "../src/stats.ts";
import { Place, Server, spinning, until } from "./serving.ts";

let place: Place;
beforeAll(() => {
  place = new Place();
});
afterAll(() => place[Symbol.dispose]());

test("the page is whole: it names nothing that would have to be loaded", async () => {
  const html = await buildPage("dashboard");
  expect(html).not.toMatch(/<(script|img|iframe|link)[^>]*\s(src|href)="(?!data:)/);
  expect(html).not.toMatch(/@import|url\((?!['"]?data:)/);
  expect(html.match(/<script/g)).toHaveLength(1);
  const policy = policyOf(html);
  expect(policy).toMatch(/^default-src 'none'; script-src 'sha256-[\w+/]{43}='; style-src 'sha256-[\w+/]{43}=';/);
  expect(policy).not.toContain("unsafe");
});

test("comes with its policy, and only to who names the server rightly", async () => {
  await using server = await Server.start(place);
  const response = await fetch(`${server.url}/`);
  expect(response.headers.get("content-security-policy")).toBe(policyOf(await response.text()));
  expect(response.headers.get("content-type")).toBe("text/html; charset=utf-8");
  const foreign = await fetch(`${server.url}/`, { headers: { host: "rigel.example" } });
  expect(foreign.status).toBe(403);
});

test("a launch's page holds the report as data, whatever is in it, and its file is tried before anything runs", async () => {
  const config = place.file("bad.json", {
    ...place.pair(),
    clients: [
      { name: "a", class: "high", command: ["sh", "-c", "exit 1"], env: { LD_PRELOAD: "/</script><img>/libvgpu.so" } },
    ],
  });
  const page = join(place.path, "failed.html");
  const failed = await place.rigel("launch", config, "--html", page, "--segment", place.segments);
  const html = readFileSync(page, "utf8");
  const data = /<script type="application\/json" id="report">([^<]*)<\/script>/.exec(html)?.[1];
  expect(JSON.parse(data ?? "")).toMatchObject({
    clients: [{ name: "a", exit_code: 1 }],
    // As standard output has it.
    notes: expect.arrayContaining([expect.stringMatching(/^a: not attached: it ended with status 1 /)]),
    findings: expect.arrayContaining([
      expect.objectContaining({ found: expect.stringContaining("/</script><img>/libvgpu.so (LD_PRELOAD) is HAMi's") }),
    ]),
  });
  expect(failed.status).toBe(1);
  const missing = await place.rigel("launch", config, "--html", join(place.path, "missing", "x.html"));
  expect(missing.stderr).toMatch(/--html: .*x\.html: cannot be written \(ENOENT/);
  expect(missing.status).toBe(2);
});

const askedSchema = z.object({ launches: z.array(z.object({ state: z.string(), stops: z.number() })) });

/** Whether a text is shown. */
const shows = (text: string): string => `(document.body?.innerText ?? "").includes(${JSON.stringify(text)})`;
test("lines of a terminal become a picture with their colours, each word at its column", () => {
  const svg = svgOf(["a  \u001b[1;31mb <c>\u001b[0m", "\u001b[7m> d\u001b[0m"], "two & lines");
  expect(svg).toContain("<title>two &amp; lines</title>");
  expect(
    svg.match(/<text[^>]*>[^<]*<\/text>/g)?.map((text) => text.replace(/ (y|textLength|lengthAdjust)="[^"]*"/g, "")),
  ).toEqual([
    '<text x="14" fill="#d7dbe0">a</text>',
    '<text x="37.49" fill="#ff7b72" font-weight="bold">b &lt;c&gt;</text>',
    '<text x="14" fill="#16191d">&gt; d</text>',
  ]);
  expect(svg).not.toContain("\u001b");
});

/** Whether something is drawn in every plot; looked at in copies, as reading a canvas changes how it is kept. */
const PIXELS = `[...document.querySelectorAll("canvas")].every((canvas) => {
  const { width, height } = canvas;
  const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return copy.getImageData(0, 0, width, height).data.some((byte) => byte !== 0);
})`;

/** A port that nobody has, and that the system gives to nobody who asks for any while it is not listened on. */
async function freePort(): Promise<number> {
  for (let port = 20_000; ; port++)
    try {
      await Bun.serve({ hostname: "127.0.0.1", port, fetch: () => new Response() }).stop(true);
      return port;
    } catch {
      // Somebody has it.
    }
}

/** Whether a launch's page has a mark and what requests take alone. */
function isWhole(text: string): boolean {
  return text.includes('"what":"joins"') && !/"alone":\{[^}]*"p99_ms":null/.test(text);
}

test("a second of warming up has no part of a plot, one value of three has", () => {
  const [p50, p99] = [Array.from({ length: 40 }, () => 3.6), Array.from({ length: 40 }, () => 4)];
  const axis = decades(
    [
      [null, 0.02, ...p50],
      [null, 1.7, ...p99],
    ],
    12,
  );
  expect(axis[0]).toBeWithin(1, 3.6);
  expect(axis[1]).toBeGreaterThan(12);
  expect(steps(...axis)).toEqual([5, 10, 20]);
  expect(decades([[1, 2, 100]], 100)[0]).toBeLessThan(1);
  // At least a power of ten, also where nothing changes.
  const [least, greatest] = decades([[5, 5, 5]], 5);
  expect(greatest / least).toBeGreaterThanOrEqual(10);
  expect(decades([[null, null], []], null)).toEqual([0.1, 100]);
});

describe.skipIf(chromium() === null)("in a browser (needs Chromium on PATH)", () => {
  let browser: Browser;
  beforeAll(async () => {
    browser = await Browser.open();
  });
  afterAll(async () => await browser[Symbol.asyncDispose]());

  async function opened(url: string): Promise<Tab> {
    const tab = await browser.tab();
    await tab.resize(1280, 900);
    await tab.goto(url);
    return tab;
  }

  test("says that nothing runs, then shows a launch live, and asks nobody but its server", async () => {
    await using server = await Server.start(place);
    const tab = await opened(`${server.url}/`);
    await tab.until(shows("Nothing runs under Rigel at the moment."));
    const config = place.file("pair.json", place.pair());
    await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    const said = launch.stderr.text();
    await tab.until(shows("NVIDIA H200 (simulated)"));
    await tab.until(`document.querySelectorAll("tbody tr").length === 2 && ${shows("running")}`);
    await tab.until(shows("serve (high) has attached, process"));
    expect(await tab.evaluate(shows("Nothing hangs: no client has waited for more than 1 min"))).toBe(true);
    expect(await tab.evaluate(shows("Nothing runs"))).toBe(false);
    // Each plot is drawn, and the numbers move on.
    await tab.until(`document.querySelectorAll("canvas").length >= 6 && ${PIXELS}`);
    // What each client has of the GPU, in the table and beside the plot's line.
    const column = `[...document.querySelectorAll("th")].findIndex((head) => head.innerText === "GPU %")`;
    const shares = `[...document.querySelectorAll("tbody tr")].map((row) => Number(row.cells[${column}].innerText))`;
    await tab.until(`${shares}.length === 2 && ${shares}.every((share) => share > 0 && share <= 100)`);
    const plot = `[...document.querySelectorAll(".plots > *")].find((one) => one.innerText.startsWith("GPU share, %"))`;
    await tab.until(`/serve [\\d.]+%[\\s\\S]*train [\\d.]+%/.test(${plot}.innerText)`);
    const row = `document.querySelector("tbody tr").innerText`;
    const before = await tab.evaluate(row);
    await tab.until(`${row} !== ${JSON.stringify(before)}`);
    // A phone, in the dark: nothing is wider than the screen.
    await tab.resize(390, 844, true);
    await tab.scheme("dark");
    await tab.until(`document.documentElement.scrollWidth <= 390 && ${PIXELS}`);
    launch.kill("SIGTERM");
    await said;
    await tab.until(shows("Nothing runs under Rigel at the moment."));
    expect(tab.problems).toEqual([]);
    expect(tab.requests.filter((url) => !url.startsWith(`${server.url}/`) && !url.startsWith("data:"))).toEqual([]);
  });

  // A browser has six connections to a server.
  test("is live in eight tabs at once, of which any may be closed", async () => {
    await using server = await Server.start(place);
    const live = `${shows("live, once a second")} && ${shows("Nothing runs under Rigel at the moment.")}`;
    const tabs: Tab[] = [];
    for (let i = 0; i < 8; i++) {
      const tab = await opened(`${server.url}/`);
      tabs.push(tab);
      await tab.until(live);
    }
    // The first is connected, for all.
    const [left, ended] = [tabs.shift(), tabs.pop()];
    for (const closed of [left, ended]) await closed?.goto("about:blank");
    const config = place.file("pair.json", place.pair());
    await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    const said = launch.stderr.text();
    for (const tab of tabs) {
      await tab.until(shows("serve (high) has attached, process"));
      expect(await tab.evaluate(`document.querySelectorAll("#events li").length`)).toBeGreaterThan(1);
    }
    const times = `document.body.innerText.split("serve (high) has attached, process").length - 1`;
    for (const tab of tabs) expect(await tab.evaluate(times)).toBe(1);
    await left?.back();
    await left?.until(shows("NVIDIA H200 (simulated)"));
    launch.kill("SIGTERM");
    await said;
    await left?.until(live);
    for (const tab of tabs) expect(tab.problems).toEqual([]);
  });

  test("starts a launch, shows what is wrong with one field by field, lists it and ends it", async () => {
    await using server = await Server.start(place);
    const tab = await opened(`${server.url}/`);
    // On a phone.
    await tab.resize(390, 844, true);
    await tab.until(shows("live, once a second"));
    const click = (selector: string) => tab.evaluate(`document.querySelector(${JSON.stringify(selector)}).click()`);
    // Its second click comes when what the first one has asked for is done already.
    const doubleClick = async (selector: string, done: string) => {
      const clicked = (detail: number) =>
        `document.querySelector(${JSON.stringify(selector)}).dispatchEvent(
          new MouseEvent("click", { bubbles: true, cancelable: true, detail: ${detail} }))`;
      await tab.evaluate(clicked(1));
      await tab.until(done);
      await tab.evaluate(clicked(2));
    };
    const typed = async (selector: string, text: string) => {
      await tab.evaluate(`document.querySelector(${JSON.stringify(selector)}).select()`);
      await tab.type(text);
    };
    await click("#start > summary");
    const example = z.string().parse(await tab.evaluate(`document.querySelector("#configuration").value`));
    const { cwd, ...config } = JSON.parse(example);
    expect(configOf(config, "example", cwd).clients).toHaveLength(2);
    await typed("#token", "wrong");
    await click("#start-button");
    await tab.until(shows("the token is another one"));
    await typed("#token", server.token);
    await typed("#configuration", "{");
    await click("#start-button");
    await tab.until(shows("not valid JSON"));
    await typed(
      "#configuration",
      '{"clients": [{"name": "a", "class": "low", "command": ["sleep", "1"]}], "polic": 1}',
    );
    await click("#start-button");
    await tab.until(shows('clients[0].class: expected one of "high", "best-effort", got "low"'));
    await tab.until(shows("polic: unknown field"));
    await typed("#configuration", JSON.stringify(place.pair()));
    await doubleClick(
      "#start-button",
      `document.querySelector("#asked li") !== null && !document.querySelector("#start-button").disabled`,
    );
    await tab.until(`/running\\s*serve \\+ train, since/.test(document.querySelector("#asked").innerText)`);
    expect(await tab.evaluate(`document.querySelector("#start-errors").innerText`)).toBe("");
    // The launch itself appears beneath, and what it says can be unfolded.
    await tab.until(`document.querySelectorAll("main tbody tr").length === 2`);
    await click("#asked summary");
    await tab.until(shows("rigel: NVIDIA H200 (simulated)"));
    await tab.until("document.documentElement.scrollWidth <= 390");
    // The token is this tab's: the page loaded anew knows it, and it is nowhere to be seen.
    await tab.goto(`${server.url}/`);
    await tab.until(shows("live, once a second"));
    await click("#start > summary");
    await tab.until(`document.querySelector("#asked button")?.innerText === "Stop"`);
    expect(await tab.evaluate(shows(server.token))).toBe(false);
    await doubleClick("#asked button", `document.querySelector("#asked button").innerText !== "Stop"`);
    await tab.until(`/ended\\s*serve \\+ train/.test(document.querySelector("#asked").innerText)`);
    await tab.until(shows("Nothing runs under Rigel at the moment."));
    const { launches } = askedSchema.parse((await server.ask("/v1/launches")).body);
    expect(launches).toEqual([{ state: "ended", stops: 1 }]);
    expect(tab.problems.filter((text) => !/status of (401|422)/.test(text))).toEqual([]);
    expect(tab.requests.filter((url) => !url.startsWith(`${server.url}/`) && !url.startsWith("data:"))).toEqual([]);
  });

  test("names who hangs, and in what", async () => {
    await using server = await Server.start(place, 0, "--hang", "1s");
    const tab = await opened(`${server.url}/`);
    const config = place.file("spin.json", await spinning());
    await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    const said = launch.stderr.text();
    await tab.until(shows("waits in cuStreamSynchronize for work that does not finish; the oldest launch not known"));
    await tab.until(shows("train hangs, process"));
    expect(await tab.evaluate(shows("Nothing hangs"))).toBe(false);
    await tab.resize(390, 844);
    await tab.until(`document.documentElement.scrollWidth <= 390`);
    expect(tab.problems).toEqual([]);
    launch.kill("SIGTERM");
    await said;
  });

  test("has a line for whom it is of, also once a client is of another class", async () => {
    await using server = await Server.start(place);
    const clients = [{ name: "train", class: "best-effort", replay: { profile: join(place.path, "tiny.csv") } }];
    const config = place.file("only.json", place.pair({ policy: { name: "priority" }, clients }));
    await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    const said = launch.stderr.text();
    const tab = await opened(`${server.url}/`);
    const plots = `document.querySelectorAll(".plots > *").length`;
    await tab.until(`${plots} === 6 && ${shows("train, gate")}`);
    const high = { method: "PATCH", body: { class: "high" } };
    expect(await server.ask("/v1/clients/train", high)).toMatchObject({ status: 200 });
    // Nobody is held back any more.
    await tab.until(`${plots} === 5 && !${shows("train, gate")}`);
    expect(await server.ask("/v1/clients/train", { ...high, body: { class: "best-effort" } })).toMatchObject({
      status: 200,
    });
    await tab.until(`${plots} === 6 && ${shows("train, gate")}`);
    launch.kill("SIGTERM");
    await said;
    expect(tab.problems).toEqual([]);
  });

  test("on a phone a client with the longest name leaves room for its numbers", async () => {
    await using server = await Server.start(place);
    const clients = [{ name: "n".repeat(63), class: "best-effort", replay: { profile: join(place.path, "tiny.csv") } }];
    const config = place.file("long.json", place.pair({ policy: { name: "priority" }, clients }));
    await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    const said = launch.stderr.text();
    const tab = await opened(`${server.url}/`);
    await tab.resize(390, 844, true);
    await tab.until(`document.querySelectorAll(".plots > *").length === 6 && ${shows("has attached, process")}`);
    await tab.until("document.documentElement.scrollWidth <= 390");
    // It stays where it is while the others are scrolled beneath it.
    await tab.until(`document.querySelector("tbody td").getBoundingClientRect().width < 390 / 2`);
    launch.kill("SIGTERM");
    await said;
    expect(tab.problems).toEqual([]);
  });

  test("a launch writes its report as a page, drawn second by second", async () => {
    const config = place.file("page.json", place.pair());
    const page = join(place.path, "report.html");
    const drawn = async (seconds: number) =>
      await place.rigel("launch", config, "--duration", `${seconds}`, "--html", page, "--segment", place.segments);
    let result = await drawn(3);
    // On a busy machine the loop may come too late to see a client join, or learn nothing alone in so short a time.
    for (let seconds = 4; !isWhole(readFileSync(page, "utf8")); seconds += 2) result = await drawn(seconds);
    expect(result.stdout).toContain("slo: target p99 1.05 of alone");
    expect(readFileSync(page, "utf8")).not.toMatch(/ (src|href)="(?!data:)/);
    const tab = await opened(`file://${page}`);
    await tab.until(`document.querySelectorAll("canvas").length === 5 && ${PIXELS}`);
    for (const text of [
      "policy slo, in time slices",
      "serve",
      "target (1.05 of alone)",
      "Step of the settings",
      "train joins at",
    ])
      expect(await tab.evaluate(shows(text))).toBe(true);
    expect(tab.problems).toEqual([]);
    expect(tab.requests.filter((url) => !/^(data|file):/.test(url))).toEqual([]);
    expect(result.status).toBe(0);
  });

  test("a launch's page compares best-effort clients as the table does: in iterations, where they report those", async () => {
    const config = place.file("one.json", place.pair({ policy: { name: "priority" } }));
    const { stdout } = await place.rigel("launch", config, "--duration", "1", "--json", "--segment", place.segments);
    const report: Report = JSON.parse(stdout);
    const train = report.clients.find(({ name }) => name === "train");
    if (!train) throw new Error("no train");
    const phase = (mode: Mode, iterations_per_s: number | null, launches_per_s: number) => ({
      mode,
      clients: [{ ...train, iterations_per_s, launches_per_s }],
    });
    const rows = async (phases: Parameters<typeof compared>[0]) => {
      const page = place.file("compared.html", await launchPage({ ...report, compare: compared(phases) }));
      const tab = await opened(`file://${page}`);
      await tab.until(shows("Policy priority has no control loop"));
      return await tab.evaluate(
        `[...document.querySelectorAll("table")].at(-1).querySelector("tbody").innerText.replaceAll(/\\s+/g, " ")`,
      );
    };
    expect(await rows([phase("alone", 20, 100), phase("governed", 10, 80)])).toBe("train iter/s 20.0 10.0 (x0.50)");
    expect(await rows([phase("alone", null, 100), phase("governed", null, 80)])).toBe(
      "train launches/s 100 80.0 (x0.80)",
    );
  });

  test("a launch's page lists clients that threads have entered under their process, as the table does", async () => {
    const config = place.file("threads.json", place.pair({ policy: { name: "priority" } }));
    const { stdout } = await place.rigel("launch", config, "--duration", "1", "--json", "--segment", place.segments);
    const report: Report = JSON.parse(stdout);
    const [serve, train] = report.clients;
    if (!serve || !train) throw new Error("no clients");
    const own: ThreadClient = { ...train, name: "part", launches_per_s: 4321, processes: 1, devices: [0] };
    const page = place.file(
      "threads.html",
      await launchPage({ ...report, clients: [{ ...serve, threads: [own] }, train] }),
    );
    const tab = await opened(`file://${page}`);
    await tab.until(shows("Policy priority has no control loop"));
    const cells = `[...document.querySelectorAll("table tbody tr")].map((row) => [...row.cells].map((cell) => cell.innerText))`;
    const rows = z.array(z.array(z.string())).parse(await tab.evaluate(cells));
    expect(rows.map(([name]) => name)).toEqual(["serve", "serve/part", "train"]);
    expect(rows[1]).toEqual([
      "serve/part",
      "best-effort",
      "",
      ...(rows[2]?.slice(3, 8) ?? []),
      "4321",
      rows[2]?.[9] ?? "",
    ]);
  });

  test("goes on when the machine's clock was set back", async () => {
    const config = place.file("pair.json", place.pair());
    await using launch = place.start(["launch", config, "--duration", "600", "--segment", place.segments]);
    const said = launch.stderr.text();
    let seen: Stats;
    {
      await using server = await Server.start(place);
      seen = await until(async () => {
        const { segments } = z.object({ segments: z.array(statsSchema) }).parse((await server.ask("/v1/stats")).body);
        return segments.find(({ clients }) => clients.length === 2);
      });
    }
    launch.kill("SIGTERM");
    await said;
    // Two seconds of it, told by a server whose clock goes back by an hour in between.
    const at = (clock_s: number, later_ms: number, refused: number): Stats => ({
      ...seen,
      at: new Date(Date.parse(seen.at) + clock_s * 1000).toISOString(),
      at_ms: seen.at_ms + later_ms,
      segment: { ...seen.segment, refused },
    });
    const events = [at(0, 0, 11), at(-3600, 1000, 22)].map(
      (stats) => `event: stats\ndata: ${JSON.stringify({ at: stats.at, segments: [stats], hangs: [] })}\n\n`,
    );
    const html = await buildPage("dashboard");
    await using told = Bun.serve({
      hostname: "127.0.0.1",
      port: 0,
      fetch: ({ url }) =>
        url.endsWith("/v1/events")
          ? new Response(events.join(""), { headers: { "content-type": "text/event-stream" } })
          : new Response(html, { headers: { "content-type": "text/html" } }),
    });
    const tab = await opened(told.url.href);
    await tab.until(shows("22 processes found no room"));
    expect(tab.problems).toEqual([]);
  });

  test("says so when the server has gone, and goes on when it is back", async () => {
    const port = await freePort();
    const first = await Server.start(place, port);
    const tab = await opened(`${first.url}/`);
    await tab.until(shows("live, once a second"));
    await first[Symbol.asyncDispose]();
    await tab.until(shows("not connected to rigel serve"));
    await using second = await Server.start(place, port);
    await tab.until(shows("live, once a second"));
    expect(second.url).toBe(first.url);
  });
});
