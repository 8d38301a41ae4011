/** serve-error.ts: what goes wrong with a request, and the one shape in which it is answered. */

/** A field of a request, and what is wrong with it. */
export interface Issue {
  path: string;
  message: string;
}

/** What went wrong with one request, with its HTTP status. */
export class RequestError extends Error {
  readonly status: number;
  readonly code: string;
  readonly issues: Issue[] | undefined;

  constructor(status: number, code: string, message: string, issues?: Issue[]) {
    super(message);
    this.name = "RequestError";
    this.status = status;
    this.code = code;
    this.issues = issues;
  }
}

/** The one shape of errors. */
export function errorBody(code: string, message: string, issues?: Issue[]) {
  return { error: { code, message, ...(issues && { issues }) } };
}
