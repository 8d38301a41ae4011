/**
 * errors.ts: the one error class that Rigel throws for things that a user can act on.
 *
 * Its message says what happened, on what, and what to do next. cli.ts catches it once, prints it and exits with its
 * status. Anything else that is thrown is a bug in Rigel and is shown with its stack.
 */

/** What kind of thing went wrong; decides the exit status. */
type ErrorCode = "config" | "profile" | "command" | "native" | "segment" | "device" | "cache" | "machine";

const USER_INPUT: ReadonlySet<ErrorCode> = new Set(["config", "profile", "command"]);

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

/** The text of anything thrown, for use inside a longer message. */
export function reason(thrown: unknown): string {
  return thrown instanceof Error ? thrown.message : String(thrown);
}
