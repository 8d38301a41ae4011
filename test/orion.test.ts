/** orion.test.ts: a launch configuration of the Orion scheduler is read as it is (S13, S17). */

import { describe, expect, test } from "bun:test";
import { z } from "zod";
import { Scratch, rigel } from "./rigel.ts";

const KERNELS = "Name,Profile,Memory_footprint,SM_usage,Duration\nsgemm,1,0,80,100000\nrelu,0,0,20,50000\n";

const plannedSchema = z.object({
  clients: z.array(z.object({ name: z.string(), class: z.string(), argv: z.array(z.string()) })),
  notes: z.array(z.string()),
});

async function planned(config: object, files: Record<string, string | object> = {}) {
  using scratch = new Scratch();
  scratch.file("k.csv", KERNELS);
  for (const [name, content] of Object.entries(files)) scratch.file(name, content);
  const path = scratch.file("orion.json", config);
  const { stdout, stderr } = await rigel("launch", path, "--dry-run", "--json", "--device", "simulated");
  expect(stdout, stderr).toStartWith("{");
  const { clients, notes } = plannedSchema.parse(JSON.parse(stdout.replaceAll(`${scratch.path}/`, "")));
  return { clients: clients.map(({ argv, ...client }) => ({ ...client, argv: argv.slice(1).join(" ") })), notes };
}

describe.concurrent("Orion's configuration", () => {
  test("as users wrote it, with a count that does not fit the file", async () => {
    expect(
      await planned({
        clients: [
          {
            arch: "gpt",
            kernel_file: "k.csv",
            num_kernels: 2034,
            num_iters: 10,
            args: { model_name: "gpt", batchsize: 4, sequence_len: 512 },
          },
        ],
      }),
    ).toEqual({
      clients: [{ name: "gpt", class: "high", argv: "--profile k.csv --iterations 10 --seed 1" }],
      notes: [
        "gpt: the configuration states 2034 kernels, k.csv has 2; what the file has is replayed, nothing waits for a count",
      ],
    });
  });

  test("as a bare list: the last client is high, rates and arrivals are taken over", async () => {
    const args = { model_name: "resnet50", dummy_data: true, train: false };
    const plain = { arch: "resnet50", kernel_file: "k.csv", num_kernels: 2, num_iters: 5 };
    expect(
      await planned(
        [
          { ...plain, args: { ...args, rps: 0, train: true } },
          {
            ...plain,
            args: { ...args, rps: 30, uniform: true },
            additional_kernel_file: "k2.csv",
            additional_num_kernels: 7,
          },
          { ...plain, args: { ...args, rps: 15, uniform: false } },
          { ...plain, arch: "bert", args: { ...args, rps: 15, input_file: "gaps.json" } },
        ],
        { "gaps.json": [0.1, 0.2] },
      ),
    ).toEqual({
      clients: [
        { name: "resnet50", class: "best-effort", argv: "--profile k.csv --iterations 5 --seed 1" },
        {
          name: "resnet50-2",
          class: "best-effort",
          argv: "--profile k.csv --rate 30 --arrivals uniform --iterations 5 --seed 2",
        },
        {
          name: "resnet50-3",
          class: "best-effort",
          argv: "--profile k.csv --rate 15 --arrivals poisson --iterations 5 --seed 3",
        },
        { name: "bert", class: "high", argv: "--profile k.csv --arrivals gaps.json --iterations 5 --seed 4" },
      ],
      notes: [
        "resnet50-2: additional_kernel_file is not used: Orion needs it to follow a program kernel by kernel, Rigel replays kernel_file alone",
        "bert: args.rps is not used, as input_file gives the arrivals",
      ],
    });
  });

  test("with a wrong field is refused by Orion's own names", async () => {
    using scratch = new Scratch();
    const path = scratch.file("orion.json", { clients: [{ arch: "gpt", num_iters: -1, args: { rps: "fast" } }] });
    expect(await rigel("launch", path, "--dry-run")).toEqual({
      status: 2,
      stdout: "",
      stderr: [
        `rigel: ${path}:1:13: clients[0].kernel_file: expected text, but it is missing`,
        `rigel: ${path}:1:27: clients[0].num_iters: expected a number above 0, got -1`,
        `rigel: ${path}:1:50: clients[0].args.rps: expected 0 or a number from 0.000001 to 1000000, got "fast"`,
        "",
      ].join("\n"),
    });
  });

  test("with what only Rigel would refuse is refused by Orion's own names, too", async () => {
    using scratch = new Scratch();
    const client = { arch: "gpt", kernel_file: "k.csv" };
    const path = scratch.file("orion.json", [
      { ...client, args: { rps: 1e7 } },
      { ...client, args: { rps: -1, input_file: "a\0b" } },
      { ...client, kernel_file: "a\0b" },
    ]);
    expect((await rigel("launch", path, "--dry-run")).stderr.split("\n")).toEqual([
      `rigel: ${path}:1:46: [0].args.rps: expected a number of at most 1000000, got 10000000`,
      `rigel: ${path}:1:107: [1].args.rps: expected a number of at least 0.000001, got -1`,
      `rigel: ${path}:1:116: [1].args.input_file: expected text without NUL characters, got "a\\u0000b"`,
      `rigel: ${path}:1:156: [2].kernel_file: expected text without NUL characters, got "a\\u0000b"`,
      "",
    ]);
    const crowd = scratch.file("crowd.json", { clients: Array.from({ length: 65 }, () => client) });
    const { status, stderr } = await rigel("launch", crowd, "--dry-run");
    expect(stderr).toStartWith(`rigel: ${crowd}:1:2: clients: expected at most 64 entries, got`);
    expect(status).toBe(2);
  });

  test("with names that clients cannot have, and fields beside the clients", async () => {
    const plain = { kernel_file: "k.csv", num_iters: 5 };
    const long = "x".repeat(70);
    const { clients, notes } = await planned({
      policy: "orion",
      clients: [
        { ...plain, arch: "a/b" },
        { ...plain, arch: "a-b" },
        { ...plain, arch: "a-b-2" },
        { ...plain, arch: long },
        { ...plain, arch: long },
      ],
    });
    expect(clients.map(({ name }) => name)).toEqual([
      "a-b",
      "a-b-2",
      "a-b-2-2",
      long.slice(0, 63),
      `${long.slice(0, 61)}-2`,
    ]);
    expect(notes.join("\n")).toContain("policy: not used");
    expect(notes.join("\n")).toContain('a-b: stands for arch "a/b"');
  });

  test("names its own fields when a file is missing", async () => {
    using scratch = new Scratch();
    const path = scratch.file("orion.json", [{ arch: "gpt", kernel_file: "absent.csv" }]);
    const { status, stderr } = await rigel("launch", path, "--dry-run", "--device", "simulated");
    expect(stderr).toStartWith(`rigel: ${path}:1:16: [0].kernel_file: ${scratch.path}/absent.csv: cannot be read`);
    expect(status).toBe(2);
  });
});
