/**
 * client-environment.ts: what makes a program a client: the environment that it is started with.
 */

import type { Policy } from "./config.ts";
import type { Environment } from "./device.ts";
import type { NativeFiles } from "./native.ts";
import type { PlannedClient } from "./plan.ts";

interface Surroundings {
  /** What it would be started with otherwise. */
  given: Environment;
  files: NativeFiles;
  /** Path of the segment. */
  segment: string;
  policy: Policy["name"];
  /** RIGEL_GUARD; undefined: what is given. */
  guard: string | undefined;
  /** RIGEL_NVTX; undefined: what is given. */
  nvtx: boolean | undefined;
  /** What makes it see its device, and share it as it is to. */
  device: Environment;
}

/** The environment of a client. */
export function clientEnvironment(
  client: Pick<PlannedClient, "name" | "class" | "weight" | "program" | "threads" | "memory_bytes">,
  { given, files, segment, policy, guard, nvtx, device }: Surroundings,
): Environment {
  const preload = given["LD_PRELOAD"];
  return {
    ...given,
    ...device,
    LD_PRELOAD: preload ? `${files.interposer}:${preload}` : files.interposer,
    RIGEL_SEGMENT: segment,
    RIGEL_NAME: client.name,
    RIGEL_CLASS: client.class,
    RIGEL_WEIGHT: String(client.weight),
    RIGEL_PROGRAM: client.program,
    RIGEL_THREADS: client.threads ? "1" : undefined,
    // For `import rigel`; last, so that a module of the program's own of that name comes before it.
    PYTHONPATH: given["PYTHONPATH"] ? `${given["PYTHONPATH"]}:${files.python}` : files.python,
    ...(guard !== undefined && { RIGEL_GUARD: guard }),
    ...(nvtx !== undefined && { RIGEL_NVTX: nvtx ? "1" : "0" }),
    RIGEL_MEMORY: client.memory_bytes === undefined ? undefined : String(client.memory_bytes),
    // For MPS, whether or not its daemon was found; nothing else reads it. 0 is normal, 1 below normal.
    ...(policy !== "none" &&
      policy !== "fair" && {
        CUDA_MPS_CLIENT_PRIORITY: given["CUDA_MPS_CLIENT_PRIORITY"] ?? (client.class === "high" ? "0" : "1"),
      }),
  };
}
