/**
 * csv.ts: reads CSV of any length, record by record, in batches of what one chunk of the file holds.
 *
 * A thin layer over csv-parse: it adds line numbers to the records and a limit to what one record may hold, so that memory
 * stays bounded whatever the file is.
 */

import { type Options, parse } from "csv-parse";

export interface CsvRecord {
  record: string[];
  /** The line on which it ends, from 1, counted from where reading began. */
  line: number;
}

/** Larger than any kernel name; a record beyond it is a quote that never ends, or no CSV. */
const LARGEST_RECORD_characters = 1 << 20;

/** The records of a CSV text, of whatever number of fields. Throws csv-parse's error where the text is no CSV. */
export async function* csvRecords(
  chunks: AsyncIterable<Uint8Array>,
  options: Pick<Options, "bom" | "delimiter" | "relax_quotes" | "skip_empty_lines">,
): AsyncGenerator<CsvRecord[]> {
  let batch: CsvRecord[] = [];
  const parser = parse({
    ...options,
    relax_column_count: true,
    max_record_size: LARGEST_RECORD_characters,
    on_record: (record: string[], { lines }) => {
      batch.push({ record, line: lines });
      return null;
    },
  });
  let failed: unknown;
  const ended = new Promise<void>((resolve) => {
    parser.once("error", (error) => {
      failed = error;
      resolve();
    });
    parser.once("end", resolve);
  });
  parser.resume();
  for await (const chunk of chunks) {
    // Records come out while write() runs; the promise is for an error, and for a full buffer.
    await new Promise<void>((resolve) => {
      parser.write(chunk, () => resolve());
    });
    if (failed !== undefined) break;
    if (batch.length > 0) yield batch;
    batch = [];
  }
  if (failed === undefined) parser.end();
  await ended;
  if (batch.length > 0) yield batch;
  if (failed !== undefined) throw failed;
}
