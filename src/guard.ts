/**
 * guard.ts: what happens when the launcher itself is killed: a shell waits at the end of a pipe, and when the launcher is
 * gone without having said goodbye, ends the clients and removes the files.
 *
 * Clients have sessions of their own, so nothing else would end them: they would go on using the GPU unseen. Does nothing
 * as long as the launcher lives.
 */

const SCRIPT = `
groups=
while read -r word what; do
  case $word in
    group) groups="$groups $what" ;;
    ended) groups=$(for g in $groups; do [ "$g" = "$what" ] || printf ' %s' "$g"; done) ;;
    stay) break ;;
    done) exit 0 ;;
  esac
done
mark=$1
farewell=$2
guest=$3
not=$4
segment=$5
shared=$6
shift 6
# Twice: while a process becomes another program, it seems to have no environment.
guests() {
  [ -n "$guest" ] || return 1
  for file in $(for time in 1 2; do grep -lzFxe "$mark" /proc/[0-9]*/environ; sleep 0.1; done); do
    grep -qze "^$guest=" "$file" && ! grep -qzFxe "$guest=$not" "$file" && return 0
  done
  return 1
}
joined() {
  [ -n "$segment" ] || return 1
  for file in $(for time in 1 2; do grep -lzFxe "$segment" /proc/[0-9]*/environ; sleep 0.1; done); do
    grep -qze "^$guest=" "$file" && return 0
  done
  return 1
}
for g in $groups; do kill -s TERM -- "-$g"; done
[ -z "$groups" ] || sleep 5
for g in $groups; do kill -s KILL -- "-$g"; done
while [ -z "$segment" ] && guests; do sleep 1; done
eval "$farewell"
for file in $(for time in 1 2; do grep -lzFxe "$mark" /proc/[0-9]*/environ; sleep 0.1; done); do
  pid=\${file#/proc/}
  kill -s KILL "\${pid%/environ}"
done
! joined || shift "$shared"
rm -rf -- "$@"
`;

interface Shared {
  mark: string;
  files: readonly string[];
}

export class Guard implements Disposable {
  readonly #shell;

  /**
   * If the launcher dies, `farewell` (a command of the shell, which must end by itself) is run, processes with `mark` in
   * their environment are ended, and `files`, which may be folders, removed. All of that once no process is left that has the mark and,
   * unlike the launcher, the variable `guest`: somebody else's. Or, with `shared`, at once, but for its files, which processes that have its mark and the
   * variable go on with, if there are any: who of them leaves last removes those.
   */
  constructor(
    mark: string,
    files: readonly string[],
    { farewell = ":", guest = "", shared }: { farewell?: string; guest?: string; shared?: Shared } = {},
  ) {
    const not = process.env[guest] ?? "";
    const of = shared ?? { mark: "", files: [] };
    const given = [mark, farewell, guest, not, of.mark, String(of.files.length), ...of.files, ...files];
    this.#shell = Bun.spawn(["/bin/sh", "-c", SCRIPT, "rigel-guard", ...given], {
      env: { PATH: `${process.env["PATH"] ?? ""}:/usr/bin:/bin` },
      // Out of reach of the terminal's Ctrl-C.
      detached: true,
      stdin: "pipe",
      stdout: "ignore",
      stderr: "ignore",
    });
    this.#shell.unref();
  }

  /** A process group that must not outlive the launcher. */
  watch(group: number): void {
    this.#say(`group ${group}`);
  }

  /** It has ended: its number may soon be somebody else's. */
  forget(group: number): void {
    this.#say(`ended ${group}`);
  }

  /** The launcher ends well, and what it would do as it does is left to this: there are guests. */
  stay(): void {
    this.#say("stay");
    this.#shell.stdin.end();
  }

  [Symbol.dispose](): void {
    this.#say("done");
    this.#shell.stdin.end();
  }

  #say(line: string): void {
    this.#shell.stdin.write(`${line}\n`);
    this.#shell.stdin.flush();
  }
}
