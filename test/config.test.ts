/** config.test.ts: every error in a configuration names the file, the field and what was expected; nothing is started. */

import { describe, expect, test } from "bun:test";
import { chmodSync, mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { Scratch, TINY_PROFILE, rigel, root } from "./rigel.ts";

const replay = { profile: "tiny.csv", iterations: 3 };
const high = { name: "serve", class: "high", replay };

/** What `rigel launch --dry-run` says to a configuration; the scratch folder's name is cut out. */
async function refused(config: string | object, files: Record<string, object> = {}): Promise<string[]> {
  using scratch = new Scratch();
  scratch.file("tiny.csv", TINY_PROFILE);
  for (const [name, content] of Object.entries(files)) scratch.file(name, content);
  const path = scratch.file("config.json", config);
  const { status, stdout, stderr } = await rigel("launch", path, "--dry-run", "--device", "simulated");
  expect({ status, stdout }, stderr).toEqual({ status: 2, stdout: "" });
  const lines = stderr.trimEnd().replaceAll(`${scratch.path}/`, "").split("\n");
  // Where a field is in such a file is told by a test of its own.
  return typeof config === "string"
    ? lines
    : lines.map((line) => line.replace(/^(rigel: config\.json):1:\d+: /, "$1: "));
}

describe.concurrent("a configuration is refused with the field and what was expected:", () => {
  test("malformed JSON, by line and column", async () => {
    expect(await refused('{\n  "clients": [\n    { "name": "a" "class": "high" }\n  ]\n}')).toEqual([
      'rigel: config.json:3:19: not valid JSON: expected "," or "}"',
    ]);
  });

  test("a field that is there twice, by line and column", async () => {
    expect(await refused('{\n  "clients": [\n    { "name": "a", "replay": {}, "n\\u0061me": "b" }\n  ]\n}')).toEqual([
      'rigel: config.json:3:34: expected each field once, got "n\\u0061me" again',
    ]);
  });

  test("a field, by line and column; a missing one by where it should be", async () => {
    const text = `{
  "durations_s": 3,
  "clients": [
    { "name": "a", "class": "high", "command": ["no-such-program-9b1"] },
    {
      "class": "best-effort",
      "replay": { "profile": "tiny.csv", "rate_per_s": "60" } }
  ]
}`;
    expect(await refused(text)).toEqual([
      "rigel: config.json:5:5: clients[1].name: expected text, but it is missing",
      'rigel: config.json:7:42: clients[1].replay.rate_per_s: expected a number, got "60"',
      expect.stringContaining("rigel: config.json:2:3: durations_s: unknown field; expected one of "),
    ]);
    const named = text
      .replace('"durations_s": 3,', "")
      .replace('"class": "b', '"name": "b", "class": "b')
      .replace('"60"', "60");
    expect(await refused(named)).toEqual([
      "rigel: config.json:4:49: clients[0].command[0]: expected a program on PATH, no-such-program-9b1 is not found",
    ]);
  });

  test("a field whose name has a dot in it, for itself", async () => {
    const text = `{
  "policy": { "name": "best" },
  "clients": [{ "name": "a", "class": "high", "command": ["true"], "env": { "A.B": 1 } }],
  "policy.name": "slo"
}`;
    expect(await refused(text)).toEqual([
      expect.stringContaining("rigel: config.json:2:15: policy.name: expected one of "),
      'rigel: config.json:3:77: clients[0].env["A.B"]: expected text, got 1',
      expect.stringContaining('rigel: config.json:4:3: ["policy.name"]: unknown field; expected one of '),
    ]);
  });

  test("what an option stands for, without a place", async () => {
    using scratch = new Scratch();
    scratch.file("tiny.csv", TINY_PROFILE);
    const path = scratch.file("config.json", { device: "simulated", clients: [high] });
    const { stderr } = await rigel("launch", path, "--dry-run", "--device", "99");
    expect(stderr).toStartWith(`rigel: ${path}: device: there is no GPU 99 here; `);
  });

  test("unknown fields, at every level", async () => {
    const lines = await refused({
      durations_s: 3,
      policy: { nam: "none" },
      clients: [{ ...high, replay: { ...replay, rps: 60 } }],
    });
    expect(lines).toHaveLength(3);
    expect(lines.join("\n")).toContain(
      "rigel: config.json: durations_s: unknown field; expected one of policy, duration_s,",
    );
    expect(lines.join("\n")).toContain(
      "rigel: config.json: policy.nam: unknown field; expected one of name, inflight,",
    );
    expect(lines.join("\n")).toContain(
      "rigel: config.json: clients[0].replay.rps: unknown field; expected one of profile, rate_per_s,",
    );
  });

  test("numbers out of range", async () => {
    expect(
      await refused({
        duration_s: 0,
        policy: { inflight: 1.5 },
        clients: [{ ...high, replay: { ...replay, rate_per_s: -5 } }],
      }),
    ).toEqual([
      "rigel: config.json: policy.inflight: expected a whole number, got 1.5",
      "rigel: config.json: duration_s: expected a number above 0, got 0",
      "rigel: config.json: clients[0].replay.rate_per_s: expected a number of at least 0.000001, got -5",
    ]);
  });

  test("policies: shares, weights and thresholds out of range", async () => {
    expect(
      await refused({
        policy: { name: "fast", min_share: 0.51, quantum_us: 99, sm_threshold: 0, dur_threshold: 0 },
        clients: [
          { ...high, weight: 0 },
          { ...high, name: "b", weight: 101 },
        ],
      }),
    ).toEqual([
      'rigel: config.json: policy.name: expected one of "none", "priority", "slo", "fair", "orion", got "fast"',
      "rigel: config.json: policy.min_share: expected a number of at most 0.5, got 0.51",
      "rigel: config.json: policy.quantum_us: expected a number of at least 100, got 99",
      "rigel: config.json: policy.sm_threshold: expected a number above 0, got 0",
      "rigel: config.json: policy.dur_threshold: expected a number above 0, got 0",
      "rigel: config.json: clients[0].weight: expected a number of at least 0.01, got 0",
      "rigel: config.json: clients[1].weight: expected a number of at most 100, got 101",
    ]);
    expect(await refused({ policy: { min_share: -0.1 }, clients: [high] })).toEqual([
      "rigel: config.json: policy.min_share: expected a number of at least 0, got -0.1",
    ]);
  });

  test("orion: programs without a profile, and other than one high client", async () => {
    const command = { class: "best-effort", command: ["true"] };
    expect(
      await refused({
        policy: { name: "orion" },
        clients: [
          { name: "a", ...command },
          { name: "b", ...command },
        ],
      }),
    ).toEqual([
      "rigel: config.json: clients: expected one client of class high under policy orion, whose rules are for one, got 0",
      ...[0, 1].map(
        (index) =>
          `rigel: config.json: clients[${index}].profile: expected a kernel profile under policy orion, which decides by what each ` +
          "kernel needs, but it is missing; name the program's profile, or choose another policy",
      ),
    ]);
    const missing = await refused({
      policy: { name: "orion" },
      clients: [high, { name: "a", ...command, profile: "absent.csv" }],
    });
    expect(missing).toHaveLength(1);
    expect(missing[0]).toStartWith(
      "rigel: config.json: clients[1].profile: absent.csv: cannot be read as a kernel profile",
    );
  });

  test("fair without a limit in flight", async () => {
    expect(await refused({ policy: { name: "fair", inflight: 0 }, clients: [high] })).toEqual([
      "rigel: config.json: policy.inflight: expected a limit of at least 1 under policy fair, got 0: without one the driver's " +
        "queue decides who is next",
    ]);
  });

  test("wrong types and missing fields", async () => {
    expect(await refused({ clients: [{ class: "higher", command: "python" }] })).toEqual([
      "rigel: config.json: clients[0].name: expected text, but it is missing",
      'rigel: config.json: clients[0].class: expected one of "high", "best-effort", got "higher"',
      'rigel: config.json: clients[0].command: expected a list, got "python"',
    ]);
  });

  test("no clients", async () => {
    expect(await refused({ clients: [] })).toEqual(["rigel: config.json: clients: expected at least 1 entry, got []"]);
  });

  test("a device that cannot be one", async () => {
    expect(await refused({ device: "gpu0", clients: [high] })).toEqual([
      'rigel: config.json: device: expected "auto", "simulated", a device index, or a UUID such as "GPU-…", got "gpu0"',
    ]);
  });

  test("both a command and a replay, or neither; a name used twice", async () => {
    expect(
      await refused({
        clients: [
          { ...high, command: ["true"] },
          { name: "b", class: "high" },
        ],
      }),
    ).toEqual([
      'rigel: config.json: clients[0]: expected either "command" or "replay", got both',
      'rigel: config.json: clients[1]: expected either "command" or "replay", got neither',
    ]);
    expect(await refused({ clients: [high, high] })).toEqual([
      "rigel: config.json: clients[1].name: expected a name that no other client has",
    ]);
  });

  test("arrivals without a rate, and a rate with a list of gaps", async () => {
    expect(
      await refused({
        clients: [
          { ...high, replay: { ...replay, arrivals: "poisson" } },
          { ...high, name: "b", replay: { ...replay, rate_per_s: 5, arrivals: "gaps.json" } },
        ],
      }),
    ).toEqual([
      'rigel: config.json: clients[0].replay.rate_per_s: expected a rate, as arrivals is "poisson"',
      "rigel: config.json: clients[1].replay.rate_per_s: expected no rate, as arrivals is a file with the gaps themselves",
    ]);
  });

  test("a missing profile, a missing program and a missing folder, all at once", async () => {
    const lines = await refused({
      clients: [
        { ...high, replay: { profile: "absent.csv" } },
        { name: "b", class: "best-effort", command: ["no-such-program-9b1"] },
        { name: "c", class: "best-effort", command: ["./no-such-program"] },
        { name: "d", class: "best-effort", command: ["true"], cwd: "absent" },
      ],
    });
    expect(lines).toHaveLength(4);
    expect(lines[0]).toStartWith(
      "rigel: config.json: clients[0].replay.profile: absent.csv: cannot be read as a kernel profile (ENOENT",
    );
    expect(lines[1]).toBe(
      "rigel: config.json: clients[1].command[0]: expected a program on PATH, no-such-program-9b1 is not found",
    );
    expect(lines[2]).toStartWith(
      "rigel: config.json: clients[2].command[0]: expected a program that can be executed, got ./no-such-program",
    );
    expect(lines[3]).toBe("rigel: config.json: clients[3].cwd: expected a folder that exists, got absent");
  });

  test("all that is wrong with one client, at once", async () => {
    const lines = await refused({
      compare: true,
      sharing: "time-slice",
      clients: [
        { ...high, profile: ["x.csv", "y.csv"], replay: { profile: ["absent.csv", "gone.csv"] } },
        { name: "b", class: "best-effort", command: ["no-such-program-9b1"], profile: "z.csv", sm_percent: 50 },
      ],
    });
    expect(lines.map((line) => /^rigel: config.json: clients\[(.*?): /.exec(line)?.[1])).toEqual([
      "0].profile[0]",
      "0].profile[1]",
      "0].replay.iterations",
      "0].replay.profile[0]",
      "0].replay.profile[1]",
      "1].command[0]",
      "1].profile",
      "1].sm_percent",
    ]);
  });

  test("one of several profiles, by its place in the list", async () => {
    const text = `{ "clients": [
  { "name": "a", "class": "high", "replay": { "profile": ["tiny.csv", "absent.csv"], "rate_per_s": 5 } },
  { "name": "b", "class": "best-effort", "command": ["true"], "profile": [
    "tiny.csv",
    "gone.csv"] },
  { "name": "c", "class": "best-effort", "replay": { "profile": ["lone.csv"] } }
] }`;
    expect(await refused(text)).toEqual([
      expect.stringMatching(/^rigel: config.json:2:71: clients\[0\].replay.profile\[1\]: absent.csv: cannot be read /),
      expect.stringMatching(/^rigel: config.json:5:5: clients\[1\].profile\[1\]: gone.csv: cannot be read /),
      expect.stringMatching(/^rigel: config.json:6:54: clients\[2\].replay.profile: lone.csv: cannot be read /),
    ]);
  });

  const LIST = "expected a path, or a list of 1 to 16 paths";
  test.each<[string, unknown, string]>([
    ["missing", undefined, `profile: ${LIST}, but it is missing`],
    ["a number", 7, `profile: ${LIST}, got 7`],
    ["one a number", ["tiny.csv", 7], `profile: ${LIST}, got ["tiny.csv",7]`],
    ["17", Array.from({ length: 17 }, () => "p"), `profile: ${LIST}, got ["p","p",`],
    ["an empty list", [], "profile: expected at least 1 entry, got []"],
    ["empty text", "", 'profile: expected at least 1 character, got ""'],
    ["one empty text", ["tiny.csv", ""], 'profile[1]: expected at least 1 character, got ""'],
  ])("profiles that are none: %s", async (_, profile, problem) => {
    const lines = await refused({ clients: [{ ...high, replay: { profile } }] });
    expect(lines).toEqual([expect.stringContaining(`rigel: config.json: clients[0].replay.${problem}`)]);
  });

  test("a comparison that would never end", async () => {
    expect(await refused({ compare: true, clients: [{ ...high, replay: { profile: "tiny.csv" } }] })).toEqual([
      "rigel: config.json: clients[0].replay.iterations: expected a number, or duration_s: alone, this client would never end",
    ]);
  });
});

function timed(arrivals: string): object {
  return { ...high, name: arrivals, replay: { ...replay, arrivals } };
}

describe.concurrent("what only looks like a configuration is refused:", () => {
  test("a number that is too large for one", async () => {
    expect(await refused('{ "duration_s": 1e999, "clients": [] }')).toContain(
      "rigel: config.json:1:3: duration_s: expected a number, got Infinity",
    );
  });

  test("nested deeper than anything could mean", async () => {
    const deep = "[".repeat(100_000) + "]".repeat(100_000);
    const lines = ["rigel: config.json: expected lists and objects nested at most 100 deep"];
    expect(await refused(deep)).toEqual(lines);
    expect(await refused(`{ "clients": [{ "name": ${deep} }] }`)).toEqual(lines);
  });

  test("text that is not UTF-8", async () => {
    using scratch = new Scratch();
    const path = join(scratch.path, "latin1.json");
    writeFileSync(path, Buffer.from('{ "clients": [{ "name": "\u00e9" }] }', "latin1"));
    const { status, stderr } = await rigel("launch", path, "--dry-run");
    expect(stderr).toBe(`rigel: ${path}: expected text in UTF-8; save the file in that encoding\n`);
    expect(status).toBe(2);
  });

  test("NUL characters, and names of variables that cannot be any", async () => {
    const client = { name: "a", class: "high", command: ["true", "a\0b"], cwd: "/\0", env: { "A=B": "1", C: "\0" } };
    expect(await refused({ clients: [client] })).toEqual([
      'rigel: config.json: clients[0].command[1]: expected text without NUL characters, got "a\\u0000b"',
      'rigel: config.json: clients[0].env.A=B: expected a name without "=" and NUL characters, got "A=B"',
      'rigel: config.json: clients[0].env.C: expected text without NUL characters, got "\\u0000"',
      'rigel: config.json: clients[0].cwd: expected text without NUL characters, got "/\\u0000"',
    ]);
  });

  test("arrivals that rigel-replay would not take", async () => {
    expect(
      await refused(
        { clients: [timed("zero.json"), timed("long.json"), timed("absent.json")] },
        { "zero.json": [0, 1e-10], "long.json": [1, 3601] },
      ),
    ).toEqual([
      "rigel: config.json: clients[0].replay.arrivals: zero.json: expected at least one gap greater than 0",
      "rigel: config.json: clients[1].replay.arrivals: long.json:1:4: [1]: expected a number of at most 3600, got 3601",
      expect.stringContaining("rigel: config.json: clients[2].replay.arrivals: absent.json: cannot be read"),
    ]);
  });

  test("a program that the kernel cannot start", async () => {
    using scratch = new Scratch();
    const client = { name: "a", class: "high", command: ["./broken"], cwd: "." };
    const path = scratch.file("config.json", { device: "simulated", clients: [client] });
    const field = `${path}:1:72: clients[0].command[0]`;
    const options = ["--class", "high", "--device", "simulated", "--segment", scratch.path];
    for (const [content, why] of [
      ["\0 neither a program nor a script", "(ENOEXEC: it is no program of this machine, "],
      ["#!/missing/interpreter\n", "(ENOENT: what its first line, or its header, names to run it with is not there)"],
    ] as const) {
      const broken = scratch.file("broken", content);
      chmodSync(broken, 0o700);
      const launched = await rigel("launch", path);
      expect(launched.stderr).toContain(`rigel: ${field}: expected a program that can be started, got ./broken ${why}`);
      const run = await rigel("run", ...options, "--", broken);
      expect(run.stderr).toContain(`rigel: rigel run: ${broken} cannot be started ${why}`);
      expect([launched.status, run.status]).toEqual([2, 2]);
    }
  });
});

test("fields that the policy does not read have a note", async () => {
  using scratch = new Scratch();
  scratch.file("tiny.csv", TINY_PROFILE);
  const policy = { preempt: false, stop_us: 0, min_share: 0.1, quantum_us: 1000, sm_threshold: 20 };
  const gate = { inflight: 4, unit_us: 50, starvation_us: 50_000 };
  const path = scratch.file("config.json", { policy: { ...policy, ...gate }, clients: [{ ...high, weight: 2 }] });
  const noted = async (...flags: string[]) =>
    (await rigel("launch", path, "--dry-run", "--device", "simulated", ...flags)).stdout
      .split("\n")
      .filter((line) => line.startsWith("note"));
  expect(await noted()).toEqual([
    "note     policy.quantum_us: has no effect under policy slo, only under fair",
    "note     policy.sm_threshold: has no effect under policy slo, only under orion",
    "note     serve: weight has no effect under policy slo, only under fair",
    "note     policy.inflight: in force only until policy slo has seen steady requests, which then uses settings of its own",
  ]);
  expect(await noted("--policy", "fair")).toEqual([
    "note     policy.preempt: has no effect under policy fair, only under priority and slo",
    "note     policy.stop_us: has no effect under policy fair, only under priority and slo",
    "note     policy.min_share: has no effect under policy fair, only under priority and slo",
    "note     policy.sm_threshold: has no effect under policy fair, only under orion",
  ]);
  expect(
    (await noted("--policy", "none")).filter((line) => Object.keys(gate).some((field) => line.includes(field))),
  ).toEqual([
    "note     policy.inflight: has no effect under policy none, only under priority, slo, fair and orion",
    "note     policy.unit_us: has no effect under policy none, only under priority, slo and fair",
    "note     policy.starvation_us: has no effect under policy none, only under priority, slo, fair and orion",
  ]);
});

test("what a terminal would obey is shown, and not obeyed", async () => {
  using scratch = new Scratch();
  const client = { name: "a", class: "high", command: ["true", "it's\u001b[2J\n"] };
  const right = scratch.file("right.json", { device: "simulated", clients: [client] });
  const { stdout } = await rigel("launch", right, "--dry-run");
  expect(stdout).toContain("  run    true $'it\\'s\\u001b[2J\\u000a'\n");
  const wrong = scratch.file("wrong.json", { device: "simulated", clients: [{ ...client, cwd: "/no\u001b[2J" }] });
  const { stderr } = await rigel("launch", wrong);
  expect(stderr).toEndWith(": clients[0].cwd: expected a folder that exists, got /no?[2J\n");
});

test("a folder that its user may not enter is told of as that", async () => {
  using scratch = new Scratch();
  const folder = join(scratch.path, "locked");
  mkdirSync(folder);
  chmodSync(folder, 0);
  chmodSync(scratch.path, 0o755);
  const script = `
    import { dlopen } from "bun:ffi";
    import { folderProblem } from ${JSON.stringify(join(root, "src", "path.ts"))};
    // Nobody in particular, should this be root.
    dlopen("libc.so.6", { setuid: { args: ["u32"], returns: "i32" } }).symbols.setuid(65534);
    console.log(JSON.stringify([${JSON.stringify(folder)}, "/", "/proc/self/status"].map((path) => folderProblem(path) ?? null)));
  `;
  await using child = Bun.spawn([process.execPath, "-e", script], { stdio: ["ignore", "pipe", "inherit"] });
  expect(await child.stdout.json()).toEqual([
    "expected a folder that you may enter",
    null,
    "expected a folder that exists",
  ]);
});

test("a comparison of a command that may never end has a note", async () => {
  using scratch = new Scratch();
  const path = scratch.file("config.json", { clients: [{ name: "a", class: "high", command: ["true"] }] });
  const { stdout } = await rigel("launch", path, "--dry-run", "--compare", "--device", "simulated");
  expect(stdout).toContain("note     a: alone it runs until it ends by itself; set duration_s");
});

test("a configuration that is not there is named", async () => {
  const { status, stderr } = await rigel("launch", "/nonexistent/jobs.json");
  expect(stderr).toContain("/nonexistent/jobs.json: cannot be read");
  expect(status).toBe(2);
});

test("a device that is not there is named, with those that are", async () => {
  using scratch = new Scratch();
  scratch.file("tiny.csv", TINY_PROFILE);
  const path = scratch.file("config.json", { clients: [high] });
  const { status, stderr } = await rigel("launch", path, "--device", "GPU-00000000-dead");
  expect(stderr).toContain(`${path}: device: there is no GPU GPU-00000000-dead here`);
  expect(status).toBe(1);
});

test.each([
  [["launch", "--inflight", "-1"], "Expected a whole number from 0 to 4096."],
  [["launch", "--duration", "0"], "Expected a number above 0."],
  [["launch", "--policy", "round-robin"], "Allowed choices are none, priority, slo, fair, orion."],
  [["launch", "--mps", "maybe"], "Allowed choices are on, off."],
  [["launch", "--device", "cuda:0"], "Expected auto, simulated, a device index, or a UUID"],
  [["launch", "--frobnicate"], "unknown option '--frobnicate'"],
  [["lunch"], "unknown command 'lunch'"],
])("%j is a usage error", async (args, message) => {
  const { status, stdout, stderr } = await rigel(...args);
  expect(stderr).toContain(message);
  expect({ status, stdout }).toEqual({ status: 2, stdout: "" });
});

test("--help shows an example and --version the version", async () => {
  const help = await rigel("launch", "--help");
  expect(help.stdout).toContain('"clients": [');
  expect(help.status).toBe(0);
  expect((await rigel("--version")).stdout).toMatch(/^\d+\.\d+\.\d+\n$/);
});
