/**
 * build.ts: makes dist/rigel, one file that holds Bun, Rigel, the native parts and the profiles.
 *
 * native.ts unpacks what is embedded here; the layout of the folder `embed` is the agreement between the two. The binary
 * must not read .env or bunfig.toml of whatever folder it is started in, hence the two autoload options.
 */

import { cpSync, mkdirSync, rmSync, statSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { progress } from "./log.ts";
import { Native } from "./native.ts";
import { PAGES, buildPage, embeddedName } from "./page.ts";

const root = resolve(import.meta.dir, "..");
const outfile = join(root, "dist", "rigel");
const embed = join(root, "dist", "embed");

const { files } = await Native.load();
rmSync(embed, { recursive: true, force: true });
mkdirSync(embed, { recursive: true });
try {
  cpSync(files.interposer, join(embed, "librigel.so"));
  cpSync(files.replay, join(embed, "rigel-replay"));
  cpSync(files.simulate, join(embed, "rigel-simulate"));
  cpSync(join(files.simulator, "libcuda.so.1"), join(embed, "sim", "libcuda.so.1"));
  cpSync(files.workload, join(embed, "workload.py"));
  cpSync(join(files.python, "rigel.py"), join(embed, "python", "rigel.py"));
  cpSync(files.profiles, join(embed, "profiles"), {
    recursive: true,
    filter: (path) => path === files.profiles || /\.(csv|json)$/.test(path),
  });
  for (const page of PAGES) writeFileSync(join(embed, embeddedName(page)), await buildPage(page));
  const result = await Bun.build({
    entrypoints: [join(root, "src", "cli.ts")],
    target: "bun",
    compile: { outfile, assets: [embed], autoloadDotenv: false, autoloadBunfig: false },
  });
  for (const message of result.logs) progress(String(message));
  progress(`${outfile}: ${(statSync(outfile).size / 1e6).toFixed(0)} MB`);
} finally {
  rmSync(embed, { recursive: true, force: true });
}
