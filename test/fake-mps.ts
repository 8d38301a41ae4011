/**
 * fake-mps.ts: stands in for nvidia-cuda-mps-control, as far as a launcher can tell the two apart.
 *
 *   -d                a daemon with the files of the real one: `control` (a socket), the pid file, `log` (a pipe) in the pipe
 *                     directory, control.log and server.log in the log directory
 *   (commands)        one a line on standard input: start_server, get_server_list, get_client_list, quit
 *
 * It has no GPU and no clients of its own: a program counts as one when it writes its number into the file `joined` of the
 * pipe directory. FAKE_MPS names what goes wrong: `denied`, `silent` (the daemon ends at once), `exclusive` (its server
 * cannot start), `late` (its server is never ready), `stuck` (what starts the daemon does not end), `stubborn` (the daemon does not quit,
 * and ignores SIGTERM). What it was told is in `told` of FAKE_MPS_RECORD, and that nobody waits any more for a server that is late.
 */

import { appendFileSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { type Socket, connect, createServer } from "node:net";
import { join } from "node:path";

const pipes = process.env["CUDA_MPS_PIPE_DIRECTORY"] || "/tmp/nvidia-mps";
const logs = process.env["CUDA_MPS_LOG_DIRECTORY"] || "/var/log/nvidia-mps";
const fault = process.env["FAKE_MPS"] ?? "";
const control = join(pipes, "control");
const pidFile = join(pipes, "nvidia-cuda-mps-control.pid");

function record(text: string): void {
  const folder = process.env["FAKE_MPS_RECORD"];
  if (folder) appendFileSync(join(folder, "told"), `${text}\n`);
}

function log(file: "control.log" | "server.log", who: string, text: string): void {
  appendFileSync(join(logs, file), `[2026-01-01 00:00:00.000 ${who}] ${text}\n`);
}

/** Detaches a copy of this program as the daemon, and ends once that listens, as the real one does. */
async function daemonise(): Promise<number> {
  if (fault === "denied") {
    console.error("Failed to create the pipe directory: permission denied");
    return 1;
  }
  mkdirSync(pipes, { recursive: true });
  mkdirSync(logs, { recursive: true });
  const daemon = Bun.spawn([process.execPath, import.meta.path, "--serve", "nvidia-cuda-mps-control"], {
    env: process.env,
    detached: true,
    stdio: ["ignore", "inherit", "inherit"],
  });
  daemon.unref();
  if (fault !== "silent") while (!(await send("")).connected && daemon.exitCode === null) await Bun.sleep(10);
  if (fault === "stuck") {
    record("stuck");
    for (;;) await Bun.sleep(1000);
  }
  return 0;
}

function serve(): void {
  if (fault === "silent") process.exit(0);
  let servers: Bun.Subprocess[] = [];
  const command = (line: string, asker: Socket, answer: (text: string) => void): void => {
    const [word, ...rest] = line.trim().split(/\s+/);
    if (!word) return answer("");
    record(line.trim());
    switch (word) {
      case "start_server": {
        const server = Bun.spawn(["sleep", "100000"], { env: process.env, stdio: ["ignore", "ignore", "ignore"] });
        log("control.log", `Control ${process.pid}`, `Starting new server ${server.pid} for user ${rest[1]}`);
        if (fault === "exclusive") {
          server.kill("SIGKILL");
          log(
            "server.log",
            `Server ${server.pid}`,
            "Failed to start : all CUDA-capable devices are busy or unavailable",
          );
          log("control.log", `Control ${process.pid}`, `Server ${server.pid} exited with status 1`);
          return answer("");
        }
        if (fault === "late") return void asker.on("close", () => record("nobody waits"));
        servers.push(server);
        log("control.log", `Control ${process.pid}`, `NEW SERVER ${server.pid}: Ready`);
        return answer("");
      }
      case "get_server_list":
        return answer(servers.map(({ pid }) => `${pid}\n`).join(""));
      case "get_client_list":
        try {
          return answer(readFileSync(join(pipes, "joined"), "utf8"));
        } catch {
          return answer("");
        }
      case "quit":
        if (fault === "stubborn") return;
        for (const server of servers) server.kill("SIGKILL");
        servers = [];
        rmSync(pidFile);
        rmSync(join(pipes, "log"), { force: true });
        log("control.log", `Control ${process.pid}`, "Exit");
        // The real one leaves its socket behind.
        answer("");
        setTimeout(() => process.exit(0), 10);
        return;
      default:
        return answer(`${word}: unknown command\n`);
    }
  };
  Bun.spawnSync(["mkfifo", join(pipes, "log")]);
  writeFileSync(pidFile, `${process.pid}\n`);
  log("control.log", `Control ${process.pid}`, `Starting control daemon using socket ${control}`);
  record(`started for ${process.env["CUDA_VISIBLE_DEVICES"] ?? "every GPU"} in ${pipes}`);
  if (fault === "stubborn") process.on("SIGTERM", () => record("SIGTERM"));
  rmSync(control, { force: true });
  createServer((socket) => {
    socket.on("error", () => {});
    socket.on("data", (data) => command(String(data), socket, (text) => socket.end(text || "\n")));
  }).listen(control);
}

/** Sends one command to the daemon, or only connects. */
function send(line: string): Promise<{ connected: boolean; text: string }> {
  const { promise, resolve } = Promise.withResolvers<{ connected: boolean; text: string }>();
  let text = "";
  const socket = connect(control);
  socket.on("error", () => resolve({ connected: false, text }));
  socket.on("connect", () => {
    if (line !== "") return void socket.write(`${line}\n`);
    socket.destroy();
    resolve({ connected: true, text });
  });
  socket.on("data", (data) => (text += String(data)));
  socket.on("end", () => resolve({ connected: true, text: text.trim() === "" ? "" : text }));
  return promise;
}

async function carryOut(): Promise<number> {
  for (const line of (await Bun.stdin.text()).split("\n").filter((one) => one.trim() !== "")) {
    const { connected, text } = await send(line);
    if (!connected) {
      console.error("Cannot find MPS control daemon process");
      return 1;
    }
    process.stdout.write(text);
  }
  return 0;
}

if (process.argv[2] === "-d") process.exit(await daemonise());
else if (process.argv[2] === "--serve") serve();
else process.exit(await carryOut());
