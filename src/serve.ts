/**
 * serve.ts: `rigel serve`: one server per user and machine through which everything of Rigel can be seen and steered.
 *
 * Listens on a Unix socket of this user's and, if asked, on 127.0.0.1. Nothing of what runs depends on it: it reads and writes
 * segments as every other command does, so it may be killed and started again at any moment; launches that it was asked for are
 * processes of their own (launches.ts). Requests that are refused are told on
 * standard error, one line each.
 */

import { chmodSync, closeSync, constants, fchmodSync, openSync, unlinkSync } from "node:fs";
import { join } from "node:path";
import { type Command } from "commander";
import { z } from "zod";
import { whole } from "./arguments.ts";
import { Segments, segmentFolder } from "./discover.ts";
import { RigelError, reason } from "./errors.ts";
import { GpuShares } from "./gpu-share.ts";
import { grafanaDashboard } from "./grafana.ts";
import { onRequestToEnd } from "./interrupt.ts";
import { Launches, launchesFolder } from "./launches.ts";
import { progress } from "./log.ts";
import { Native } from "./native.ts";
import { type Transport, clearSocket, refusal, runtimeFolder, tokenIn } from "./serve-access.ts";
import { serveApp } from "./serve-app.ts";
import { errorBody } from "./serve-error.ts";
import { seconds } from "./trace-command.ts";
import { Watcher } from "./watcher.ts";

interface ServeFlags {
  port?: number;
  json?: true;
  segment?: string;
  hang: number;
  printGrafana?: true;
}

const EXAMPLES = `
Examples:
  rigel serve                                 listen on the Unix socket alone
  rigel serve --port 0                        also on 127.0.0.1, on any free port, which is printed
  curl --unix-socket $XDG_RUNTIME_DIR/rigel/serve.sock http://rigel/v1/clients
  curl http://127.0.0.1:8080/metrics
  curl -N http://127.0.0.1:8080/v1/events     what happens, as it happens
  rigel serve --print-grafana > rigel.json    a dashboard over /metrics, for Grafana: Dashboards, New, Import
  curl --unix-socket $XDG_RUNTIME_DIR/rigel/serve.sock http://rigel/v1/launch \\
    -H 'content-type: application/json' -d @jobs.json          start a launch (a "cwd" beside "clients" says where)

Files, in $XDG_RUNTIME_DIR/rigel, or /tmp/rigel-run-<uid> where that is not set:
  serve.sock   the socket: whoever may open it may do everything
  token        what is in it: over TCP, what starts or changes something, or tells of launches asked for here, needs
               \`Authorization: Bearer TOKEN\``;

/** What fails here is answered without the page that shows Bun's users their source. */
const PLAIN = { development: false } as const;
/** Bun gives up on a reader that pauses for ten seconds, amid a trace. Over the socket, where its types do not know this, never. */
const PATIENT: object = { idleTimeout: 0 };
/** Over TCP, where anybody may connect and stay, after the longest time that it takes. */
const IDLE_s = 255;

/** Adds `rigel serve`. */
export function addServe(program: Command): void {
  program
    .command("serve")
    .description("serve what runs on this machine over HTTP: statistics, events, metrics, settings, launches")
    .option("--port <port>", "listen on 127.0.0.1 too; 0: any free port", whole(0, 65_535, "a port"))
    .option("--json", "print where it listens as one line of JSON on standard output")
    .option("--hang <time>", "what waits for longer hangs, as /v1/hangs and /metrics say: 60s, 500ms", seconds, 60)
    .option("--segment <folder>", "folder of the shared-memory files (default: /dev/shm)")
    .option("--print-grafana", "print the dashboard for Grafana that GET /grafana.json gives, and end")
    .addHelpText("after", EXAMPLES)
    .action(runServe);
}

async function runServe(flags: ServeFlags): Promise<void> {
  if (flags.printGrafana) {
    process.stdout.write(`${JSON.stringify(grafanaDashboard(), null, 2)}\n`);
    return;
  }
  const segments = segmentFolder(flags.segment);
  const native = await Native.load();
  const folder = runtimeFolder();
  const release = lockFolder(native, folder);
  const servers: { stop: (now: boolean) => Promise<void> }[] = [];
  try {
    await serve(native, { folder, segments }, flags, servers);
  } finally {
    // Event streams have no end of their own.
    await Promise.all(servers.map((server) => server.stop(true)));
    release();
  }
  // What a request has begun, as the check of a launch, has nobody any more who would hear of it.
  process.exit();
}

/** Listens until a signal comes; whoever calls stops what is put into `servers`. */
async function serve(
  native: Native,
  { folder, segments }: { folder: string; segments: string },
  flags: ServeFlags,
  servers: { stop: (now: boolean) => Promise<void> }[],
): Promise<void> {
  // Before there is anything that a signal could leave behind, or anybody knows that this listens.
  const ended = signalled();
  const socket = join(folder, "serve.sock");
  await clearSocket(socket);
  const tokenFile = join(folder, "token");
  const token = flags.port === undefined ? undefined : tokenIn(tokenFile);

  using watcher = new Watcher(new Segments(native, segments), flags.hang, new GpuShares(native), native);
  const app = serveApp(watcher, native, new Launches(native, launchesFolder(), segments));
  const answer = async (request: Request, transport: Transport): Promise<Response> => {
    const refused = refusal(request, URL.parse(request.url)?.pathname, transport);
    if (!refused) {
      const response = await app.handle(request);
      // What is the server's own fault has been told already.
      if (response.status >= 400 && response.status < 500)
        log(request, transport, response.status, await saidIn(response));
      return response;
    }
    log(request, transport, refused.status, refused.message);
    const headers: Record<string, string> = { connection: "close" };
    if (refused.status === 401) headers["www-authenticate"] = 'Bearer realm="rigel"';
    return Response.json(errorBody(refused.code, refused.message), { status: refused.status, headers });
  };

  let url: string | null = null;
  // First, as it may be somebody else's.
  if (flags.port !== undefined && token !== undefined) {
    const onPort = listen(flags.port, (request, port) => answer(request, { kind: "tcp", port, token }));
    servers.push(onPort);
    url = `http://127.0.0.1:${onPort.port}`;
  }
  const umask = process.umask(0o177);
  try {
    const fetch = (request: Request): Promise<Response> => answer(request, { kind: "unix" });
    servers.push(Bun.serve({ ...PLAIN, ...PATIENT, unix: socket, fetch }));
  } finally {
    process.umask(umask);
  }
  try {
    chmodSync(socket, 0o600);
    watcher.start();
    progress(`listening on ${socket}`);
    if (url) progress(`listening on ${url}; what changes something needs the token in ${tokenFile}`);
    if (flags.json) process.stdout.write(`${JSON.stringify({ socket, url, token_file: url ? tokenFile : null })}\n`);
    await ended;
  } finally {
    try {
      unlinkSync(socket);
    } catch {
      // Bun has removed it, or somebody else.
    }
  }
}

/** One line for each request that is refused. */
function log({ method, url }: Request, { kind }: Transport, status: number, message: string): void {
  const path = URL.parse(url)?.pathname ?? url;
  progress(`refused ${method} ${inLine(path)} over ${kind}: ${inLine(message)} (${status})`);
}

/** What came in cannot make a line another one. */
function inLine(text: string): string {
  return text.replaceAll(/\p{C}/gu, "?").slice(0, 300);
}

const errorSchema = z.object({ error: z.object({ message: z.string() }) });

/** What the request is answered with. */
async function saidIn(response: Response): Promise<string> {
  return (
    errorSchema.safeParse(
      await response
        .clone()
        .json()
        .catch(() => null),
    ).data?.error.message ?? "no reason"
  );
}

/** One server per user and machine: who holds the lock. Ends with the process, so that nothing stale is left. */
function lockFolder(native: Native, folder: string): () => void {
  const path = join(folder, "serve.lock");
  const { O_RDWR, O_CREAT, O_NOFOLLOW } = constants;
  try {
    const file = openSync(path, O_RDWR | O_CREAT | O_NOFOLLOW, 0o600);
    // The umask may have taken some of that, and the next server has to open it.
    fchmodSync(file, 0o600);
    closeSync(file);
  } catch (thrown) {
    throw new RigelError("machine", `the file ${path} cannot be locked: ${reason(thrown)}; remove it`, {
      cause: thrown,
    });
  }
  const release = native.lock(path, 0);
  if (!release)
    throw new RigelError(
      "machine",
      `a server of this user runs already (it holds ${path}); use that one (${join(folder, "serve.sock")}), or end it first`,
    );
  return release;
}

function listen(port: number, answer: (request: Request, port: number) => Promise<Response>) {
  try {
    return Bun.serve({
      ...PLAIN,
      hostname: "127.0.0.1",
      port,
      idleTimeout: IDLE_s,
      // Without development Bun shares a port with whoever has it, and each would get some of the requests.
      reusePort: false,
      fetch: (request, server) => answer(request, server.port ?? 0),
    });
  } catch (thrown) {
    throw new RigelError("machine", `127.0.0.1:${port} cannot be listened on; choose another --port, or 0 for any`, {
      cause: thrown,
    });
  }
}

/** Settles at the first request to end. */
function signalled(): Promise<void> {
  const { promise, resolve } = Promise.withResolvers<void>();
  const off = onRequestToEnd(() => {
    // Not yet: whoever is told of this one next, and finds itself alone (`onEnd`), would end the process.
    setImmediate(off);
    resolve();
  });
  return promise;
}
