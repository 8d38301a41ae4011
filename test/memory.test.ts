/** memory.test.ts: limits of device memory: what a configuration may say, what the launcher notes, and whom they protect. */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { clientChange } from "../src/control.ts";
import { notesOnLimits, sizeText } from "../src/memory.ts";
import { Scratch, TINY_PROFILE, reportOf, rigel, start, withoutPlaces } from "./rigel.ts";

let scratch: Scratch;
let program: string;

/**
 * Two programs in one. `take FILE...` waits for the files, then needs 8 GiB: status 9 without them. `fill FILE` takes one
 * GiB after the other until there is no more, says how many it got, makes the file, and waits to be stopped.
 */
const PROGRAM = `
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static void *cuda;
#define F(name, params) int (*name) params = (int (*) params)dlsym(cuda, #name); if (!name) return 3
int main(int argc, char **argv)
{
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda || argc < 3)
        return 3;
    F(cuInit, (unsigned));
    F(cuDevicePrimaryCtxRetain, (void **, int));
    F(cuCtxSetCurrent, (void *));
    F(cuMemAlloc_v2, (unsigned long long *, size_t));
    F(cuMemGetInfo_v2, (size_t *, size_t *));
    void *context;
    size_t left, total, gib = 1ul << 30;
    unsigned long long p;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) || cuMemGetInfo_v2(&left, &total))
        return 4;
    printf("total %zu\\n", total / gib);
    fflush(stdout);
    if (strcmp(argv[1], "take") == 0) {
        for (int i = 2; i < argc; i++)
            while (access(argv[i], F_OK) != 0)
                usleep(10000);
        return cuMemAlloc_v2(&p, 8 * gib) ? 9 : 0;
    }
    int got = 0;
    while (cuMemAlloc_v2(&p, gib) == 0)
        got++;
    printf("got %d\\n", got);
    fflush(stdout);
    close(open(argv[2], O_CREAT | O_WRONLY, 0600));
    for (;;)
        pause();
}
`;

beforeAll(async () => {
  scratch = new Scratch();
  scratch.file("tiny.csv", TINY_PROFILE);
  program = join(scratch.path, "memory");
  const command = ["cc", "-o", program, scratch.file("memory.c", PROGRAM), "-ldl"];
  expect(await Bun.spawn(command, { stdout: "inherit", stderr: "inherit" }).exited).toBe(0);
});
afterAll(() => scratch[Symbol.dispose]());

const replay = { profile: "tiny.csv", iterations: 3 };
let configs = 0;

/** A configuration on the simulated GPU with 24 GiB. */
function config(clients: object[], rest: object = {}): string {
  return scratch.file(`config-${configs++}.json`, {
    device: "simulated",
    simulated: { preset: "l4" },
    clients,
    ...rest,
  });
}

function client(name: string, memory?: string | number, kind = name === "serve" ? "high" : "best-effort"): object {
  return { name, class: kind, replay, ...(memory !== undefined && { memory }) };
}

/** One high client that needs 8 of 24 GiB once two others have taken all they can get. */
function contest(limit: string | undefined): string {
  const full = ["a", "b"].map((name) => join(scratch.path, `full-${configs}-${name}`));
  const memory = limit === undefined ? {} : { memory: limit };
  return config([
    { name: "serve", class: "high", command: [program, "take", ...full], ...memory },
    ...["a", "b"].map((name, index) => ({
      name,
      class: "best-effort",
      command: [program, "fill", full[index] ?? ""],
      ...memory,
    })),
  ]);
}

describe.concurrent("clients[].memory", () => {
  test("takes sizes, shares of the device and bytes", async () => {
    const path = config([
      client("serve", "1.5GiB"),
      client("a", "512 MiB"),
      client("b", "30%"),
      client("c", 123_456_789),
      client("d"),
    ]);
    const { stdout } = await rigel("launch", path, "--dry-run", "--json");
    const { clients, notes } = JSON.parse(stdout);
    const limits = clients.map(({ memory_bytes }: { memory_bytes?: number }) => memory_bytes);
    expect(limits).toEqual([1.5 * 2 ** 30, 2 ** 29, Math.floor(0.3 * 24 * 2 ** 30), 123_456_789, undefined]);
    expect(notes).toEqual([]);
    expect((await rigel("launch", path, "--dry-run")).stdout).toContain("memory at most 1.50 GiB");
  });

  test("says of what is too large how much there can be", async () => {
    const many = `1${"0".repeat(400)}KiB`;
    const path = config(
      ["9999999TiB", "8192TiB", many, "8191.9 TiB", "9999999KiB"].map((memory, index) => client(`c${index}`, memory)),
    );
    const { status, stderr } = await rigel("launch", path, "--dry-run");
    const shown = ['"9999999TiB"', '"8192TiB"', `${JSON.stringify(many).slice(0, 77)}…`];
    expect(withoutPlaces(stderr).trimEnd().split("\n")).toEqual(
      shown.map((got, index) => `rigel: ${path}: clients[${index}].memory: expected less than 8192TiB, got ${got}`),
    );
    expect(status).toBe(2);
    expect(() => clientChange({ memory: "9999999TiB" }, "rigel set")).toThrow(
      'rigel set: memory: expected less than 8192TiB, got "9999999TiB"',
    );
    expect(() => clientChange({ memory: "40GB" }, "rigel set")).toThrow('a number of bytes, or "none", got "40GB"');
  });

  test("refuses everything else, and names its place", async () => {
    const wrong = ["40GB", "0GiB", "0.00 GiB", "0%", "101%", "-5MiB", "lots", "", "5", 0, -1, 1.5, true, null];
    const path = config(wrong.map((memory, index) => ({ ...client(`c${index}`), memory })));
    const { status, stdout, stderr } = await rigel("launch", path, "--dry-run");
    const size =
      'expected a size such as "40GiB" or "512MiB", a share of the device such as "30%", or a number of bytes';
    const expected = (value: unknown): string => (value === 0 || value === -1 ? "expected a number above 0" : size);
    expect(withoutPlaces(stderr).trimEnd().split("\n")).toEqual(
      wrong.map(
        (memory, index) =>
          `rigel: ${path}: clients[${index}].memory: ${expected(memory)}, got ${JSON.stringify(memory)}`,
      ),
    );
    expect({ status, stdout }).toEqual({ status: 2, stdout: "" });
  });

  test("has notes: no effect, too small, more than the device in all", async () => {
    const path = config([client("serve", "20GiB"), client("a", "3GiB"), client("b", "30GiB"), client("c", "1MiB")]);
    const { stdout } = await rigel("launch", path, "--dry-run", "--json");
    expect(JSON.parse(stdout).notes).toEqual([
      "b: its memory limit of 30.0 GiB has no effect: NVIDIA L4 (simulated) has 24.0 GiB in all",
      expect.stringMatching(/^c: a memory limit of 1\.00 MiB leaves CUDA libraries no room to work; /),
      "the memory limits of serve, a, b and c add up to 47.0 GiB, NVIDIA L4 (simulated) has 24.0 GiB: " +
        "one can still leave another without memory",
    ]);
  });
});

test.each([
  [0, "0 B"],
  [1023, "1023 B"],
  [1024, "1.00 KiB"],
  [1023 * 2 ** 10, "1023 KiB"],
  [2 ** 20 - 1, "1.00 MiB"],
  [9.996 * 2 ** 20, "10.0 MiB"],
  [99.96 * 2 ** 20, "100 MiB"],
  [2 ** 30 - 1, "1.00 GiB"],
  [2 ** 40 - 1, "1.00 TiB"],
])("%d bytes are shown as %s", (bytes, text) => {
  expect(sizeText(bytes)).toBe(text);
});

const gpu = (uuid: string) => ({ name: "H100", uuid, memory_bytes: 80 * 2 ** 30 });

test("limits of clients that use several GPUs are told by all of them", () => {
  const both = [gpu("a"), gpu("b")] as const;
  const note = (name: string, devices: readonly ReturnType<typeof gpu>[], gib: number) => ({
    name,
    devices,
    memory_bytes: gib * 2 ** 30,
  });
  expect(notesOnLimits([note("train", both, 120)])).toEqual([]);
  expect(notesOnLimits([note("train", both, 161)])).toEqual([
    "train: its memory limit of 161 GiB has no effect: its GPUs have 160 GiB in all",
  ]);
  expect(notesOnLimits([note("train", [gpu("a")], 81)])).toEqual([
    "train: its memory limit of 81.0 GiB has no effect: H100 has 80.0 GiB in all",
  ]);
  expect(notesOnLimits([note("train", both, 60), note("serve", [gpu("b")], 30)])).toEqual([
    "the memory limits of train and serve add up to 90.0 GiB, H100 has 80.0 GiB: one can still leave another without memory",
  ]);
});

describe("a launch", () => {
  test("without limits, the others leave the high client none", async () => {
    const result = await rigel("launch", contest(undefined), "--json");
    const { clients, notes } = reportOf(result);
    expect(clients[0]?.exit_code).toBe(9);
    expect(clients.map(({ memory }) => memory.limit_bytes)).toEqual([null, null, null]);
    // What others have is in the peak of nobody else.
    const [serve, a, b] = clients.map(({ memory }) => memory.peak_bytes / 2 ** 30);
    expect([serve, (a ?? 0) + (b ?? 0)]).toEqual([0, 24]);
    expect(notes.join("\n")).not.toContain("refused");
    expect(result.status).toBe(9);
  });

  test("with limits, it gets what it needs, and the report says who was refused", async () => {
    const result = await rigel("launch", contest("8GiB"), "--json");
    const { clients, notes } = reportOf(result);
    expect(clients.map(({ memory }) => memory)).toEqual([
      { limit_bytes: 2 ** 33, used_bytes: 0, peak_bytes: 2 ** 33, denied: 0 },
      { limit_bytes: 2 ** 33, used_bytes: 2 ** 33, peak_bytes: 2 ** 33, denied: 1 },
      { limit_bytes: 2 ** 33, used_bytes: 2 ** 33, peak_bytes: 2 ** 33, denied: 1 },
    ]);
    expect(notes.filter((note) => note.includes("refused"))).toEqual(
      ["a", "b"].map(
        (name) =>
          `${name}: 1 allocation was refused at its memory limit of 8.00 GiB; the last one asked for 1.00 GiB with ` +
          "8.00 GiB in use",
      ),
    );
    expect(result.stderr.match(/\| total 8$/gm)).toHaveLength(3);
    expect(result.status).toBe(0);
  });

  test("processes of one client share its limit, and the table shows it", async () => {
    using folder = new Scratch();
    const [x, y] = [join(folder.path, "x"), join(folder.path, "y")];
    // Both hold what they have got until both have tried.
    const script =
      `${program} fill ${x} & a=$!; ${program} fill ${y} & b=$!; ` +
      `while ! [ -e ${x} ] || ! [ -e ${y} ]; do sleep 0.05; done; kill $a $b; wait; true`;
    const pair = { name: "pair", class: "high", command: ["sh", "-c", script], memory: "25%" };
    const { status, stdout, stderr } = await rigel("launch", config([pair]));
    const got = [...stderr.matchAll(/\| got (\d+)$/gm)].map(([, count]) => Number(count));
    expect(got.length, stderr).toBe(2);
    expect((got[0] ?? 0) + (got[1] ?? 0)).toBe(6);
    expect(stdout).toMatch(/^device memory +limit +in use +peak +refused$/m);
    expect(stdout).toMatch(/^pair +6\.00 GiB +\S+ \S+ +6\.00 GiB +2$/m);
    expect(stdout).toContain("note: pair: 2 allocations were refused at its memory limit of 6.00 GiB");
    expect(status).toBe(0);
  });

  test.each(["none", "20GiB"])("tells refusals at a limit that was changed to %s since", async (memory) => {
    using folder = new Scratch();
    const [full, changed] = [join(folder.path, "full"), join(folder.path, "changed")];
    const path = config([
      { name: "serve", class: "high", command: [program, "take", full, changed] },
      { name: "a", class: "best-effort", command: [program, "fill", full], memory: "8GiB" },
    ]);
    await using launch = start(["launch", path, "--json", "--segment", folder.path]);
    const ended = Promise.all([launch.stdout.text(), launch.stderr.text(), launch.exited]);
    while (!existsSync(full) && launch.exitCode === null) await Bun.sleep(20);
    expect((await rigel("set", "a", `memory=${memory}`, "--segment", folder.path)).status).toBe(0);
    folder.file("changed", "");
    const [stdout, stderr, status] = await ended;
    const { clients, notes } = reportOf({ stdout, stderr, status });
    expect(clients[1]?.memory.denied).toBe(1);
    expect(notes.filter((note) => note.includes("refused"))).toEqual([
      "a: 1 allocation was refused at the memory limit that it had then; the last one asked for 1.00 GiB with 8.00 GiB in use",
    ]);
  });

  test("without any limit the table says nothing of memory", async () => {
    const { stdout } = await rigel("launch", config([client("serve")]));
    expect(stdout).not.toContain("device memory");
  });
});
