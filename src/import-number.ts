/**
 * import-number.ts: numbers and units as profilers print them.
 *
 * A text that could mean two numbers is refused: 1,234 is a thousand and more to some and about one to others.
 */

/** A field that does not fit; the row it is in is named by whoever reads the file. */
export class FieldError extends Error {}

/** What tools print where there is no value. */
const NOTHING = /^(|-|n\/a|nan|null|none|\(!\) n\/a|no data)$/i;

/** A number, or nothing where the tool had none. `decimalComma`: `;` separates the fields, as spreadsheets do there. */
export function parseNumber(field: string, text: string, decimalComma: boolean): number | undefined {
  const bare = text.trim().replaceAll(/(?<=\d)[\u00a0\u202f' ](?=\d{3}(\D|$))/g, "");
  if (NOTHING.test(bare)) return undefined;
  if (decimalComma && /^-?(\d+|\d{1,3}(\.\d{3})+),\d+$/.test(bare))
    return Number(bare.replaceAll(".", "").replace(",", "."));
  if (decimalComma && /^-?\d{1,3}(\.\d{3})+$/.test(bare))
    throw new FieldError(`${field}: ${text} may be thousands or a fraction; export it again with LC_ALL=C`);
  if (/^-?\d+(\.\d*)?(e[+-]?\d+)?$/i.test(bare)) return Number(bare);
  if (!decimalComma && /^-?\d{1,3}(,\d{3})+(\.\d*)?$/.test(bare)) return Number(bare.replaceAll(",", ""));
  if (/^-?[\d.]+,\d+$/.test(bare))
    throw new FieldError(`${field}: ${text} has a decimal comma; export it again with LC_ALL=C`);
  throw new FieldError(`${field}: expected a number, got ${JSON.stringify(text.slice(0, 40))}`);
}

/** A whole number from 0 to `most`; what is missing is 0. */
export function wholeNumber(field: string, value: number | undefined, most: number): number {
  if (value === undefined) return 0;
  if (!Number.isInteger(value) || value < 0 || value > most)
    throw new FieldError(`${field}: expected a whole number from 0 to ${most}, got ${value}`);
  return value;
}

const TIME_ns: Record<string, number> = {
  ns: 1,
  nsec: 1,
  nsecond: 1,
  nanosecond: 1,
  ts_ns: 1,
  dur_ns: 1,
  us: 1e3,
  "\u00b5s": 1e3,
  "\u03bcs": 1e3,
  usec: 1e3,
  usecond: 1e3,
  microsecond: 1e3,
  ms: 1e6,
  msec: 1e6,
  msecond: 1e6,
  millisecond: 1e6,
  s: 1e9,
  sec: 1e9,
  second: 1e9,
};

const KIB = 1024;
const SIZE_bytes: Record<string, number> = {
  b: 1,
  byte: 1,
  mem_b: 1,
  kb: 1e3,
  kbyte: 1e3,
  mb: 1e6,
  mbyte: 1e6,
  gb: 1e9,
  gbyte: 1e9,
  tbyte: 1e12,
  kib: KIB,
  mib: KIB ** 2,
  gib: KIB ** 3,
};

/** Nanoseconds in one unit of time: `usecond`, `ms`. */
export function timeUnit_ns(field: string, unit: string): number {
  return unitOf(field, unit, TIME_ns, "a unit of time (ns, us, ms, s)");
}

/** Bytes in one unit of size: `MB`, `Kbyte/block`. */
export function sizeUnit_bytes(field: string, unit: string): number {
  return unitOf(field, unit.replace(/\/.*/, ""), SIZE_bytes, "a unit of size (byte, KB, MB, MiB)");
}

function unitOf(field: string, unit: string, units: Record<string, number>, expected: string): number {
  const known = units[unit.trim().toLowerCase()] ?? units[unit.trim().toLowerCase().replace(/s$/, "")];
  if (known === undefined) throw new FieldError(`${field}: expected ${expected}, got ${JSON.stringify(unit)}`);
  return known;
}
