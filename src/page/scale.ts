/**
 * page/scale.ts: the axis of a plot on which each step upwards is a factor.
 *
 * Pure.
 */

type Values = ArrayLike<number | null | undefined>;

/**
 * What such an axis shows: from a bit below the least to a bit above the greatest of what is drawn, and at least one power of ten. The lowest
 * thirtieth of all values do not count: a program that warms up has requests a hundredth as long as others, and a second of those is not to have half
 * of the plot; its line leaves that below.
 */
export function decades(lines: readonly Values[], greatest: number | null): [number, number] {
  const values = lines
    .flatMap((line) => Array.from(line, (value) => value ?? 0))
    .filter((value) => value > 0)
    .toSorted((a, b) => a - b);
  const least = values[Math.floor(values.length / 30)];
  if (least === undefined || greatest === null) return [0.1, 100];
  const middle = Math.sqrt(least * greatest);
  return [Math.min(least / 1.4, middle / 3.2), Math.max(greatest * 1.4, middle * 3.2)];
}

/** 1, 2 and 5 of each power of ten; of a long range 1 alone. */
export function steps(least: number, greatest: number): number[] {
  const found: number[] = [];
  for (let power = Math.floor(Math.log10(least)); 10 ** power <= greatest; power++)
    for (const digit of greatest / least > 3000 ? [1] : [1, 2, 5]) found.push(Number(`${digit}e${power}`));
  return found.filter((value) => value >= least && value <= greatest);
}
