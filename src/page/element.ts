/**
 * page/element.ts: what the pages share: elements made of text, tables, the colours of clients.
 *
 * Texts come from programs and files: they only ever become text.
 */

/** Distinguishable without red and green (Okabe and Ito's palette, without yellow). */
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c564b", "#7f7f7f"];

export function colourOf(index: number): string {
  return COLOURS[index % COLOURS.length] ?? "#888";
}

export function byId(id: string): HTMLElement {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no #${id} in the page`);
  return found;
}

export function element(tag: string, className = "", ...children: (Node | string)[]): HTMLElement {
  const made = document.createElement(tag);
  if (className !== "") made.className = className;
  made.append(...children);
  return made;
}

/** A cell: a text, or one with a colour beside it or a class of its own. */
export type Cell = string | { text: string; colour?: string; className?: string };

/** A name that has more letters takes several lines. */
const LONG = 24;

/** A table whose first `left` columns begin at the left; a phone has no room for the column `wide`. */
export function table(
  header: readonly string[],
  rows: readonly (readonly Cell[])[],
  left: number,
  wide?: number,
): HTMLElement {
  const classOf = (column: number): string => `${column < left ? "text" : ""}${column === wide ? " wide" : ""}`.trim();
  const head = element("tr", "", ...header.map((title, column) => element("th", classOf(column), title)));
  const body = rows.map((cells) =>
    element(
      "tr",
      "",
      ...cells.map((cell, column) => {
        const { text, colour, className = "" } = typeof cell === "string" ? { text: cell, colour: undefined } : cell;
        const long = column === 0 && text.length > LONG ? "long" : "";
        const made = element("td", [classOf(column), className, long].filter(Boolean).join(" "), text);
        if (colour !== undefined) {
          const swatch = element("span", "swatch");
          swatch.style.background = colour;
          made.prepend(swatch);
        }
        return made;
      }),
    ),
  );
  return element("table", "", element("thead", "", head), element("tbody", "", ...body));
}

/** Puts a unit behind a number; nothing behind one that is not known. */
export function withUnit(text: (value: number | null) => string, unit: string): (value: number | null) => string {
  return (value) => (value === null ? "-" : `${text(value)}${unit}`);
}
