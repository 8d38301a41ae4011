/**
 * terminal-svg.ts: lines of a terminal, with their colours, as a picture: SVG that looks the same on light and dark pages.
 *
 * Knows the SGR parameters that Rigel writes: bold, faint, underlined, reversed, and the eight colours.
 */

const FONT_px = 13;
const CELL_px = 7.83;
const LINE_px = 18;
const MARGIN_px = 14;
const INK = "#d7dbe0";
const FAINT = "#8a929c";
const PAPER = "#16191d";
const COLOURS: Readonly<Record<number, string>> = {
  31: "#ff7b72",
  32: "#57c26d",
  33: "#e3b341",
  34: "#6cb6ff",
  35: "#d2a8ff",
  36: "#56d4dd",
};

interface Style {
  bold: boolean;
  faint: boolean;
  underlined: boolean;
  reversed: boolean;
  colour: string | undefined;
}

const PLAIN: Style = { bold: false, faint: false, underlined: false, reversed: false, colour: undefined };

/** The picture of these lines; `title` is what a reader without pictures is told. */
export function svgOf(lines: readonly string[], title: string): string {
  const columns = Math.max(...lines.map((line) => Bun.stringWidth(line)));
  const width = Math.ceil(columns * CELL_px) + 2 * MARGIN_px;
  const height = lines.length * LINE_px + 2 * MARGIN_px;
  const parts = lines.flatMap((line, index) => drawn(line, MARGIN_px + index * LINE_px));
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img">
<title>${escaped(title)}</title>
<rect width="${width}" height="${height}" rx="8" fill="${PAPER}"/>
<g font-family="ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace" font-size="${FONT_px}" xml:space="preserve">
${parts.join("\n")}
</g>
</svg>
`;
}

/** One line: every word at its column, so that columns stay straight whatever the font. */
function drawn(line: string, top: number): string[] {
  const parts: string[] = [];
  let style = PLAIN;
  let column = 0;
  for (const [, codes, text] of line.matchAll(/\u001b\[([\d;]*)m|([^\u001b]+)/g)) {
    if (text === undefined) {
      style = styled(style, codes ?? "");
      continue;
    }
    if (style.reversed) {
      const [x, wide] = [MARGIN_px + column * CELL_px, Bun.stringWidth(text) * CELL_px];
      parts.push(`<rect x="${at(x)}" y="${top}" width="${at(wide)}" height="${LINE_px}" fill="${INK}"/>`);
    }
    for (const word of text.matchAll(/\S+(?: \S+)*/g))
      parts.push(wordAt(word[0], column + Bun.stringWidth(text.slice(0, word.index)), top, style));
    column += Bun.stringWidth(text);
  }
  return parts;
}

function wordAt(word: string, column: number, top: number, style: Style): string {
  const fill = style.reversed ? PAPER : (style.colour ?? (style.faint ? FAINT : INK));
  const more = `${style.bold ? ' font-weight="bold"' : ""}${style.underlined ? ' text-decoration="underline"' : ""}`;
  const long = Bun.stringWidth(word) * CELL_px;
  return (
    `<text x="${at(MARGIN_px + column * CELL_px)}" y="${top + 13.5}" textLength="${at(long)}" ` +
    `lengthAdjust="spacingAndGlyphs" fill="${fill}"${more}>${escaped(word)}</text>`
  );
}

function styled(style: Style, codes: string): Style {
  let next = style;
  for (const code of codes.split(";").map(Number)) {
    if (code === 0) next = PLAIN;
    else if (code === 1) next = { ...next, bold: true };
    else if (code === 2) next = { ...next, faint: true };
    else if (code === 4) next = { ...next, underlined: true };
    else if (code === 7) next = { ...next, reversed: true };
    else if (COLOURS[code] !== undefined) next = { ...next, colour: COLOURS[code] };
  }
  return next;
}

function at(x: number): string {
  return String(Math.round(x * 100) / 100);
}

function escaped(text: string): string {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
