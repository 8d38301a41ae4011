/**
 * hang-bundle.ts: keeps what shows a hang, before anybody ends the programs that hang: a folder of a few files.
 *
 *   hangs.json   what was found (hangs.ts)
 *   trace.json   the last operations of all clients, for Perfetto
 *   stacks.txt   of each thread of each process: state, where in the kernel it waits, and its kernel stack where that may be read
 *   python-PID.txt  the Python stacks of that process, where there is a py-spy
 *
 * Only looks at the processes; py-spy stops one for the moment it looks (--nonblocking keeps it from doing so).
 */

import { existsSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import type { Hangs } from "./hangs.ts";
import { cacheFolders, privateFolder } from "./native.ts";
import { makeFolder } from "./path.ts";
import type { Segment } from "./segment.ts";
import { writeTrace } from "./trace.ts";

const KEPT = 20;
/** As writeBundle names them. */
const NAME = /^hang-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d-\d{3}Z-\d+$/;
const PY_SPY_ms = 10_000;

/** Where bundles go unless said otherwise; made if it is not there. */
export function bundleFolder(): string {
  const [base] = cacheFolders();
  if (base === undefined) throw new Error("no cache folder");
  privateFolder(base);
  const folder = join(base, "hangs");
  privateFolder(folder);
  return folder;
}

/** Writes a bundle into a new folder in `folder` and returns its path. The oldest ones there make room. */
export async function writeBundle(segment: Segment, hangs: Hangs, folder: string): Promise<string> {
  const path = newFolder(folder);
  writeFileSync(join(path, "hangs.json"), `${JSON.stringify(hangs, null, 2)}\n`, { mode: 0o600 });
  writeFileSync(join(path, "stacks.txt"), hangs.processes.map(({ name, pid }) => stacksOf(name, pid)).join("\n"), {
    mode: 0o600,
  });
  await writeTrace([segment], join(path, "trace.json"));
  const tool = Bun.which("py-spy");
  if (tool !== null)
    await Promise.all(
      hangs.processes
        .filter(({ verdict }) => verdict !== "dead" && verdict !== "ended")
        .map(({ pid }) => pythonStack(tool, pid, join(path, `python-${pid}.txt`))),
    );
  // What else is there is somebody's own.
  const others = readdirSync(folder).filter((name) => NAME.test(name));
  for (const name of others.toSorted().slice(0, -KEPT)) rmSync(join(folder, name), { recursive: true, force: true });
  return path;
}

/** Made, and named by the time, or by the next millisecond for which this process has none there. */
function newFolder(folder: string): string {
  for (let at_ms = Date.now(); ; at_ms++) {
    const made = new Date(at_ms).toISOString().replaceAll(/[:.]/g, "-");
    const path = join(folder, `hang-${made}-${process.pid}`);
    if (existsSync(path)) continue;
    makeFolder(path, 0o700);
    return path;
  }
}

/** What /proc tells of the threads of a process. */
function stacksOf(name: string, pid: number): string {
  const lines = [`${name} ${pid}`];
  for (const tid of entriesOf(`/proc/${pid}/task`)) {
    const file = (what: string): string => textOf(`/proc/${pid}/task/${tid}/${what}`);
    const state = /^State:\s*(.*)$/m.exec(file("status"))?.[1] ?? "gone";
    lines.push(
      `  ${tid} ${file("comm")}: ${state}, in ${file("wchan") || "unknown"}, system call ${file("syscall") || "unknown"}`,
    );
    lines.push(
      ...file("stack")
        .split("\n")
        .filter(Boolean)
        .map((line) => `    ${line}`),
    );
  }
  return `${lines.join("\n")}\n`;
}

async function pythonStack(tool: string, pid: number, path: string): Promise<void> {
  await using child = Bun.spawn([tool, "dump", "--nonblocking", "--pid", String(pid)], {
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
    timeout: PY_SPY_ms,
  });
  const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  writeFileSync(path, stdout || stderr, { mode: 0o600 });
}

function entriesOf(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch {
    return [];
  }
}

/** A file that may not be there, or not for this user. */
function textOf(path: string): string {
  try {
    return readFileSync(path, "utf8").trim();
  } catch {
    return "";
  }
}
