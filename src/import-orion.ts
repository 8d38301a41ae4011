/** import-orion.ts: Orion's kernel files: names, durations, what bounds them, SMs in use; no shapes and no gaps. */

import type { TableStart } from "./import-detect.ts";
import { FieldError, parseNumber } from "./import-number.ts";
import { type Called, type FileReport, type Recorded, UNCALLED } from "./import-row.ts";
import type { Source } from "./import-source.ts";
import { tableRows } from "./import-table.ts";
import { RigelError } from "./errors.ts";

const COLUMNS = ["Name", "Profile", "Memory_footprint", "SM_usage", "Duration"];

const CALLED: Called = { ...UNCALLED, name: "Name", duration: "Duration", sms: "SM_usage" };

/** The four numbers of a row inside of a name. Compilers put a blank after each comma. */
const ANOTHER_ROW = /,(-1|0|1)(\.0)?,\d+(\.\d+)?,\d+(\.\d+)?,\d/;

export async function* readOrion(source: Source, table: TableStart, report: FileReport): AsyncGenerator<Recorded[]> {
  const got = table.columns.map(({ name }) => name);
  if (got.join() !== COLUMNS.join())
    throw new RigelError(
      "profile",
      `${source.path}:${table.skip_lines + 1}: expected the header ${COLUMNS.join()}, got ${got.join().slice(0, 200)}`,
    );
  const decimalComma = table.delimiter === ";";
  const recorded = (record: string[]): Recorded => {
    const name = record.slice(0, -4).join(",").trim();
    if (ANOTHER_ROW.test(name))
      throw new FieldError("Name: expected one row on a line; this looks like two, their line end lost");
    const [profile = "", , sms = "", duration = ""] = record.slice(-4);
    const stated = Number(profile.trim() === "" ? NaN : profile);
    if (stated !== 1 && stated !== 0 && stated !== -1)
      throw new FieldError(`Profile: expected 1 (compute), 0 (memory) or -1 (unknown), got ${JSON.stringify(profile)}`);
    return {
      // Names are as the compiler writes them: unquoted, with commas in them.
      name,
      kind: "kernel",
      device: "",
      stream: "0",
      grid: [0, 0, 0],
      block: [0, 0, 0],
      registers: 0,
      shared_bytes: 0,
      bytes: 0,
      duration_ns: Math.round(numberOf("Duration", duration, decimalComma)),
      sms: Math.max(1, Math.round(numberOf("SM_usage", sms, decimalComma))),
      stated: stated === 1 ? "compute" : stated === 0 ? "memory" : "unknown",
    };
  };
  for await (const rows of tableRows(source, table, report, { raggedNames: true })) {
    const batch: Recorded[] = [];
    for (const { record, line } of rows) {
      const one = report.take(line, CALLED, () => recorded(record));
      if (one) batch.push(one);
    }
    yield batch;
  }
}

function numberOf(field: string, text: string, decimalComma: boolean): number {
  const value = parseNumber(field, text, decimalComma);
  if (value === undefined || value < 0)
    throw new FieldError(`${field}: expected a number, got ${JSON.stringify(text)}`);
  return value;
}
