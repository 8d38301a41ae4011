/**
 * durations.test.ts: what one launch learns of kernel durations the next one knows; files that cannot be used never fail one.
 *
 * A best-effort replay on the simulated GPU launches one kernel, rigel_spin, of one shape: `seeded` is 1 when its duration
 * was known before, `samples` counts the launches that it timed.
 */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import {
  chmodSync,
  chownSync,
  mkdirSync,
  readFileSync,
  readdirSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { z } from "zod";
import type { ClientConfig } from "../src/config.ts";
import { programOf } from "../src/durations.ts";
import { readDurations } from "../src/profile.ts";
import { commandLine } from "../src/self.ts";
import { type Result, Scratch, TINY_PROFILE, reportOf, start, withoutPlaces } from "./rigel.ts";

let scratch: Scratch;
let folders = 0;

beforeAll(() => {
  scratch = new Scratch();
  scratch.file("tiny.csv", TINY_PROFILE);
  scratch.file("other.csv", TINY_PROFILE);
});
afterAll(() => scratch[Symbol.dispose]());

const ROW = z.strictObject({
  key: z.string().regex(/^[0-9a-f]{16}$/),
  program: z.string().regex(/^[0-9a-f]{16}$/),
  command: z.string(),
  name: z.string(),
  grid: z.tuple([z.int(), z.int(), z.int()]),
  block: z.tuple([z.int(), z.int(), z.int()]),
  duration_ns: z.int(),
  samples: z.int(),
  used: z.iso.datetime(),
});

/** Where the GPU is taken away from best-effort clients, durations do not count, and only a few of each are timed. */
const GATED = { device: "simulated", policy: { preempt: false } };

/** A place for caches that nothing has been kept in. */
class Place {
  readonly home: string;
  readonly folder: string;

  constructor(home = join(scratch.path, `cache-${folders++}`)) {
    this.home = home;
    this.folder = join(home, "rigel", "durations");
  }

  async rigel(...args: string[]): Promise<Result> {
    await using child = start(args, { env: { XDG_CACHE_HOME: this.home } });
    const [stdout, stderr, status] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    return { status, stdout, stderr };
  }

  /** Runs one best-effort client to its end; what it knew and learned, and what was said about kept durations. */
  async train(client: object = {}, replay = "tiny.csv") {
    const config = { ...GATED, clients: [{ name: "train", class: "best-effort", ...client }] };
    if (!("command" in client)) Object.assign(config.clients[0] ?? {}, { replay: { profile: replay, iterations: 20 } });
    const result = await this.rigel("launch", scratch.file(`config-${folders++}.json`, config), "--json");
    const [first] = reportOf(result).clients;
    expect(result.status, result.stderr).toBe(0);
    const said = result.stderr.split("\n").filter((line) => line.includes("durations"));
    return { ...first?.durations, said, notes: reportOf(result).notes };
  }

  /** The only file. */
  get file(): string {
    const names = readdirSync(this.folder);
    expect(names).toHaveLength(1);
    return join(this.folder, names[0] ?? "");
  }

  get rows() {
    const [, ...lines] = readFileSync(this.file, "utf8").trimEnd().split("\n");
    return lines.map((line) => ROW.parse(JSON.parse(line)));
  }
}

describe("durations that a launch has learned", () => {
  test("are kept in a private file, and known to the same program's next launch", async () => {
    const place = new Place();
    const first = await place.train();
    expect(first.seeded).toBe(0);
    expect(first.samples).toBeGreaterThan(0);
    expect(first.said).toEqual([]);
    expect(statSync(place.file).mode & 0o7777).toBe(0o600);
    for (const folder of [place.folder, join(place.home, "rigel")]) expect(statSync(folder).mode & 0o7777).toBe(0o700);
    expect(JSON.parse(readFileSync(place.file, "utf8").split("\n")[0] ?? "")).toMatchObject({
      rigel_durations: 1,
      device: "NVIDIA H200 (simulated)",
    });
    const [learned] = place.rows;
    expect(place.rows).toHaveLength(1);
    expect(learned).toMatchObject({
      name: "rigel_spin",
      grid: [132, 1, 1],
      block: [256, 1, 1],
      samples: first.samples,
    });
    // A sample may hold a delay, and never less than the kernel's own 0.2 ms.
    expect(learned?.duration_ns).toBeGreaterThan(190_000);

    const second = await place.train();
    expect(second.seeded).toBe(1);
    expect(second.said).toEqual([`rigel: durations of 1 kernels are known from earlier launches (${place.file})`]);
    expect(place.rows).toMatchObject([{ key: learned?.key, samples: (first.samples ?? 0) + (second.samples ?? 0) }]);
    expect(statSync(place.file).mode & 0o7777).toBe(0o600);
  });

  test("go with what high clients' requests wait for, unless nothing holds back what they wait beside", async () => {
    const place = new Place();
    const replay = { profile: "tiny.csv", iterations: 80, rate_per_s: 400 };
    const high = { name: "serve", class: "high", replay };
    const train = { name: "train", class: "best-effort", replay: { profile: "other.csv", iterations: 40 } };
    const launched = async (name: string, ...clients: object[]): Promise<object[]> => {
      const config = { ...GATED, policy: { ...GATED.policy, name }, clients };
      const { status, stderr } = await place.rigel(
        "launch",
        scratch.file(`config-${folders++}.json`, config),
        "--json",
      );
      expect(status, stderr).toBe(0);
      const { files } = JSON.parse((await place.rigel("durations", "--json")).stdout);
      return files.flatMap(({ requests }: { requests: object[] }) => requests);
    };
    expect(await launched("none", high, train)).toEqual([]);
    const [first, ...more] = await launched("priority", high, train);
    expect(more).toEqual([]);
    expect(first).toMatchObject({ command: expect.stringContaining("tiny.csv"), requests: expect.any(Number) });
    expect((await place.rigel("durations")).stdout).toMatch(
      /^ {2}requests of [\d.]+ ms wait for the GPU for \d+% of that: /m,
    );
    // Those of the latest launch; alone they wait for nobody, and two high clients for each other.
    expect(await launched("none", high)).toHaveLength(1);
    const other = { ...high, name: "other", replay: { ...replay, profile: "other.csv" } };
    expect(await launched("priority", high, other, train)).toHaveLength(1);
    const file = readFileSync(place.file, "utf8");
    const spoilt = file.replace(/"waited_part":[\d.]+/, '"waited_part":2');
    expect(spoilt).not.toBe(file);
    writeFileSync(place.file, spoilt);
    expect((await place.rigel("durations")).stdout).toContain("neither a kernel's duration nor a program's requests");
  });

  test("are not taken for another program's, whose kernels may have the same names and shapes", async () => {
    const place = new Place();
    await place.train();
    expect((await place.train({}, "other.csv")).seeded).toBe(0);
    expect(new Set(place.rows.map(({ program }) => program)).size).toBe(2);
    expect((await place.train({ name: "renamed" }, "tiny.csv")).seeded).toBe(1);
  });

  test("belong to the command, its folder and its share of the GPU; of a replay to its profiles", () => {
    const common = { name: "a", class: "best-effort", isolation: "shared" } as const;
    const client: ClientConfig = { ...common, command: ["python", "train.py"], cwd: "/a" };
    const replay: ClientConfig = { ...common, replay: { profile: ["/p.csv"] } };
    const programs = [
      client,
      { ...client, command: ["python", "train.py", "--batch", "64"] },
      { ...client, cwd: "/b" },
      { ...client, sm_percent: 50 },
      replay,
      { ...replay, replay: { profile: ["/q.csv"] } },
      { ...replay, replay: { profile: ["/p.csv", "/q.csv"] } },
    ].map(programOf);
    expect(new Set(programs).size).toBe(programs.length);
    expect(programOf({ ...client, name: "b", class: "high", env: { SEED: "1" } })).toBe(programs[0] ?? "");
    expect(programOf({ ...replay, cwd: "/b", replay: { profile: ["/p.csv"], rate_per_s: 5 } })).toBe(programs[4] ?? "");
  });

  test("carry over the phases of a comparison", async () => {
    const place = new Place();
    const replay = { profile: "tiny.csv", iterations: 20 };
    const config = scratch.file("compare.json", {
      ...GATED,
      clients: [
        { name: "serve", class: "high", replay },
        { name: "train", class: "best-effort", replay },
      ],
    });
    await place.train();
    const report = reportOf(await place.rigel("launch", config, "--compare", "--json"));
    expect(report.clients.map(({ name, durations }) => [name, durations.seeded])).toEqual([
      ["serve", 0],
      ["train", 1],
    ]);
    // Nothing is learned where nothing is governed.
    expect(report.compare[1]?.clients[1]?.durations).toEqual({ seeded: 0, samples: 0 });
  });

  test("are kept for the kernels that were used last, and for so many only", async () => {
    const place = new Place();
    await place.train();
    const [row] = place.rows;
    const head = readFileSync(place.file, "utf8").split("\n")[0];
    const many = Array.from({ length: 20_010 }, (_, index) => ({
      ...row,
      key: index.toString(16).padStart(16, "0"),
      program: "00000000000000aa",
      used: new Date(Date.UTC(2020, 0, 1) + index * 1000).toISOString(),
    }));
    writeFileSync(place.file, [head, ...many.map((one) => JSON.stringify(one))].join("\n"));
    await place.train();
    const keys = new Set(place.rows.map(({ key }) => key));
    expect(keys.size).toBe(20_000);
    expect(keys).toContain(row?.key ?? "");
    expect(keys).toContain(many.at(-1)?.key ?? "");
    expect(keys).not.toContain(many[10]?.key ?? "");
  });
});

test("durations of a time that is yet to come, as a clock was wrong, give way to what is learned now", async () => {
  const place = new Place();
  await place.train();
  const [learned] = place.rows;
  writeFileSync(
    place.file,
    readFileSync(place.file, "utf8").replace(/"used":"[^"]+"/, '"used":"2999-01-01T00:00:00Z"'),
  );
  const { samples } = await place.train();
  const [row] = place.rows;
  expect(row?.samples).toBe((learned?.samples ?? 0) + (samples ?? 0));
  expect(Date.parse(row?.used ?? "")).toBeLessThanOrEqual(Date.now());
});

describe("files that cannot be used", () => {
  const cases: [string, (path: string, good: string) => void, RegExp][] = [
    ["nothing in it", (path) => writeFileSync(path, ""), /:1: expected .*the file is not used$/],
    ["random bytes", (path) => writeFileSync(path, Buffer.from([0xff, 0, 0x7b, 0x0a, 0x80, 0])), /:1: expected/],
    [
      "another format",
      (path, good) => writeFileSync(path, good.replace('"rigel_durations":1', '"rigel_durations":2')),
      /:1: /,
    ],
    [
      "another device",
      (path, good) => writeFileSync(path, good.replace("H200", "B300")),
      /expected durations of .*H200.*got .*B300/,
    ],
  ];
  test.each(cases)("%s: one line says so, kernels are learned again, the file is replaced", async (_, spoil, said) => {
    const place = new Place();
    await place.train();
    spoil(place.file, readFileSync(place.file, "utf8"));
    const second = await place.train();
    expect(second.said).toHaveLength(1);
    expect(second.said[0]).toMatch(said);
    expect(second.said[0]).toContain(place.file);
    expect(second.seeded).toBe(0);
    const third = await place.train();
    expect(third.said.join()).toContain("of 1 kernels are known");
    expect(third.seeded).toBe(1);
  });

  const rows: [string, (good: string) => string][] = [
    ["half a line", (good) => good.slice(0, 40)],
    ["a negative duration", (good) => good.replace(/"duration_ns":\d+/, '"duration_ns":-5')],
    ["a duration that is no number", (good) => good.replace(/"duration_ns":\d+/, '"duration_ns":"fast"')],
    ["a key that is none", (good) => good.replace(/"key":"\w+"/, '"key":"xyz"')],
    ["an unknown field", (good) => good.replace("{", '{"more":1,')],
    ["something that is no object", () => "[1, 2]"],
  ];
  test("bad lines among good ones are counted and left out", async () => {
    const place = new Place();
    await place.train();
    const [head = "", good = ""] = readFileSync(place.file, "utf8").split("\n");
    for (const [what, spoil] of rows) expect(spoil(good), what).not.toBe(good);
    writeFileSync(place.file, [head, ...rows.map(([, spoil]) => spoil(good)), good].join("\n"));
    const second = await place.train();
    expect(second.seeded).toBe(1);
    expect(second.said[0]).toEndWith(
      `:2: neither a kernel's duration nor a program's requests; ${rows.length} such lines are not used`,
    );
    expect(place.rows).toHaveLength(1);
  });

  const left: [string, (path: string) => void][] = [
    ["others may write to", (path) => chmodSync(path, 0o666)],
    ["is a link", (path) => replaced(path, () => symlinkSync("/dev/zero", path))],
    ["is a folder", (path) => replaced(path, () => mkdirSync(path))],
  ];
  if (process.getuid?.() === 0) left.push(["belongs to somebody else", (path) => chownSync(path, 12_345, 0)]);
  test.each(left)("what %s is neither read nor replaced", async (_, spoil) => {
    const place = new Place();
    await place.train();
    spoil(place.file);
    const before = statSync(place.file);
    const { seeded, said } = await place.train();
    expect(said).toHaveLength(1);
    expect(said[0]).toContain("is not a file of this user alone");
    expect(seeded).toBe(0);
    expect(statSync(place.file).ino).toBe(before.ino);
    expect(statSync(place.file).mtimeMs).toBe(before.mtimeMs);
  });

  test.each([
    ["looked into", "/dev/null", "cannot be read: ENOTDIR"],
    ["written to", "/proc/self", "kernel durations are not kept for the next launch: "],
  ])("a place that cannot be %s is told about once", async (_, home, why) => {
    const { seeded, said } = await new Place(home).train();
    expect(said).toHaveLength(1);
    expect(said[0]).toContain(why);
    expect(seeded).toBe(0);
  });
});

function replaced(path: string, make: () => void): void {
  Bun.spawnSync(["rm", path]);
  make();
}

/** A row of Rigel's format. */
function kernel(grid: number, duration_ns: number): string {
  return `rigel_spin,kernel,0,${grid},1,1,256,1,1,32,0,0,${duration_ns},0\n`;
}

describe("a profile of a client", () => {
  const HEAD =
    "# rigel-profile 1; device=NVIDIA H200\n" +
    "name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns\n";
  const ORION = "Name,Profile,Memory_footprint,SM_usage,Duration\n";

  test("makes its kernels known before the first was timed", async () => {
    const profile = scratch.file("seed.csv", HEAD + kernel(132, 150_000) + kernel(132, 900_000) + kernel(132, 170_000));
    expect(await readDurations(profile)).toMatchObject({
      kernels: [{ duration_ns: 170_000, launches: 3 }],
      unclear: 0,
    });
    const place = new Place();
    expect(await place.train({ profile: "seed.csv" })).toMatchObject({ seeded: 1, said: [] });
    // What was measured here is kept, what the profile says is not.
    expect(place.rows).toHaveLength(1);
    expect(place.rows[0]?.duration_ns).toBeGreaterThan(190_000);
  });

  test("of another shape says nothing", async () => {
    scratch.file("shape.csv", HEAD + kernel(131, 150_000));
    expect(await new Place().train({ profile: "shape.csv" })).toMatchObject({ seeded: 0 });
  });

  test("of Orion's stands for every shape where a name's rows agree, and says which do not", async () => {
    scratch.file("orion.csv", `${ORION}rigel_spin,1,0,80,200000\nrigel_spin,1,0,80,210000\n`);
    expect(await new Place().train({ profile: "orion.csv" })).toMatchObject({ seeded: 1, notes: [] });
    const mixed = `${ORION}rigel_spin,1,0,80,200000\nrigel_spin,1,0,80,400000\nother,1,0,80,5\n`;
    scratch.file("mixed.csv", mixed);
    const { seeded, notes } = await new Place().train({ profile: "mixed.csv" });
    expect(seeded).toBe(0);
    expect(notes.join()).toContain("mixed.csv has no shapes; 1 of its 2 kernel names are used");
  });

  test("that is none is an error with the field, the file and the line", async () => {
    const path = scratch.file("bad.csv", HEAD + kernel(132, -1));
    const clients = [{ name: "a", class: "high", command: ["true"], profile: "bad.csv" }];
    const config = scratch.file("bad.json", { device: "simulated", clients });
    const { status, stderr } = await new Place().rigel("launch", config);
    expect(withoutPlaces(stderr)).toContain(
      `${config}: clients[0].profile: ${path}:3: duration_ns: expected a whole number`,
    );
    expect(status).toBe(2);
  });
});

describe("rigel durations", () => {
  test("shows what is known, as text and as JSON, and forgets it", async () => {
    const place = new Place();
    expect((await place.rigel("durations")).stdout).toContain(`no kernel durations are kept in ${place.folder} yet`);
    await place.train();
    const { stdout } = await place.rigel("durations");
    expect(stdout).toContain("NVIDIA H200 (simulated), driver rigel ");
    expect(stdout).toMatch(
      /^ +\d+\.\d +\d+ {2}\d{4}-\d\d-\d\d \d\d:\d\d:\d\d {2}rigel_spin <<<\(132, 1, 1\), \(256, 1, 1\)>>>$/m,
    );
    const document = JSON.parse((await place.rigel("durations", "--json")).stdout);
    expect(document).toMatchObject({
      schema: 1,
      folder: place.folder,
      files: [{ path: place.file, kernels: place.rows }],
    });
    writeFileSync(`${place.file}.left-by-a-killed-launch`, "");
    expect((await place.rigel("durations", "--clear")).stdout).toBe("2 files removed\n");
    expect(readdirSync(place.folder)).toEqual([]);
    expect((await place.train()).seeded).toBe(0);
  });

  test("forgets for good what a launch that runs meanwhile had read", async () => {
    const place = new Place();
    await place.train({}, "other.csv");
    const [other] = place.rows;
    // What is kept is read before any client starts.
    const replay = { profile: "tiny.csv", iterations: 20 };
    const clients = [
      { name: "train", class: "best-effort", replay },
      { name: "clear", class: "best-effort", command: ["rm", place.file] },
    ];
    const result = await place.rigel("launch", scratch.file("clear.json", { ...GATED, clients }));
    expect(result.status, result.stderr).toBe(0);
    expect(place.rows.map(({ name }) => name)).toEqual(["rigel_spin"]);
    expect(place.rows.map(({ program }) => program)).not.toContain(other?.program ?? "");
  });

  const NAMESPACE = ["unshare", ...(process.getuid?.() === 0 ? [] : ["--map-current-user", "--keep-caps"]), "--mount"];
  // Others than files may know of root.
  const mounts = ["passwd", "nsswitch.conf"].map((name) => `mount --bind /dev/null /etc/${name} && `).join("");
  const noUsers = [...NAMESPACE, "sh", "-c", `${mounts}exec "$@"`, "sh"];
  const cannotMount = Bun.which("unshare") === null || !Bun.spawnSync([...noUsers, "true"]).success;
  test.skipIf(cannotMount)("are found by who has no home, as containers may run under any number", () => {
    const temporary = join(scratch.path, "temporary");
    const run = (...environment: string[]): string => {
      const given = ["env", "-u", "HOME", "-u", "XDG_CACHE_HOME", `TMPDIR=${temporary}`, ...environment];
      const { stdout, stderr, exitCode } = Bun.spawnSync([...noUsers, ...given, ...commandLine(), "durations"]);
      expect(exitCode, stderr.toString()).toBe(0);
      return stdout.toString();
    };
    expect(run()).toContain(`kept in ${join(temporary, `rigel-${process.getuid?.()}`, "durations")} yet`);
    expect(run(`XDG_CACHE_HOME=${temporary}`)).toContain(`kept in ${join(temporary, "rigel", "durations")} yet`);
  });

  test("shows a command of several lines, and whatever a kernel is called, on one line each", async () => {
    const place = new Place();
    mkdirSync(place.folder, { recursive: true });
    const shape = { grid: [1, 1, 1], block: [1, 1, 1], duration_ns: 1000, samples: 1, used: "2026-01-01T00:00:00Z" };
    const program = "0".repeat(16);
    const command = "python -c import torch\nmain()";
    const rows = [
      { rigel_durations: 1, device: "GPU", driver: "1" },
      { key: program, program, command, name: "\u001b[2Jspin", ...shape },
      { program, command, length_ms: 2, waited_part: 0.5, requests: 1000, used: shape.used },
    ];
    writeFileSync(join(place.folder, "a.jsonl"), rows.map((row) => JSON.stringify(row)).join("\n"), { mode: 0o600 });
    const { stdout } = await place.rigel("durations");
    const [, own, , spin, requests, ...more] = stdout.split("\n");
    expect(own).toBe("  python -c import torch?main()");
    expect(spin).toEndWith("  ?[2Jspin <<<(1, 1, 1), (1, 1, 1)>>>");
    expect(requests).toEndWith(" 50% of that: python -c import torch?main()");
    expect(more).toEqual([""]);
  });

  test("what cannot be removed is told, and the rest is removed", async () => {
    const place = new Place();
    const file = (name: string): string => join(place.folder, `${name}.jsonl`);
    for (const name of ["a", "c"]) mkdirSync(file(name), { recursive: true });
    for (const name of ["b", "d"]) writeFileSync(file(name), "");
    const { stdout, stderr, status } = await place.rigel("durations", "--clear", "--json");
    expect(JSON.parse(stdout)).toEqual({ schema: 1, folder: place.folder, removed: [file("b"), file("d")] });
    expect(stderr.split("\n").slice(0, -1)).toEqual([
      expect.stringContaining(`${file("a")} cannot be removed (`),
      expect.stringContaining(`${file("c")} cannot be removed (`),
    ]);
    expect(readdirSync(place.folder)).toEqual(["a.jsonl", "c.jsonl"]);
    expect(status).toBe(1);
  });
});
