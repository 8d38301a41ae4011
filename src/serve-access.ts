/**
 * serve-access.ts: who may ask the server for what: its private folder, socket and token, and the checks of every request.
 *
 * On the Unix socket the file's mode is the check: whoever may open it is the user. On 127.0.0.1 every user of the machine, and every
 * page in a browser, can send something, so there
 *   - Host must name this server (a page elsewhere whose name was made to mean 127.0.0.1 does not),
 *   - Origin and Sec-Fetch-Site, which browsers send, must not be another site's, but for links to the dashboard,
 *   - whatever is no plain reading, and what launches are made of, needs the token.
 * A token is only ever read from a file that this user alone can read and write, and that is no link.
 */

import { randomBytes, timingSafeEqual } from "node:crypto";
import {
  chmodSync,
  closeSync,
  constants,
  fchmodSync,
  fstatSync,
  lstatSync,
  mkdirSync,
  openSync,
  readSync,
  unlinkSync,
  writeSync,
} from "node:fs";
import { connect } from "node:net";
import { join } from "node:path";
import { RigelError, reason } from "./errors.ts";

/** Largest body that is looked at. */
export const BODY_LIMIT_bytes = 2 ** 20;

/** Why a request is not answered. */
export interface Refusal {
  status: number;
  code: string;
  message: string;
}

/** How a request came in. */
export type Transport = { kind: "unix" } | { kind: "tcp"; port: number; token: string };

const READING = new Set(["GET", "HEAD"]);
const HTTP_PORT = 80;

/**
 * What is wrong with a request, as far as that can be said before its path is looked up; undefined if nothing is. It has no path
 * where its address cannot be put together.
 */
export function refusal(request: Request, path: string | undefined, transport: Transport): Refusal | undefined {
  const { headers, method } = request;
  // HTTP/1.0 may leave Host out, and over a socket it may be anything.
  if (path === undefined) return { status: 400, code: "no_host", message: "expected a Host that names this server" };
  if (transport.kind === "tcp") {
    const host = headers.get("host") ?? "";
    const hosts = hostsOf(transport.port);
    if (!hosts.includes(host.toLowerCase()))
      return { status: 403, code: "foreign_host", message: `Host is ${shown(host)}, expected ${hosts.join(" or ")}` };
    const origin = headers.get("origin");
    if (origin !== null && !hosts.some((name) => origin === `http://${name}`))
      return { status: 403, code: "foreign_origin", message: `a page of ${shown(origin)} may not ask this server` };
    const site = headers.get("sec-fetch-site");
    if (site !== null && !["same-origin", "none"].includes(site) && !isFollowed(request, path))
      return { status: 403, code: "foreign_origin", message: "a page of another site may not ask this server" };
    if (!READING.has(method) || isPrivate(path)) {
      const given = /^Bearer +(\S+)$/i.exec(headers.get("authorization") ?? "")?.[1];
      if (given === undefined)
        return {
          status: 401,
          code: "no_token",
          message:
            "this needs the header `Authorization: Bearer TOKEN`, with the token that `rigel serve` keeps in its file",
        };
      if (!same(given, transport.token))
        return { status: 401, code: "wrong_token", message: "the token is another one" };
    }
  }
  if (READING.has(method)) return undefined;
  const length = headers.get("content-length");
  if (headers.has("transfer-encoding") && length === null)
    return { status: 411, code: "no_length", message: "expected a Content-Length" };
  if (Number(length ?? 0) > BODY_LIMIT_bytes)
    return {
      status: 413,
      code: "too_large",
      message: `expected a body of at most ${BODY_LIMIT_bytes} bytes, got ${shown(length ?? "")}`,
    };
  if (Number(length ?? 0) > 0 && !/^application\/(merge-patch\+)?json\b/i.test(headers.get("content-type") ?? ""))
    return {
      status: 415,
      code: "no_json",
      message: `expected Content-Type application/json, got ${shown(headers.get("content-type") ?? "none")}`,
    };
  return undefined;
}

/** A link to the dashboard was followed: the page that has it learns nothing by that, and the dashboard does nothing by itself. */
function isFollowed({ headers, method }: Request, path: string): boolean {
  const isWindow = headers.get("sec-fetch-mode") === "navigate" && headers.get("sec-fetch-dest") === "document";
  return isWindow && method === "GET" && path === "/";
}

/** What may be called this server: who asks at HTTP's own port leaves that out. */
function hostsOf(port: number): string[] {
  const names = ["127.0.0.1", "localhost"];
  return [...(port === HTTP_PORT ? names : []), ...names.map((name) => `${name}:${port}`)];
}

/** What launches are made of (commands, environments) is not for everybody. However the path is written. */
function isPrivate(path: string): boolean {
  try {
    return decodeURIComponent(path).toLowerCase().includes("/launch");
  } catch {
    return true;
  }
}

function shown(text: string): string {
  return JSON.stringify(text.length > 80 ? `${text.slice(0, 79)}…` : text);
}

function same(given: string, token: string): boolean {
  const [a, b] = [Buffer.from(given), Buffer.from(token)];
  return a.length === b.length && timingSafeEqual(a, b);
}

/** Where that folder is, be it there or not. */
export function runtimePath(environment: Record<string, string | undefined>): string {
  const xdg = environment["XDG_RUNTIME_DIR"];
  return xdg?.startsWith("/") ? join(xdg, "rigel") : `/tmp/rigel-run-${process.getuid?.() ?? 0}`;
}

/**
 * The folder for sockets and secrets of this user: `rigel` in XDG_RUNTIME_DIR where that is an absolute path, else
 * /tmp/rigel-run-<uid>. Throws where somebody else could look into it or has put it there.
 */
export function runtimeFolder(environment: Record<string, string | undefined> = process.env): string {
  return folderOfOwn(runtimePath(environment), "XDG_RUNTIME_DIR");
}

/** Makes a folder that this user alone can look into; throws where it cannot be, or is not one. `variable` says where it goes. */
export function folderOfOwn(folder: string, variable: string): string {
  try {
    mkdirSync(folder, { mode: 0o700 });
    // The umask may have taken some of that.
    chmodSync(folder, 0o700);
  } catch (thrown) {
    if (!(thrown instanceof Error && "code" in thrown && thrown.code === "EEXIST"))
      throw new RigelError(
        "machine",
        `${folder} cannot be made (${reason(thrown)}); set ${variable} to a folder of your own that can be written to`,
        { cause: thrown },
      );
  }
  const entry = lstatSync(folder);
  if (!entry.isDirectory() || entry.uid !== process.getuid?.() || (entry.mode & 0o077) !== 0)
    throw new RigelError(
      "machine",
      `${folder} is not a folder that belongs to this user alone (mode 0700); remove it, or set ${variable} to another place`,
    );
  return folder;
}

const TOKEN_bytes = 32;

/** The token in a file, made if there is none. Throws where the file could have been put there or read by somebody else. */
export function tokenIn(path: string): string {
  const { O_RDONLY, O_WRONLY, O_CREAT, O_EXCL, O_NOFOLLOW } = constants;
  try {
    const file = openSync(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0o600);
    try {
      fchmodSync(file, 0o600);
      writeSync(file, `${randomBytes(TOKEN_bytes).toString("base64url")}\n`);
    } finally {
      closeSync(file);
    }
  } catch (thrown) {
    if (!(thrown instanceof Error && "code" in thrown && thrown.code === "EEXIST")) throw refusedToken(path, thrown);
  }
  let file: number;
  try {
    file = openSync(path, O_RDONLY | O_NOFOLLOW);
  } catch (thrown) {
    throw refusedToken(path, thrown);
  }
  try {
    const { uid, mode, nlink } = fstatSync(file);
    if (!fstatSync(file).isFile()) throw refusedToken(path, "it is no plain file");
    if (uid !== process.getuid?.()) throw refusedToken(path, `it belongs to user ${uid}`);
    if ((mode & 0o077) !== 0) throw refusedToken(path, `its mode is ${(mode & 0o777).toString(8)}, expected 600`);
    if (nlink !== 1) throw refusedToken(path, "it has another name besides");
    const bytes = Buffer.alloc(256);
    const text = bytes.toString("utf8", 0, readSync(file, bytes)).trim();
    if (!/^[\w-]{32,200}$/.test(text)) throw refusedToken(path, "what is in it is no token");
    return text;
  } finally {
    closeSync(file);
  }
}

function refusedToken(path: string, why: unknown): RigelError {
  const said = typeof why === "string" ? why : reason(why);
  return new RigelError("machine", `the token file ${path} cannot be used: ${said}; remove it, and a new one is made`);
}

/** Makes way for a socket: what a killed server has left goes; anything else throws. */
export async function clearSocket(path: string): Promise<void> {
  const entry = lstatSync(path, { throwIfNoEntry: false });
  if (!entry) return;
  if (!entry.isSocket() || entry.uid !== process.getuid?.())
    throw new RigelError(
      "machine",
      `${path} is ${entry.isSocket() ? `a socket of user ${entry.uid}` : "no socket"}; remove it, or set XDG_RUNTIME_DIR`,
    );
  if (await answers(path))
    throw new RigelError("machine", `a server is listening on ${path} already; use that one, or end it first`);
  unlinkSync(path);
}

/** Whether somebody listens on a socket. */
export async function answers(path: string): Promise<boolean> {
  const { promise, resolve } = Promise.withResolvers<boolean>();
  const socket = connect(path);
  socket.once("connect", () => resolve(true));
  socket.once("error", () => resolve(false));
  const listening = await promise;
  socket.destroy();
  return listening;
}
