/**
 * import-ncu.ts: the CSV pages of Nsight Compute (ncu, and nv-nsight-cu-cli before it).
 *
 * `--page details`: a row for each metric, those of one kernel one after the other. `--page raw`: a row for each kernel,
 * and below the header a row of units. Metrics have had several names over the versions; METRICS lists them. ncu
 * serialises the kernels it measures, so there are no gaps between them.
 */

import { precisionOf } from "./classify.ts";
import { RigelError } from "./errors.ts";
import type { TableStart } from "./import-detect.ts";
import { FieldError, parseNumber, sizeUnit_bytes, timeUnit_ns, wholeNumber } from "./import-number.ts";
import { type Called, type FileReport, type Recorded, UNCALLED } from "./import-row.ts";
import type { Source } from "./import-source.ts";
import { tableRows } from "./import-table.ts";

type Metric =
  | "duration"
  | "registers"
  | "static_shared"
  | "dynamic_shared"
  | "grid_size"
  | "block_size"
  | "compute_percent"
  | "memory_percent"
  | "dram_percent"
  | "dram_rate"
  | "dram_bytes"
  | "dram_read"
  | "dram_write";

/** Which metric a name means, with the unit that it must have where a name means two things. */
const METRICS: Record<string, { metric: Metric; unit?: RegExp } | undefined> = {
  Duration: { metric: "duration" },
  "gpu__time_duration.sum": { metric: "duration" },
  "gpu__time_duration.avg": { metric: "duration" },
  "Registers Per Thread": { metric: "registers" },
  launch__registers_per_thread: { metric: "registers" },
  "Static Shared Memory Per Block": { metric: "static_shared" },
  launch__shared_mem_per_block_static: { metric: "static_shared" },
  "Dynamic Shared Memory Per Block": { metric: "dynamic_shared" },
  launch__shared_mem_per_block_dynamic: { metric: "dynamic_shared" },
  "Grid Size": { metric: "grid_size" },
  launch__grid_size: { metric: "grid_size" },
  "Block Size": { metric: "block_size" },
  launch__block_size: { metric: "block_size" },
  "Compute (SM) Throughput": { metric: "compute_percent", unit: /^%$/ },
  "SM Throughput": { metric: "compute_percent", unit: /^%$/ },
  "SM [%]": { metric: "compute_percent" },
  "SOL SM": { metric: "compute_percent" },
  "sm__throughput.avg.pct_of_peak_sustained_elapsed": { metric: "compute_percent" },
  "Memory Throughput": { metric: "memory_percent", unit: /^%$/ },
  "Memory [%]": { metric: "memory_percent" },
  "SOL Memory": { metric: "memory_percent" },
  "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": { metric: "memory_percent" },
  "DRAM Throughput": { metric: "dram_percent", unit: /^%$/ },
  "SOL FB": { metric: "dram_percent" },
  "dram__throughput.avg.pct_of_peak_sustained_elapsed": { metric: "dram_percent" },
  "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": { metric: "dram_percent" },
  "dram__bytes.sum.per_second": { metric: "dram_rate" },
  "dram__bytes.sum": { metric: "dram_bytes" },
  "dram__bytes_read.sum": { metric: "dram_read" },
  "dram__bytes_write.sum": { metric: "dram_write" },
};

/** Threads that executed an add, a multiply or a multiply-add, which counts twice; and what tensor cores did. */
const ARITHMETIC = /^(?:smsp|sm)__sass_thread_inst_executed_op_([fdh](add|mul|fma))_pred_on\.sum$/;
const TENSOR = /^sm__ops_path_tensor_\w+\.sum$/;

/** What is gathered of one kernel. */
interface Gathered {
  id: string;
  line: number;
  name: string;
  stream: string;
  device: string;
  grid: string;
  block: string;
  metrics: Map<Metric, number>;
  /** What the file calls them. */
  called: Map<Metric, string>;
  /** Metrics that give one axis of a shape, by name. */
  dimensions: Set<string>;
  flops: number;
  /** Which instructions are among the FLOPs. */
  counted: Set<string>;
  tensor: boolean;
  problem: string | undefined;
}

export async function* readNcu(
  source: Source,
  page: "details" | "raw",
  table: TableStart,
  report: FileReport,
): AsyncGenerator<Recorded[]> {
  const at = new Map(table.columns.map(({ name, unit }, index) => [unit === "" ? name : `${name} (${unit})`, index]));
  const column = (name: string): number => at.get(name) ?? -1;
  const decimalComma = table.delimiter === ";";
  const needed = page === "details" ? ["Kernel Name", "Metric Name", "Metric Unit", "Metric Value"] : ["Kernel Name"];
  const missing = needed.filter((name) => !at.has(name));
  if (missing.length > 0)
    throw new RigelError(
      "profile",
      `${source.path}:${table.skip_lines + 1}: header: expected the ${page} page of ncu, ${missing.join(", ")} missing`,
    );
  const begin = (record: string[], line: number): Gathered => ({
    id: idOf(record),
    line,
    name: record[column("Kernel Name")] ?? "",
    stream: record[column("Stream")] ?? "0",
    device: deviceOf(record[column("Device")] ?? ""),
    grid: record[column("Grid Size")] ?? "",
    block: record[column("Block Size")] ?? "",
    metrics: new Map(),
    called: new Map(),
    dimensions: new Set(),
    flops: 0,
    counted: new Set(),
    tensor: false,
    problem: undefined,
  });
  const idOf = (record: string[]): string =>
    ["Process ID", "ID", "Kernel Name"].map((name) => record[column(name)] ?? "").join(" ");
  let units: string[] | undefined;
  let open: Gathered | undefined;
  const close = (): Recorded[] => {
    const done = open;
    open = undefined;
    if (!done) return [];
    const called = calledOf(done);
    const one = report.take(done.line, called, () => {
      if (done.problem !== undefined) throw new FieldError(done.problem);
      return finish(done, called, report);
    });
    return one ? [one] : [];
  };

  for await (const rows of tableRows(source, table, report)) {
    const batch: Recorded[] = [];
    for (const { record, line } of rows) {
      if (page === "raw") {
        if (units === undefined) {
          units = record;
          // Some versions have no row of units; then this is the first kernel.
          if ((record[column("Kernel Name")] ?? "") === "") continue;
          units = [];
        }
        open = begin(record, line);
        for (const [name, index] of at) add(open, name, units[index] ?? "", record[index] ?? "", decimalComma);
        batch.push(...close());
        continue;
      }
      if (open && open.id !== idOf(record)) batch.push(...close());
      open ??= begin(record, line);
      const field = (name: string): string => record[column(name)] ?? "";
      add(open, field("Metric Name"), field("Metric Unit"), field("Metric Value"), decimalComma);
    }
    yield batch;
  }
  yield close();
}

function calledOf({ called, grid, block, dimensions }: Gathered): Called {
  const of = (...metrics: Metric[]): string[] => metrics.flatMap((metric) => called.get(metric) ?? []);
  const shape = (what: "grid" | "block", column: string, text: string): Called["grid"] => {
    const whole = (text === "" ? called.get(`${what}_size`) : undefined) ?? column;
    const axis = (name: string): string => (dimensions.has(name) ? name : whole);
    return [axis(`launch__${what}_dim_x`), axis(`launch__${what}_dim_y`), axis(`launch__${what}_dim_z`)];
  };
  return {
    ...UNCALLED,
    name: "Kernel Name",
    duration: called.get("duration") ?? "Duration",
    grid: shape("grid", "Grid Size", grid),
    block: shape("block", "Block Size", block),
    registers: called.get("registers") ?? "Registers Per Thread",
    shared: of("static_shared", "dynamic_shared").join(", "),
    dram: (called.get("dram_bytes") ?? of("dram_read", "dram_write").join(", ")) || of("dram_rate").join(", "),
  };
}

/** Newer versions give an index there, which names no GPU. */
function deviceOf(text: string): string {
  return /^\d*$/.test(text.trim()) ? "" : text.trim();
}

function add(kernel: Gathered, name: string, unit: string, text: string, decimalComma: boolean): void {
  try {
    addChecked(kernel, name, unit.trim(), text, decimalComma);
  } catch (thrown) {
    if (!(thrown instanceof FieldError)) throw thrown;
    kernel.problem ??= thrown.message;
  }
}

function addChecked(kernel: Gathered, name: string, unit: string, text: string, decimalComma: boolean): void {
  if (name === "device__attribute_display_name") {
    kernel.device = text.trim();
    return;
  }
  const number = (): number | undefined => parseNumber(name, text, decimalComma);
  const dimension = /^launch__(grid|block)_dim_([xyz])$/.exec(name);
  if (dimension?.[1] === "grid") kernel.grid = joined(kernel.grid, dimension[2], number());
  else if (dimension?.[1] === "block") kernel.block = joined(kernel.block, dimension[2], number());
  if (dimension) kernel.dimensions.add(name);
  const arithmetic = ARITHMETIC.exec(name);
  if (arithmetic) kernel.flops += (number() ?? 0) * (arithmetic[2] === "fma" ? 2 : 1);
  if (arithmetic?.[1] !== undefined) kernel.counted.add(arithmetic[1]);
  if (TENSOR.test(name)) {
    const value = number() ?? 0;
    kernel.tensor ||= value > 0;
    kernel.flops += value;
  }
  let known = METRICS[name];
  if (name === "Memory Throughput" && /second|\/s$/.test(unit)) known = { metric: "dram_rate" };
  // The columns beside the metrics are shapes in parentheses; the metrics of these names are products.
  if (!known || text.trim().startsWith("(")) return;
  if (known.unit && unit !== "" && !known.unit.test(unit)) return;
  const value = number();
  if (value === undefined) return;
  kernel.metrics.set(known.metric, value * factor(known.metric, name, unit));
  kernel.called.set(known.metric, name);
}

function factor(metric: Metric, name: string, unit: string): number {
  if (metric === "duration") return timeUnit_ns(name, unit || "ns");
  if (/shared|^dram_(bytes|read|write|rate)$/.test(metric)) return sizeUnit_bytes(name, unit || "byte");
  return 1;
}

/** Puts one dimension into "(x, y, z)". */
function joined(shape: string, axis: string | undefined, size: number | undefined): string {
  const sizes = shape.startsWith("(") ? shape.replaceAll(/[()]/g, "").split(",") : ["1", "1", "1"];
  sizes["xyz".indexOf(axis ?? "x")] = String(size);
  return `(${sizes.map((one) => one.trim()).join(", ")})`;
}

function finish(kernel: Gathered, called: Called, report: FileReport): Recorded {
  const { name, metrics } = kernel;
  const duration_ns = metrics.get("duration");
  if (duration_ns === undefined)
    throw new FieldError("no Duration (gpu__time_duration.sum) for this kernel; measure with the section SpeedOfLight");
  const { read, write, rate } = {
    read: metrics.get("dram_read"),
    write: metrics.get("dram_write"),
    rate: metrics.get("dram_rate"),
  };
  const dram_bytes =
    metrics.get("dram_bytes") ??
    (read !== undefined && write !== undefined
      ? read + write
      : rate !== undefined
        ? (rate * duration_ns) / 1e9
        : undefined);
  if (dram_bytes === undefined) report.notes.add("bytes of device memory are not measured for every kernel");
  // Tensor cores do not count in the instructions of threads: without their own counter the work is not known.
  const precision = precisionOf(name);
  const letter = precision === "fp64" ? "d" : precision === "fp32" ? "f" : undefined;
  const whole = letter !== undefined && ["add", "mul", "fma"].every((what) => kernel.counted.has(letter + what));
  const flops = kernel.tensor || whole ? Math.round(kernel.flops) : 0;
  if (!kernel.tensor && !whole) report.notes.add("FLOPs are not measured, or in part, for some kernels");
  for (const metric of ["registers", "static_shared", "dynamic_shared", "compute_percent", "memory_percent"] as const)
    if (!metrics.has(metric)) report.notes.add(`${metric} is not measured for every kernel: taken as not known`);
  const compute_percent = metrics.get("compute_percent");
  const memory_percent = metrics.get("memory_percent") ?? metrics.get("dram_percent");
  return {
    name,
    kind: "kernel",
    device: kernel.device,
    stream: kernel.stream,
    grid: shapeOf("Grid Size", kernel.grid, metrics.get("grid_size")),
    block: shapeOf("Block Size", kernel.block, metrics.get("block_size")),
    registers: wholeNumber(called.registers, metrics.get("registers"), 255),
    shared_bytes: Math.round((metrics.get("static_shared") ?? 0) + (metrics.get("dynamic_shared") ?? 0)),
    bytes: 0,
    duration_ns: Math.round(duration_ns),
    flops,
    dram_bytes: Math.round(dram_bytes ?? 0),
    ...(compute_percent !== undefined && { compute_percent }),
    ...(memory_percent !== undefined && { memory_percent }),
  };
}

/** "(8, 1, 1)", or the product alone in older versions. */
function shapeOf(field: string, text: string, product: number | undefined): [number, number, number] {
  const sizes = /^\(\s*(\d+),\s*(\d+),\s*(\d+)\s*\)$/.exec(text.trim());
  if (sizes) return [Number(sizes[1]), Number(sizes[2]), Number(sizes[3])];
  const whole = text.trim() === "" ? product : parseNumber(field, text, false);
  if (whole === undefined) throw new FieldError(`no ${field} for this kernel; measure with the section LaunchStats`);
  return [whole, 1, 1];
}
