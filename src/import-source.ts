/**
 * import-source.ts: opens a file that some tool wrote and gives its text as UTF-8, whatever it was saved as.
 *
 * gzip is unpacked, UTF-16 with a byte order mark is converted, and what is no text is refused with what it looks like.
 * Streams: besides the beginning, which tells one tool's files from another's, one chunk is in memory at a time.
 */

import { createReadStream } from "node:fs";
import { access, constants, stat } from "node:fs/promises";
import { createGunzip } from "node:zlib";
import { RigelError, reason } from "./errors.ts";

export interface Source {
  path: string;
  /** On disk. */
  size_bytes: number;
  /** Of those, how many have been read. */
  read_bytes: () => number;
  /** The beginning of the text. */
  head: string;
  /** The whole text, in UTF-8 without a byte order mark. Can be gone through once. */
  text: AsyncIterable<Uint8Array>;
}

/** Program output stands before the table in some tools' files; a header further down is not looked for. */
const HEAD_bytes = 1 << 18;
const CHUNK_bytes = 1 << 18;

/** Opens a file and reads its beginning. Throws a coded error if there is no text in it. */
export async function openSource(path: string): Promise<Source> {
  const size_bytes = await checkedSize(path);
  const report = REPORTS.find(([ending]) => ending.test(path));
  if (report) throw new RigelError("profile", `${path}: this is ${report[1]}`);
  let read_bytes = 0;
  async function* counted(): AsyncGenerator<Uint8Array> {
    const file = createReadStream(path, { highWaterMark: CHUNK_bytes });
    for await (const chunk of file) {
      const bytes: Uint8Array = chunk;
      read_bytes += bytes.length;
      yield bytes;
    }
  }
  const text = asText(path, unpacked(path, counted()));
  const first: Uint8Array[] = [];
  let length = 0;
  while (length < HEAD_bytes) {
    const { value, done } = await text.next();
    if (done) break;
    first.push(value);
    length += value.length;
  }
  if (length === 0) throw new RigelError("profile", `${path}: the file is empty; export it again`);
  async function* whole(): AsyncGenerator<Uint8Array> {
    yield* first.splice(0);
    yield* text;
  }
  const head = new TextDecoder().decode(Buffer.concat(first).subarray(0, HEAD_bytes));
  return { path, size_bytes, read_bytes: () => read_bytes, head, text: whole() };
}

async function checkedSize(path: string): Promise<number> {
  try {
    const { size, isFile, isDirectory } = await describe(path);
    if (isDirectory) throw new RigelError("profile", `${path}: is a folder; name the exported file in it`);
    if (!isFile) throw new RigelError("profile", `${path}: is not a regular file; save the export to one`);
    await access(path, constants.R_OK);
    return size;
  } catch (thrown) {
    if (thrown instanceof RigelError) throw thrown;
    throw new RigelError("profile", `${path}: cannot be read (${reason(thrown)})`, { cause: thrown });
  }
}

async function describe(path: string): Promise<{ size: number; isFile: boolean; isDirectory: boolean }> {
  const info = await stat(path);
  return { size: info.size, isFile: info.isFile(), isDirectory: info.isDirectory() };
}

/** The tools' own files, which have no beginning in common over the versions. */
const REPORTS: [RegExp, string][] = [
  [
    /\.(nsys-rep|qdrep|qdstrm)$/,
    "nsys's report; run: nsys stats --report cuda_gpu_trace --format csv FILE.nsys-rep (gputrace before 2022.4)",
  ],
  [/\.(ncu-rep|nsight-cuprof-report)$/, "ncu's report; run: ncu --import FILE.ncu-rep --page raw --csv"],
];

/** What files begin with that people take for the text they export from. */
const OTHERS: [string, string][] = [
  ["SQLite format 3\0", "nsys's SQLite database; run: nsys stats --report cuda_gpu_trace --format csv FILE.nsys-rep"],
  ["NVR\0", "ncu's report; run: ncu --import FILE.ncu-rep --page raw --csv"],
  ["\u0028\u00b5\u002f\u00fd", "packed with zstd; unpack it first"],
  ["PK\u0003\u0004", "a zip file; unpack it first"],
  ["BZh", "packed with bzip2; unpack it first"],
  ["\u00fd7zXZ", "packed with xz; unpack it first"],
];

async function* unpacked(path: string, raw: AsyncGenerator<Uint8Array>): AsyncGenerator<Uint8Array> {
  const { value, done } = await raw.next();
  if (done) return;
  const start = Buffer.from(value.subarray(0, 16)).toString("latin1");
  const other = OTHERS.find(([magic]) => start.startsWith(magic));
  if (other) throw new RigelError("profile", `${path}: this is ${other[1]}`);
  async function* whole(): AsyncGenerator<Uint8Array> {
    yield value;
    yield* raw;
  }
  if (!start.startsWith("\u001f\u008b")) {
    yield* whole();
    return;
  }
  const gunzip = createGunzip({ chunkSize: CHUNK_bytes });
  const fed = feed(whole(), gunzip);
  try {
    for await (const chunk of gunzip) {
      const bytes: Uint8Array = chunk;
      yield bytes;
    }
    await fed;
  } catch (thrown) {
    throw new RigelError("profile", `${path}: damaged or cut short gzip file (${reason(thrown)})`, { cause: thrown });
  }
}

/** Writes all chunks, waiting where the reader is behind. An error of the stream reaches its reader. */
async function feed(chunks: AsyncIterable<Uint8Array>, to: ReturnType<typeof createGunzip>): Promise<void> {
  for await (const chunk of chunks) {
    if (to.destroyed) return;
    await new Promise<void>((resolve) => {
      to.write(chunk, () => resolve());
    });
  }
  to.end();
}

async function* asText(path: string, chunks: AsyncGenerator<Uint8Array>): AsyncGenerator<Uint8Array> {
  let encoding: "utf-8" | "utf-16le" | "utf-16be" | undefined;
  let decoder: TextDecoder | undefined;
  const encoder = new TextEncoder();
  let line = 1;
  try {
    for await (let chunk of chunks) {
      if (encoding === undefined) {
        encoding = encodingOf(chunk);
        if (encoding === "utf-8" && startsWith(chunk, 0xef, 0xbb, 0xbf)) chunk = chunk.subarray(3);
        decoder = new TextDecoder(encoding, { fatal: true });
      }
      const zero = encoding === "utf-8" ? chunk.indexOf(0) : -1;
      if (zero >= 0) {
        const text = `${path}:${line + lineEnds(chunk.subarray(0, zero))}: expected text, got a zero byte`;
        throw new RigelError("profile", `${text}; if it is UTF-16, save it with a byte order mark or as UTF-8`);
      }
      const text = decoder?.decode(chunk, { stream: true }) ?? "";
      line += lineEnds(chunk);
      if (encoding === "utf-8") yield chunk;
      else if (text !== "") yield encoder.encode(text);
    }
    decoder?.decode();
  } catch (thrown) {
    if (thrown instanceof RigelError) throw thrown;
    throw new RigelError(
      "profile",
      `${path}: at or after line ${line}: expected text in ${encoding === "utf-8" ? "UTF-8" : "UTF-16"} ` +
        `(${reason(thrown)}); export it again, or save it in that encoding`,
      { cause: thrown },
    );
  }
}

function encodingOf(start: Uint8Array): "utf-8" | "utf-16le" | "utf-16be" {
  if (startsWith(start, 0xff, 0xfe)) return "utf-16le";
  return startsWith(start, 0xfe, 0xff) ? "utf-16be" : "utf-8";
}

function startsWith(bytes: Uint8Array, ...start: number[]): boolean {
  return start.every((byte, index) => bytes[index] === byte);
}

function lineEnds(bytes: Uint8Array): number {
  let count = 0;
  for (let at = bytes.indexOf(10); at >= 0; at = bytes.indexOf(10, at + 1)) count++;
  return count;
}
