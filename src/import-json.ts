/**
 * import-json.ts: goes through a Chrome trace of any size, event by event, without holding it in memory.
 *
 * It only finds where the elements of `traceEvents` (or of a bare list) begin and end; each is then parsed by
 * JSON.parse. It must never make anything of a text that JSON.parse would refuse: what does not fit is handed on as it is.
 */

import { RigelError } from "./errors.ts";

/** An element of the list of events, or the value of another field beside it. */
export interface TracePiece {
  /** The field beside the events that this is; nothing for an event. */
  key?: string;
  text: string;
  /** Where it begins, from 1. */
  line: number;
  /** Something between the events that is none, or an event that does not end. */
  broken?: string;
}

const LARGEST_EVENT_bytes = 16 << 20;

const NEWLINE = 10;
const QUOTE = 34;
const COMMA = 44;
const COLON = 58;
const OPEN_LIST = 91;
const BACKSLASH = 92;
const CLOSE_LIST = 93;
const OPEN_OBJECT = 123;
const CLOSE_OBJECT = 125;

/** The pieces of a trace, in batches of what a chunk holds. Throws a coded error if there is no list of events. */
export async function* tracePieces(path: string, chunks: AsyncIterable<Uint8Array>): AsyncGenerator<TracePiece[]> {
  let depth = 0;
  let inString = false;
  let escaped = false;
  let line = 1;
  let topIsObject = false;
  let key = "";
  let keyBytes: number[] = [];
  /** The depth at which elements of the events' list stand; 0 outside of it. */
  let eventDepth = 0;
  let seen = false;
  let over = false;
  let captureDepth = -1;
  let captureLine = 0;
  let parts: Uint8Array[] = [];
  let captured = 0;
  let brokenLine = 0;

  for await (const chunk of chunks) {
    const batch: TracePiece[] = [];
    let from = 0;
    for (let i = 0; i < chunk.length; i++) {
      const byte = chunk[i];
      if (byte === NEWLINE) line++;
      if (inString) {
        if (escaped) escaped = false;
        else if (byte === BACKSLASH) escaped = true;
        else if (byte === QUOTE) {
          inString = false;
          if (depth === 1) key = Buffer.from(keyBytes).toString("utf8");
        }
        if (inString && depth === 1 && keyBytes.length < 256) keyBytes.push(byte ?? 0);
        continue;
      }
      switch (byte) {
        case QUOTE:
          inString = true;
          if (depth === 1) keyBytes = [];
          if (eventDepth > 0 && depth === eventDepth) brokenLine ||= line;
          break;
        case OPEN_OBJECT:
        case OPEN_LIST:
          depth++;
          if (over) brokenLine ||= line;
          if (depth === 1) {
            topIsObject = byte === OPEN_OBJECT;
            if (!topIsObject) eventDepth = 1;
            seen ||= !topIsObject;
          } else if (captureDepth < 0 && eventDepth > 0 && depth === eventDepth + 1) {
            captureDepth = depth - 1;
            captureLine = line;
            from = i;
          } else if (captureDepth < 0 && eventDepth === 0 && depth === 2 && topIsObject) {
            if (key === "traceEvents" && byte === OPEN_LIST) {
              eventDepth = 2;
              seen = true;
            } else {
              captureDepth = 1;
              captureLine = line;
              from = i;
            }
          }
          break;
        case CLOSE_OBJECT:
        case CLOSE_LIST:
          depth--;
          if (depth === 0) over = true;
          if (depth < 0) {
            brokenLine ||= line;
            depth = 0;
          }
          if (captureDepth >= 0 && depth === captureDepth) {
            parts.push(chunk.subarray(from, i + 1));
            const text = Buffer.concat(parts).toString("utf8");
            batch.push({ text, line: captureLine, ...(eventDepth === 0 && { key }) });
            parts = [];
            captured = 0;
            captureDepth = -1;
          } else if (eventDepth > 0 && depth < eventDepth) {
            eventDepth = 0;
          }
          break;
        case COMMA:
        case COLON:
        case NEWLINE:
        case 32:
        case 9:
        case 13:
          break;
        default:
          if (over || (eventDepth > 0 && depth === eventDepth)) brokenLine ||= line;
      }
    }
    if (captureDepth >= 0) {
      // The chunk's memory is the reader's to use again.
      parts.push(chunk.slice(from));
      captured += chunk.length - from;
      if (captured > LARGEST_EVENT_bytes)
        throw new RigelError(
          "profile",
          `${path}:${captureLine}: expected events of at most ${LARGEST_EVENT_bytes} bytes, got a larger one`,
        );
    }
    if (brokenLine > 0)
      batch.push({ text: "", line: brokenLine, broken: "expected only events in the list of events" });
    brokenLine = 0;
    if (batch.length > 0) yield batch;
  }
  if (!seen)
    throw new RigelError(
      "profile",
      `${path}: expected a list "traceEvents", as torch.profiler's export_chrome_trace writes, found none`,
    );
  if (depth > 0 || inString)
    yield [{ text: "", line: captureDepth >= 0 ? captureLine : line, broken: "the file ends in the middle" }];
}
