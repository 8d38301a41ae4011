/** import-rigel.ts: a profile of Rigel's own, read to be written in another form: what it says of each kernel is taken as it is. */

import type { FileReport, Recorded } from "./import-row.ts";
import { openProfile } from "./profile.ts";

/** Throws a coded error at a bad row: no file that Rigel wrote has any. */
export async function* readRigel(path: string, report: FileReport): AsyncGenerator<Recorded[]> {
  const { operations, facts } = await openProfile(path);
  const device = facts.get("device") ?? "";
  for await (const { family: _family, bound, bound_reason: _reason, sms, stream, ...rest } of operations) {
    report.rows++;
    yield [{ ...rest, device, stream: String(stream), stated: bound, ...(sms > 0 && { sms }) }];
  }
}
