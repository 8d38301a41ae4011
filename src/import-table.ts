/**
 * import-table.ts: the rows of a CSV table in a file that may have other text before it, and after it.
 *
 * Tools print their tables between messages of their own and of the program they watch. What is not part of the table
 * is dropped by what it looks like, and counted; anything else with another number of fields than the header is bad.
 */

import { type CsvRecord, csvRecords } from "./csv.ts";
import { RigelError, reason } from "./errors.ts";
import type { TableStart } from "./import-detect.ts";
import type { FileReport } from "./import-row.ts";
import type { Source } from "./import-source.ts";

/** What nsys says before another of its tables. */
const AFTER = /^(Processing \[|Exporting |Generating |SKIPPED: | \*\* |NOTICE: )/;
/** What ncu and nsys say of their own work. */
const MESSAGE = /^(==[A-Z]+==|==\d+==)/;

/** The rows after the header. With `raggedNames`, a row may have more fields than the header (Orion's names hold commas). */
export async function* tableRows(
  source: Source,
  table: TableStart,
  report: FileReport,
  options: { raggedNames?: boolean } = {},
): AsyncGenerator<CsvRecord[]> {
  const batches = csvRecords(without(source.text, table.skip_bytes), {
    delimiter: table.delimiter,
    skip_empty_lines: true,
    relax_quotes: options.raggedNames ?? false,
  });
  let width: number | undefined;
  let over = false;
  try {
    for await (const batch of batches) {
      const rows: CsvRecord[] = [];
      for (const { record, line } of batch) {
        const [first = ""] = record;
        if (over) {
          report.drop("text after the table");
        } else if (width === undefined) {
          width = record.length;
        } else if (record.length === width || (options.raggedNames && record.length > width)) {
          rows.push({ record, line: line + table.skip_lines });
        } else if (MESSAGE.test(first)) {
          report.drop("messages of the tool");
        } else if (AFTER.test(first)) {
          over = true;
          report.drop("text after the table");
        } else {
          report.rows++;
          report.refuse(line + table.skip_lines, `expected ${width} fields as in the header, got ${record.length}`);
        }
      }
      if (rows.length > 0) yield rows;
    }
  } catch (thrown) {
    if (thrown instanceof RigelError) throw thrown;
    const text = reason(thrown).replace(/\bline (\d+)/, (_, at: string) => `line ${Number(at) + table.skip_lines}`);
    // After this nothing is known of where rows begin.
    throw new RigelError("profile", `${report.path}: no valid CSV from there on: ${text}`, { cause: thrown });
  }
}

async function* without(chunks: AsyncIterable<Uint8Array>, bytes: number): AsyncGenerator<Uint8Array> {
  let left = bytes;
  for await (const chunk of chunks) {
    const skipped = Math.min(left, chunk.length);
    left -= skipped;
    if (skipped < chunk.length) yield chunk.subarray(skipped);
  }
}
