/**
 * trace-picture.ts: shows a part of a trace in a trace viewer that is not Rigel's: the Performance panel of Chromium's DevTools, which
 * comes with the browser and reads Chrome's trace format. For pictures; knows nothing of what is in the trace.
 *
 * The panel is driven through modules of DevTools that are no public interface: seen with Chromium 156.
 */

import { readFileSync } from "node:fs";
import type { Tab } from "./chromium.ts";

const DEVTOOLS = "devtools://devtools/bundled";
/** Tracks that threads of a process are in, all unfolded. */
const CHART = "timelinePanel.getFlameChart().getMainFlameChart()";

/** A part of a trace, in its own microseconds. */
export interface Part {
  from_us: number;
  to_us: number;
}

/** Opens a trace file; throws if the panel does not come to show as many spans as there are in it. */
export async function showTrace(tab: Tab, path: string, spans: number, { from_us, to_us }: Part): Promise<void> {
  await tab.goto(`${DEVTOOLS}/devtools_app.html?panel=timeline`);
  // The panel is there once it has been shown.
  await tab.until(`import("${DEVTOOLS}/panels/timeline/timeline.js").then(
    ({ TimelinePanel }) => Boolean(globalThis.timelinePanel = TimelinePanel.TimelinePanel.instance()),
    () => false,
  ).catch(() => false)`);
  await tab.evaluate(`globalThis.traceText = ${JSON.stringify(readFileSync(path, "utf8"))}, true`);
  await tab.evaluate(`timelinePanel.loadFromFile(new File([traceText], "trace.json", { type: "application/json" }))`);
  await tab.until(`${CHART}.timelineData()?.entryTotalTimes.length === ${spans}`);
  await tab.evaluate(`(async () => {
    const { TraceBounds } = await import("${DEVTOOLS}/services/trace_bounds/trace_bounds.js");
    timelinePanel.splitWidget().hideSidebar();
    ${CHART}.timelineData().groups.forEach((_, index) => ${CHART}.expandGroup(index));
    const part = { min: ${from_us}, max: ${to_us}, range: ${to_us - from_us} };
    TraceBounds.BoundsManager.instance().setTimelineVisibleWindow(part, { shouldAnimate: false });
  })()`);
  // It draws in its next frames.
  await Bun.sleep(1000);
}
