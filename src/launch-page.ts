/**
 * launch-page.ts: the report of a launch as one HTML page: the table, and second by second what the control loop saw and did.
 */

import { pageText } from "./page.ts";
import { type Report, allNotes } from "./report.ts";

/** The page of a report. */
export async function launchPage(report: Report): Promise<string> {
  // Names and notes in it are anybody's: nothing in them may end the element.
  const data = JSON.stringify({ ...report, notes: allNotes(report) }).replaceAll("<", "\\u003c");
  const page = await pageText("launch");
  return page.replace("<!-- report -->", () => `<script type="application/json" id="report">${data}</script>`);
}
