/**
 * import-nsys.ts: the GPU trace of Nsight Systems: `nsys stats --report cuda_gpu_trace --format csv` (`gputrace` before
 * 2022.4).
 *
 * Versions differ in columns and units: `Start(sec)` in 2021.1, `Start (ns)` later, `Throughput (MBps)` or `(MB/s)`,
 * with or without `GreenCtx`. So columns are found by name, and units are what the header says.
 */

import type { OperationKind } from "./classify.ts";
import type { TableStart } from "./import-detect.ts";
import { FieldError, parseNumber, sizeUnit_bytes, timeUnit_ns, wholeNumber } from "./import-number.ts";
import { type Called, type FileReport, type Recorded, UNCALLED } from "./import-row.ts";
import type { Source } from "./import-source.ts";
import { tableRows } from "./import-table.ts";
import { RigelError } from "./errors.ts";

/** As nsys writes them; they are looked for in small letters. */
const NEEDED = ["Start", "Duration", "GrdX", "GrdY", "GrdZ", "BlkX", "BlkY", "BlkZ", "Strm", "Name"];
const USED = ["Reg/Trd", "StcSMem", "DymSMem", "Bytes", "Device"];
const KNOWN = new Set([...NEEDED, ...USED].map((name) => name.toLowerCase()));
const IGNORED = new Set(
  "corrid throughput thru srcmemkd dstmemkd ctx context greenctx row# end localmem shrdmemexec".split(" "),
);

export async function* readNsys(source: Source, table: TableStart, report: FileReport): AsyncGenerator<Recorded[]> {
  const at = new Map(table.columns.map(({ name }, index) => [name.toLowerCase(), index]));
  const line = table.skip_lines + 1;
  const missing = NEEDED.filter((name) => !at.has(name.toLowerCase()));
  if (missing.length > 0)
    throw new RigelError(
      "profile",
      `${source.path}:${line}: header: expected the columns of nsys's cuda_gpu_trace, ${missing.join(", ")} missing`,
    );
  for (const name of USED) if (!at.has(name.toLowerCase())) report.notes.add(`no column ${name}: taken as not known`);
  for (const { name } of table.columns) {
    const known = name.toLowerCase();
    if (name !== "" && !KNOWN.has(known) && !IGNORED.has(known))
      report.notes.add(`column ${name} is not known and not used`);
  }
  const decimalComma = table.delimiter === ";";
  const column = (name: string): number => at.get(name) ?? -1;
  /** As the header has it. */
  const called = (name: string): string => table.columns[column(name)]?.name ?? name;
  const unit = (name: string): string => table.columns[column(name)]?.unit ?? "";
  const unitOf = (name: string, parse: (field: string, unit: string) => number, without: string): number => {
    try {
      return at.has(name) ? parse(called(name), unit(name) || without) : 0;
    } catch (thrown) {
      if (!(thrown instanceof FieldError)) throw thrown;
      throw new RigelError("profile", `${source.path}:${line}: header: ${thrown.message}`);
    }
  };
  // The first versions gave no unit where it was the obvious one.
  const start_ns = unitOf("start", timeUnit_ns, "ns");
  const duration_ns = unitOf("duration", timeUnit_ns, "ns");
  const sizes = { stcsmem: 0, dymsmem: 0, bytes: 0 };
  for (const name of ["stcsmem", "dymsmem", "bytes"] as const) {
    sizes[name] = unitOf(name, sizeUnit_bytes, "byte");
    if (sizes[name] > 1) report.notes.add(`sizes are as exact as nsys printed them, in ${unit(name)}`);
  }

  const recorded = (record: string[]): Recorded | undefined => {
    const text = (name: string): string => record[column(name)] ?? "";
    const number = (name: string): number | undefined =>
      at.has(name) ? parseNumber(called(name), text(name), decimalComma) : undefined;
    const needed = (name: string): number => {
      const value = number(name);
      if (value === undefined)
        throw new FieldError(`${called(name)}: expected a number, got ${JSON.stringify(text(name))}`);
      return value;
    };
    const size = (name: "stcsmem" | "dymsmem" | "bytes"): number => Math.round((number(name) ?? 0) * sizes[name]);
    const name = text("name");
    const kind = kindOf(name, called("name"));
    if (kind === undefined) return report.drop("copies between buffers of the host");
    return {
      name,
      kind,
      device: text("device").trim(),
      stream: text("strm").trim(),
      grid: kind === "kernel" ? [needed("grdx"), needed("grdy"), needed("grdz")] : [0, 0, 0],
      block: kind === "kernel" ? [needed("blkx"), needed("blky"), needed("blkz")] : [0, 0, 0],
      registers: kind === "kernel" ? wholeNumber(called("reg/trd"), number("reg/trd"), 255) : 0,
      shared_bytes: kind === "kernel" ? size("stcsmem") + size("dymsmem") : 0,
      bytes: kind === "kernel" ? 0 : size("bytes"),
      start_ns: Math.round(needed("start") * start_ns),
      duration_ns: Math.round(needed("duration") * duration_ns),
    };
  };

  const checked: Called = {
    ...UNCALLED,
    name: called("name"),
    start: called("start"),
    duration: called("duration"),
    grid: [called("grdx"), called("grdy"), called("grdz")],
    block: [called("blkx"), called("blky"), called("blkz")],
    registers: called("reg/trd"),
    shared: ["stcsmem", "dymsmem"].map(called).join(", "),
    bytes: called("bytes"),
  };
  for await (const rows of tableRows(source, table, report)) {
    const batch: Recorded[] = [];
    for (const { record, line: at_line } of rows) {
      const one = report.take(at_line, checked, () => recorded(record));
      if (one) batch.push(one);
    }
    yield batch;
  }
}

const HOST_TO_DEVICE = new Set(["HtoD", "Host-to-Device", "HtoA", "Host-to-Array"]);
const DEVICE_TO_HOST = new Set(["DtoH", "Device-to-Host", "AtoH", "Array-to-Host"]);
const ON_DEVICES = new Set(
  "DtoD PtoP AtoA AtoD DtoA Device-to-Device Peer-to-Peer Array-to-Array Array-to-Device Device-to-Array".split(" "),
);

/** A kernel, unless it has the name of a copy or memset; nothing for what does not use the GPU. */
function kindOf(name: string, called: string): OperationKind | undefined {
  if (!name.startsWith("[CUDA ")) return "kernel";
  const [, what, way = ""] = /^\[CUDA (?:Unified Memory )?(memcpy|memset) ?([\w-]*)\]$/.exec(name) ?? [];
  if (what === "memset") return "memset";
  if (HOST_TO_DEVICE.has(way)) return "copy_h2d";
  if (DEVICE_TO_HOST.has(way)) return "copy_d2h";
  if (ON_DEVICES.has(way)) return "copy_d2d";
  if (way === "HtoH" || way === "Host-to-Host") return undefined;
  throw new FieldError(`${called}: expected a copy or memset of nsys, got ${JSON.stringify(name.slice(0, 80))}`);
}
