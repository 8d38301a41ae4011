/** serve-launch.ts: the routes that start, show and stop launches. Over TCP all of them need the token (serve-access.ts). */

import { Elysia } from "elysia";
import { z } from "zod";
import { configSchema } from "./config.ts";
import { type Launches, launchDetailSchema, launchSchema } from "./launches.ts";

const params = z.object({ id: z.string() });

/** For the documentation alone: it is checked by the code of `rigel launch`, in its words. */
const bodySchema = z.toJSONSchema(
  configSchema.extend({
    cwd: z.string().optional().describe("absolute: where relative paths begin, and clients run; else the home folder"),
  }),
  { io: "input", unrepresentable: "any", target: "openapi-3.0" },
);

/** The routes over what `launches` keeps. */
export function launchRoutes(launches: Launches) {
  return new Elysia({ name: "launches" })
    .post(
      "/v1/launch",
      async ({ body, set }) => {
        const launch = await launches.start(body);
        set.status = 201;
        set.headers["location"] = `/v1/launches/${launch.id}`;
        return launch;
      },
      {
        response: { 201: launchDetailSchema },
        detail: {
          summary: "Start a launch: a configuration as `rigel launch` reads it, with a `cwd` for relative paths",
          requestBody: {
            required: true,
            content: { "application/json": { schema: JSON.parse(JSON.stringify(bodySchema)) } },
          },
        },
      },
    )
    .get("/v1/launches", () => ({ launches: launches.list() }), {
      response: z.object({ launches: z.array(launchSchema) }),
      detail: { summary: "Launches that run, and the last 50 that have ended, the latest first" },
    })
    .get("/v1/launches/:id", ({ params: { id } }) => launches.get(id), {
      params,
      response: launchDetailSchema,
      detail: { summary: "One launch, with the last lines of its standard error and, when it has ended, its report" },
    })
    .delete(
      "/v1/launches/:id",
      ({ params: { id }, set }) => {
        const launch = launches.stop(id);
        set.status = launch.state === "running" ? 202 : 200;
        return launch;
      },
      {
        params,
        response: { 200: launchDetailSchema, 202: launchDetailSchema },
        detail: {
          summary:
            "Ask a launch to end, as Ctrl-C does; a second time kills its clients, a third time its launcher. It stays in the list",
        },
      },
    );
}
