/**
 * errors.ts: the one error class that Rigel throws for things that a user can act on.
 *
 * Its message says what happened, on what, and what to do next. cli.ts catches it once, prints it and exits with its
 * status. Anything else that is thrown is a bug in Rigel and is shown with its stack.
 */

/** What kind of thing went wrong; decides the exit status. */
type ErrorCode =
  "config" | "profile" | "command" | "no_client" | "ambiguous" | "native" | "segment" | "device" | "cache" | "machine";

const USER_INPUT: ReadonlySet<ErrorCode> = new Set(["config", "profile", "command", "no_client", "ambiguous"]);

export class RigelError extends Error {
  readonly code: ErrorCode;

  constructor(code: ErrorCode, message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = "RigelError";
    this.code = code;
  }

  /** 2 when the input has to change, 1 when the machine has to. */
  get exitStatus(): number {
    return USER_INPUT.has(this.code) ? 2 : 1;
  }
}

/**
 * Does something in whose errors fields of a configuration stand for options: `rigel run: clients[0].memory: expected ...` becomes
 * `rigel run: --memory: expected ...`. `options`: by field, of a field with others in it after those.
 */
export async function namingOptions<T>(options: Readonly<Record<string, string>>, work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (thrown) {
    if (!(thrown instanceof RigelError)) throw thrown;
    const fields = Object.keys(options).map((field) => RegExp.escape(field));
    const named = new RegExp(`^(rigel \\w+: )(${fields.join("|")})(?=:)`, "gm");
    const message = thrown.message.replaceAll(
      named,
      (_, where: string, field: string) => where + (options[field] ?? field),
    );
    throw new RigelError(thrown.code, message, { cause: thrown });
  }
}

/** The text of anything thrown, for use inside a longer message. */
export function reason(thrown: unknown): string {
  return thrown instanceof Error ? thrown.message : String(thrown);
}
