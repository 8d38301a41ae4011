/**
 * page/plot.ts: one plot of the dashboard: lines over the last minutes, a legend with the latest values, or those under the cursor.
 *
 * Runs in the browser. Colours are given by the caller and by the page's style sheet.
 */

import uPlot from "uplot";
import { decades, steps } from "./scale.ts";

export interface Line {
  label: string;
  colour: string;
  dashed?: boolean;
  /** Holds its value until the next one. */
  stepped?: boolean;
}

export interface Look {
  /** Upwards each step is a factor, so that what is small can be seen beside what is large. */
  logarithmic: boolean;
  /** To the right are seconds since the beginning, not times of day. */
  seconds: boolean;
  /** What happened when: a line from top to bottom each, and its text above it. */
  marks?: readonly Marked[];
}

export interface Marked {
  x: number;
  text: string;
}

/** Texts of marks stand above the plot, in rows of this height; one for which there is no room is left out. */
const MARK_ROWS = 2;
const MARK_HEIGHT = 13;

const HEIGHT = 170;

export class Plot {
  readonly element: HTMLElement;
  readonly #plot: uPlot;
  readonly #values: HTMLElement[];
  readonly #format: (value: number | null) => string;
  readonly #observer: ResizeObserver;

  /** `format` says a value with its unit; axes have numbers alone, so the title names the unit. */
  constructor(
    title: string,
    lines: readonly Line[],
    format: (value: number | null) => string,
    { logarithmic, seconds, marks = [] }: Look,
  ) {
    this.#format = format;
    this.element = document.createElement("figure");
    this.element.className = "card";
    this.element.style.margin = "0";
    const head = document.createElement("h3");
    head.textContent = title;
    const legend = document.createElement("ul");
    legend.className = "legend";
    this.#values = lines.map(({ label, colour, dashed }) => {
      const item = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = dashed ? "swatch dashed" : "swatch";
      swatch.style.background = colour;
      swatch.style.borderColor = colour;
      const value = document.createElement("b");
      item.append(swatch, `${label} `, value);
      legend.append(item);
      return value;
    });
    const place = document.createElement("div");
    this.element.append(head, legend, place);
    const { ink, soft, line } = colours();
    const axis = {
      stroke: soft,
      grid: { stroke: line, width: 1 },
      ticks: { stroke: line, width: 1 },
      font: "11px system-ui",
    };
    const above = marks.some(({ text }) => text !== "") ? MARK_ROWS * MARK_HEIGHT : 0;
    const height = HEIGHT + above;
    this.#plot = new uPlot(
      {
        width: 300,
        height,
        legend: { show: false },
        cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
        padding: [6 + above, 22, 0, 0],
        scales: {
          x: { time: !seconds },
          y: logarithmic
            ? { distr: 3, range: ({ data: [, ...values] }, _, greatest) => decades(values, greatest) }
            : { range: (_, __, greatest) => [0, greatest > 0 ? greatest * 1.08 : 1] },
        },
        axes: [
          {
            ...axis,
            size: 28,
            space: 70,
            values: seconds
              ? (_, splits) => splits.map((value) => `${value} s`)
              : [[1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]],
          },
          {
            ...axis,
            size: 48,
            space: 26,
            ...(logarithmic && {
              splits: (_: uPlot, __: number, least: number, greatest: number) => steps(least, greatest),
              // Its own choice would leave most of them out.
              filter: (_: uPlot, splits: number[]) => splits,
            }),
            values: (_, splits) => splits.map(axisText),
          },
        ],
        series: [
          {},
          ...lines.map(({ label, colour, dashed, stepped }) => ({
            label,
            stroke: colour === "ink" ? ink : colour,
            width: dashed ? 1.5 : 2,
            spanGaps: false,
            points: { show: false },
            ...(dashed && { dash: [5, 4] }),
            ...(stepped && uPlot.paths.stepped && { paths: uPlot.paths.stepped({ align: 1 }) }),
          })),
        ],
        hooks: {
          setCursor: [() => this.#showValues()],
          ...(marks.length > 0 && { draw: [(plot: uPlot) => drawMarks(plot, marks, colours())] }),
        },
      },
      [[], ...lines.map(() => [])],
      place,
    );
    this.#observer = new ResizeObserver(() => {
      const width = Math.floor(place.clientWidth);
      if (width > 0 && width !== this.#plot.width) this.#plot.setSize({ width, height });
    });
    this.#observer.observe(place);
  }

  /** Times in seconds since 1970, and a list of values for each line; null is a gap. */
  set(times_s: readonly number[], values: readonly (readonly (number | null)[])[]): void {
    this.#plot.setData([[...times_s], ...values.map((list) => [...list])]);
    this.#showValues();
  }

  remove(): void {
    this.#observer.disconnect();
    this.#plot.destroy();
    this.element.remove();
  }

  #showValues(): void {
    const at = this.#plot.cursor.idx ?? this.#plot.data[0].length - 1;
    for (const [index, element] of this.#values.entries())
      element.textContent = this.#format(this.#plot.data[index + 1]?.[at] ?? null);
  }
}

/** In the canvas's own pixels. */
function drawMarks({ ctx, bbox, valToPos }: uPlot, marks: readonly Marked[], { ink, soft }: Colours): void {
  const scale = devicePixelRatio;
  const right = bbox.left + bbox.width;
  const ends: number[] = Array.from({ length: MARK_ROWS }, () => Number.NEGATIVE_INFINITY);
  ctx.save();
  ctx.font = `${11 * scale}px system-ui`;
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  ctx.lineWidth = scale;
  ctx.setLineDash([2 * scale, 3 * scale]);
  for (const { x, text } of marks) {
    const at = Math.round(valToPos(x, "x", true));
    if (at < bbox.left || at > right) continue;
    const width = ctx.measureText(text).width;
    // Begins above its line; ends there where the page does.
    const from = at + width > right + 20 * scale ? at - width : at;
    const row = ends.findIndex((end) => end < from);
    const isNamed = text !== "" && row >= 0;
    const above = isNamed ? (row + 1) * MARK_HEIGHT * scale : 0;
    ctx.strokeStyle = soft;
    ctx.beginPath();
    ctx.moveTo(at, bbox.top - Math.max(0, above - MARK_HEIGHT * scale));
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    if (!isNamed) continue;
    ends[row] = from + width + 6 * scale;
    ctx.fillStyle = ink;
    ctx.fillText(text, from, bbox.top - above);
  }
  ctx.restore();
}

/** Short: the title has the unit. */
function axisText(value: number): string {
  if (value >= 1e6) return `${value / 1e6}M`;
  if (value >= 1e4) return `${value / 1e3}k`;
  return String(Number(value.toPrecision(6)));
}

interface Colours {
  ink: string;
  soft: string;
  line: string;
}

/** What the style sheet says at the moment. */
function colours(): Colours {
  const style = getComputedStyle(document.documentElement);
  const get = (name: string): string => style.getPropertyValue(name).trim();
  return { ink: get("--ink"), soft: get("--soft"), line: get("--line") };
}
