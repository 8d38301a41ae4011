/**
 * bench-matrix.ts: what `rigel bench` can run: the programs, pairs of them, and the ways of running a pair.
 *
 * Names only and what they stand for; nothing here starts anything.
 */

import { z } from "zod";
import { type Policy, policySchema } from "./config.ts";
import { RigelError, reason } from "./errors.ts";
import { parse } from "./schema.ts";
import { ALONE } from "./bench-stats.ts";

/** One program: src/python/workload.py with these arguments, or on the simulated GPU the replay of a recorded profile. */
export interface Program {
  name: string;
  class: "high" | "best-effort";
  /** In words, for people. */
  title: string;
  args: readonly string[];
  /** File in profiles/, where one was recorded. */
  profile?: string;
}

const train = (model: string, batch: number, ...more: string[]): string[] => [
  ..."--mode train --model".split(" "),
  model,
  "--batch",
  String(batch),
  ...more,
];
/** `batch`: a size, or several joined by commas, of which each request has one by chance. */
const serve = (model: string, batch: number | string, ...more: string[]): string[] => [
  ..."--mode infer --model".split(" "),
  model,
  "--batch",
  String(batch),
  ...more,
];

const PROGRAMS: readonly Program[] = [
  {
    name: "resnet50",
    class: "high",
    title: "ResNet-50 inference, batch 4",
    args: serve("resnet50", 4),
    profile: "h200-resnet50-infer-bs4.csv",
  },
  {
    name: "bert",
    class: "high",
    title: "BERT-base inference, batch 2, 128 tokens",
    args: serve("bert", 2, "--seq", "128"),
    profile: "h200-bert-infer-bs2x128.csv",
  },
  {
    name: "resnet50-graph",
    class: "high",
    title: "ResNet-50 inference, batch 4, CUDA graph",
    args: serve("resnet50", 4, "--graph"),
  },
  {
    name: "resnet50-bytes",
    class: "high",
    title: "ResNet-50 inference, batch 4, images made of bytes on the host, CUDA graph",
    args: serve("resnet50", 4, "--graph", "--prepare"),
  },
  {
    name: "resnet50-announced",
    class: "high",
    title: "ResNet-50 inference, batch 4, images made of bytes on the host, announced before that, CUDA graph",
    args: serve("resnet50", 4, "--graph", "--prepare", "--announce"),
  },
  {
    name: "resnet50-served",
    class: "high",
    title: "ResNet-50 inference, batch 4, images that come as bytes over a connection, CUDA graph",
    args: serve("resnet50", 4, "--graph", "--prepare", "--served"),
  },
  {
    name: "bert-graph",
    class: "high",
    title: "BERT-base inference, batch 2, 128 tokens, CUDA graph",
    args: serve("bert", 2, "--seq", "128", "--graph"),
  },
  {
    name: "bert-served",
    class: "high",
    title: "BERT-base inference, batch 2, 128 tokens that come over a connection, CUDA graph",
    args: serve("bert", 2, "--seq", "128", "--graph", "--served"),
  },
  {
    name: "resnet50-mixed",
    class: "high",
    title: "ResNet-50 inference, batch 1, 4 or 12 by chance",
    args: serve("resnet50", "1,4,12"),
  },
  {
    name: "bert-mixed",
    class: "high",
    title: "BERT-base inference, batch 1, 2 or 4 by chance, 128 tokens",
    args: serve("bert", "1,2,4", "--seq", "128"),
  },
  {
    name: "bert-texts",
    class: "high",
    title: "BERT-base inference, batch 2, 24 to 384 tokens by chance",
    args: serve("bert", 2, "--seq", Array.from({ length: 16 }, (_, n) => 24 * (n + 1)).join(",")),
  },
  {
    name: "bert-mixed-graph",
    class: "high",
    title: "BERT-base inference, batch 1, 2 or 4 by chance, 128 tokens, a CUDA graph each",
    args: serve("bert", "1,2,4", "--seq", "128", "--graph"),
  },
  {
    name: "bert-mixed-served",
    class: "high",
    title: "BERT-base inference, batch 1, 2 or 4 by chance, 128 tokens that come over a connection, a CUDA graph each",
    args: serve("bert", "1,2,4", "--seq", "128", "--graph", "--served"),
  },
  {
    name: "gpt2-decode",
    class: "high",
    title: "GPT-2 decoding, batch 4, 4 tokens a request after 256, CUDA graph",
    args: serve("gpt2", 4, "--seq", "256", "--decode", "4"),
  },
  {
    name: "gpt2-stream",
    class: "high",
    title: "GPT-2 decoding, batch 4, 4 tokens a request after 256, kernel by kernel, each read back before the next",
    args: serve("gpt2", 4, "--seq", "256", "--decode", "4", "--stream"),
  },
  {
    name: "resnet50-train",
    class: "best-effort",
    title: "ResNet-50 training, batch 64",
    args: train("resnet50", 64),
    profile: "h200-resnet50-train-bs64.csv",
  },
  {
    name: "bert-train",
    class: "best-effort",
    title: "BERT-base training, batch 32, 128 tokens",
    args: train("bert", 32),
  },
  {
    name: "gpt2-train",
    class: "best-effort",
    title: "GPT-2 training, batch 8, 512 tokens",
    args: train("gpt2", 8, "--seq", "512"),
    profile: "h200-gpt2-train-bs8x512.csv",
  },
  {
    name: "mobilenet-train",
    class: "best-effort",
    title: "MobileNetV2 training, batch 64",
    args: train("mobilenetv2", 64),
    profile: "h200-mobilenetv2-train-bs64.csv",
  },
  {
    name: "gpt2-train-graph",
    class: "best-effort",
    title: "GPT-2 training, batch 8, 512 tokens, each step one CUDA graph",
    args: train("gpt2", 8, "--seq", "512", "--graph"),
  },
];

/** A high program and those beside it. */
export interface Pair {
  /** The names, joined by plus signs. */
  name: string;
  high: Program;
  best: readonly Program[];
}

/**
 * Most telling first: of requests whose time is the GPU's, as far as programs can run, one of each kind, and then of those of which the host's
 * is most.
 */
const FIRST = [
  "resnet50-served+resnet50-train",
  "bert-served+gpt2-train",
  "gpt2-decode+gpt2-train-graph",
  "resnet50-served+resnet50-train+gpt2-train",
  "resnet50+resnet50-train",
  "bert+gpt2-train",
];
const TRIPLE = "resnet50+resnet50-train+gpt2-train";

/** Every pair that can run here, most telling first, and the triples. */
export function allPairs(simulated: boolean): Pair[] {
  const product = namesOf("high").flatMap((high) => pairsOf(high, simulated));
  return [...new Set([...FIRST, ...product, TRIPLE])]
    .map((name) => pairOf(name))
    .filter(({ high, best }) => !simulated || [high, ...best].every(({ profile }) => profile !== undefined));
}

/** `--pairs`: names joined by plus signs, separated by commas, or a high program's for all pairs of it; `all`; undefined where it was not given. */
export function choosePairs(text: string | undefined, simulated: boolean): Pair[] {
  if (text === undefined || text === "all") return allPairs(simulated);
  const names = text
    .split(",")
    .map((name) => name.trim())
    .flatMap((name) => (namesOf("high").includes(name) ? pairsOf(name, simulated) : [name]));
  return [...new Set(names)].map((name) => {
    const pair = pairOf(name);
    const missing = [pair.high, ...pair.best].find(({ profile }) => profile === undefined);
    if (simulated && missing)
      throw new RigelError(
        "config",
        `--pairs: no profile of ${missing.name} was recorded, so the simulated GPU cannot run it; it has ` +
          `${allPairs(true)
            .map((one) => one.name)
            .join(", ")}`,
      );
    return pair;
  });
}

/** The names of those of a high program with one best-effort one that can run here. */
function pairsOf(high: string, simulated: boolean): string[] {
  return PROGRAMS.filter((program) => program.class === "best-effort" && (!simulated || program.profile)).map(
    ({ name }) => `${high}+${name}`,
  );
}

function namesOf(kind: Program["class"]): string[] {
  return PROGRAMS.filter((program) => program.class === kind).map(({ name }) => name);
}

function pairOf(name: string): Pair {
  const [first = "", ...rest] = name.split("+");
  const high = programOf(name, first, "high");
  const best = rest.map((part) => programOf(name, part, "best-effort"));
  if (new Set(best).size < best.length)
    throw new RigelError("config", `--pairs: expected each best-effort program once, got "${name}"`);
  return { name, high, best };
}

function programOf(pair: string, name: string, kind: Program["class"]): Program {
  const found = PROGRAMS.find((program) => program.name === name && program.class === kind);
  if (found) return found;
  throw new RigelError(
    "config",
    `--pairs: ${pair}: expected a ${kind} program, one of ${namesOf(kind).join(", ")}, got "${name}"`,
  );
}

/* ---- Policies and ways */

/** `--policies` and `--policy-json`: each policy by the name that the ways carry. Where none is named, the default one, and `besides`. */
export function choosePolicies(
  names: string | undefined,
  extras: readonly string[],
  besides: readonly Policy["name"][] = ["priority"],
): Map<string, Policy> {
  const given = new Map<string, object>();
  for (const [name, policy] of extras.map(extraOf)) {
    if (given.has(name)) throw new RigelError("config", `--policy-json: expected each policy once, got ${name} again`);
    given.set(name, policy);
  }
  const chosen = names?.split(",").map((name) => name.trim()) ?? [
    policySchema.parse({}).name,
    ...besides,
    ...given.keys(),
  ];
  const policies = new Map<string, Policy>();
  for (const name of chosen)
    policies.set(
      name,
      parse(policySchema, { name, ...given.get(name) }, given.has(name) ? `--policy-json: ${name}` : "--policies"),
    );
  for (const name of given.keys())
    if (!policies.has(name))
      throw new RigelError("config", `--policy-json: "${name}" is not among --policies ${names ?? ""}`);
  return policies;
}

function extraOf(text: string): [string, object] {
  const [, name, json] = /^([^=]+)=(\{.*\})$/s.exec(text) ?? [];
  if (name === undefined || json === undefined)
    throw new RigelError("config", `--policy-json: expected NAME={...}, got "${text}"`);
  // With ", MPS" behind it, it would be what another one's way is called.
  if (/[,;]/.test(name))
    throw new RigelError(
      "config",
      `--policy-json: expected a name without commas and semicolons, which separate --policies and --ways, got "${name}"`,
    );
  return [name, objectOf(json, name)];
}

function objectOf(json: string, name: string): object {
  try {
    return z.record(z.string(), z.unknown()).parse(JSON.parse(json));
  } catch (thrown) {
    throw new RigelError("config", `--policy-json: ${name}: ${reason(thrown)}`, { cause: thrown });
  }
}

export interface Way {
  name: string;
  /** The high program and the best-effort ones run at the same time. */
  together: boolean;
  mps: boolean;
  /** Tell MPS the classes, without Rigel. */
  clientPriority: boolean;
  /** The policy, for those under Rigel. */
  policy: Policy | undefined;
}

/** Every way there is here, in the order in which a round runs them; `alone` comes first. */
export function allWays(policies: ReadonlyMap<string, Policy>, has: { mps: boolean; clientPriority: boolean }): Way[] {
  const plain = { together: true, mps: false, clientPriority: false, policy: undefined };
  const [first] = policies.values();
  return [
    { ...plain, name: ALONE, together: false },
    { ...plain, name: "time slicing" },
    { ...plain, name: "MPS", mps: true },
    { ...plain, name: "MPS, client priority", mps: true, clientPriority: true },
    { ...plain, name: "alone, Rigel", together: false, policy: first },
    ...[...policies].flatMap(([name, policy]) => [
      { ...plain, name: `rigel ${name}`, policy },
      { ...plain, name: `rigel ${name}, MPS`, policy, mps: true },
    ]),
  ].filter((way) => (has.mps || !way.mps) && (has.clientPriority || !way.clientPriority));
}

/** `--ways`: names separated by semicolons, as some hold commas. `alone` is always there: the others are compared to it. */
export function chooseWays(text: string | undefined, all: readonly Way[]): Way[] {
  if (text === undefined) return [...all];
  const names = text.split(";").map((name) => name.trim());
  for (const name of names)
    if (!all.some((way) => way.name === name))
      throw new RigelError(
        "config",
        `--ways: there is no way "${name}" here; there are: ${all.map((way) => way.name).join("; ")}`,
      );
  return all.filter((way) => way.name === ALONE || names.includes(way.name));
}

/** Policies that are settings, or a loop that moves them: others decide when a client starts. */
const SWITCHABLE: ReadonlySet<Policy["name"]> = new Set(["none", "priority", "slo"]);

/** Whether running programs can be switched into it and out of it. */
export function isSwitchable({ name, together, policy, mps }: Way): boolean {
  return name === ALONE || (together && (policy ? SWITCHABLE.has(policy.name) : !mps));
}

/** Whether it can take turns with the others of a pair, with one start of the programs: by switching, or with programs of its own. */
export function isLive({ name, together }: Way): boolean {
  return name === ALONE || together;
}
