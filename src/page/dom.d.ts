/** dom.d.ts: what Bun has beyond the DOM's types, for the sources outside of this folder whose types the pages use. */

interface ReadableStream {
  text(): Promise<string>;
}
