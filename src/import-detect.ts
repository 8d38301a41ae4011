/**
 * import-detect.ts: tells from a file's beginning which tool wrote it, and where its table begins.
 *
 * Never by the file's name. What is recognised but cannot be imported is said by its name, with the command that
 * exports what can be.
 */

import { RigelError } from "./errors.ts";

export const TOOLS = ["nsys", "ncu", "torch", "orion", "rigel"] as const;
export type Tool = (typeof TOOLS)[number];

export interface Column {
  /** As it stands there, without unit. */
  name: string;
  /** What stands in parentheses after it, or after a colon; "" without. */
  unit: string;
}

/** Where a table begins in a text. */
export interface TableStart {
  columns: Column[];
  /** Bytes and lines before the header line. */
  skip_bytes: number;
  skip_lines: number;
  delimiter: "," | ";" | "\t";
}

export type Detected =
  | { tool: "nsys"; table: TableStart }
  | { tool: "ncu"; page: "details" | "raw"; table: TableStart }
  | { tool: "orion"; table: TableStart }
  | { tool: "torch" }
  | { tool: "rigel" };

/** What each tool's file is called in messages. */
export const TOOL_NAMES: Record<Tool, string> = {
  nsys: "a GPU trace of nsys (cuda_gpu_trace, gputrace)",
  ncu: "a CSV page of ncu",
  torch: "a trace of torch.profiler",
  orion: "a kernel file of Orion's",
  rigel: "a profile of Rigel's",
};

const NSYS_EXPORT = "nsys stats --report cuda_gpu_trace --format csv FILE.nsys-rep";
const NCU_EXPORT = "ncu --import FILE.ncu-rep --page raw --csv";

/** Which tool wrote a file that begins so. Throws a coded error that says what it is where it cannot be imported. */
export function detect(path: string, head: string): Detected {
  const refuse = (what: string): never => {
    throw new RigelError("profile", `${path}: ${what}`);
  };
  const start = head.trimStart();
  if (start === "") return refuse("there is nothing but blanks in the file; export it again");
  if (start.startsWith("# rigel-profile")) return { tool: "rigel" };
  if (start.startsWith("{") || start.startsWith("[")) {
    if (/"traceEvents"|"ph"\s*:/.test(head)) return { tool: "torch" };
    return refuse('this is JSON, but no trace of torch.profiler: expected "traceEvents"');
  }
  let skip_bytes = 0;
  let skip_lines = 0;
  for (const line of head.split("\n")) {
    const table = tableOf(line, skip_bytes, skip_lines);
    const names = new Set(table.columns.map(({ name }) => name.toLowerCase()));
    const has = (...wanted: string[]): boolean => wanted.every((name) => names.has(name));
    if (has("name", "profile", "sm_usage", "duration")) return { tool: "orion", table };
    if (has("id", "kernel name") || has("kernel name", "metric name"))
      return { tool: "ncu", page: has("metric name") ? "details" : "raw", table };
    if (has("result", "name") && (has("tid") || has("corrid")))
      return refuse(`this is the API trace of nsys, which has no kernels; run: ${NSYS_EXPORT}`);
    if (has("kernel start") || has("api start"))
      return refuse(`this is cuda_kern_exec_trace of nsys, which has no shapes; run: ${NSYS_EXPORT}`);
    if (has("name", "instances") || has("operation", "count") || has("name", "num calls"))
      return refuse(`this is a summary of nsys, which has no single kernels; run: ${NSYS_EXPORT}`);
    if (has("start", "duration", "grid x"))
      return refuse(`this is a trace of nvprof; record with nsys instead, then run: ${NSYS_EXPORT}`);
    if (has("address", "source")) return refuse(`this is the source page of ncu; run: ${NCU_EXPORT}`);
    // Every column that must be there is named when it is not: two of these are enough to know what it was meant to be.
    const nsys = ["start", "duration", "corrid", "grdx", "blkx", "strm", "name"].filter((name) => names.has(name));
    if (nsys.length >= 4) return { tool: "nsys", table };
    if (/^\s*Start \(\w+\)\s{2,}Duration/.test(line))
      return refuse(`this is the table of nsys that is for reading; run: ${NSYS_EXPORT}`);
    if (/^\s*\w.*, (Context|Stream) \d+/.test(line) && /Section: /.test(head))
      return refuse(`this is the page of ncu that is for reading; run: ${NCU_EXPORT}`);
    skip_bytes += Buffer.byteLength(line) + 1;
    skip_lines++;
  }
  return refuse(
    "no known header line in it; expected a CSV of nsys (cuda_gpu_trace) or ncu, a trace of torch.profiler (JSON), or " +
      "a kernel file of Orion's",
  );
}

function tableOf(line: string, skip_bytes: number, skip_lines: number): TableStart {
  const delimiter = line.includes("\t") ? "\t" : !line.includes(",") && line.includes(";") ? ";" : ",";
  const columns = line
    .trim()
    .split(delimiter)
    .map((text): Column => {
      const bare = text.trim().replaceAll(/^"|"$/g, "").trim();
      const [, name = bare, parenthesised, coloned] = /^([^(:]*?)\s*(?:\(([^)]*)\)|:(\w+))$/.exec(bare) ?? [];
      return { name, unit: parenthesised ?? coloned ?? "" };
    });
  return { columns, skip_bytes, skip_lines, delimiter };
}
