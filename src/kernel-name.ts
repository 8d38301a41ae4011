/**
 * kernel-name.ts: the parts of a demangled kernel name: what to show of it, and what to compare of it. Pure.
 *
 * Tools print one kernel differently: `(int)4` or `4`, `const float *` or `float const*`, `(anonymous namespace)` or
 * `<unnamed>`, with parameters or without.
 */

/** The function's name with its namespaces, without return type, template arguments and parameters. */
export function qualifiedName(name: string): string {
  const bare = name
    .replaceAll("(anonymous namespace)::", "")
    .replaceAll("<unnamed>::", "")
    .replace(/^std::enable_if<.*?>::type +/, "")
    .replace(/^(void|int|float|static|__global__) +/, "");
  const end = bare.search(/[<(]/);
  return (end > 0 ? bare.slice(0, end) : bare).trim();
}

/** A name for people: the qualified one without namespaces; of a wrapper, what it runs. */
export function shortName(name: string): string {
  const own = qualifiedName(name);
  if (own.startsWith("_Z")) return mangledPath(own) ?? own;
  if (/\b(Kernel2?|device_kernel|kernel)$/.test(own)) {
    const inner = /<\s*([\w:]+)/.exec(name)?.[1];
    return inner === undefined || /^(int|float|bool|unsigned|long|double|T\d+)$/.test(inner) ? own : inner;
  }
  if (/(elementwise_kernel|reduce_kernel|multi_tensor_apply_kernel)$/.test(own)) {
    const detail = [
      ...name.matchAll(
        /(\w+?)(?:_kernel_(?:cuda|impl)|_cuda_out|CUDAKernelImpl|(?:Binary|Unary)?Functor(?:OnSelf)?(?:_\w+)?|_functor|Ops)\b/g,
      ),
    ]
      .map(([text]) => text)
      .find((text) => !/^([AB]?Unary|Binary)Functor$|^gpu_kernel_impl/.test(text));
    return detail === undefined ? lastPart(own) : `${detail} in ${lastPart(own)}`;
  }
  return lastPart(own);
}

function lastPart(path: string): string {
  return path.split("::").at(-1) || path;
}

/** The leading identifiers of a name that was too long for the profiler to demangle: `_ZN3foo3barIiE` is foo::bar. */
function mangledPath(mangled: string): string | undefined {
  let rest = mangled.replace(/^_ZN?K?/, "");
  const parts: string[] = [];
  for (;;) {
    const length = /^\d+/.exec(rest)?.[0];
    if (length === undefined) break;
    parts.push(rest.slice(length.length, length.length + Number(length)));
    rest = rest.slice(length.length + Number(length));
  }
  return parts.length > 0 ? parts.join("::") : undefined;
}

/**
 * What is the same however a tool prints the name: no spaces, casts, parameters, `const` or return type. Names that differ in
 * template arguments differ; overloads that differ in parameters alone do not.
 */
export function comparableName(name: string): string {
  const plain = name
    .replaceAll(
      /\((?:bool|char|short|int|long|unsigned|signed|[\w:]+_t| |[\w:]*(?:Type|Kind|Mode|Order|Style)\w*)+\)(?=-?\d)/g,
      "",
    )
    .replaceAll(/\btrue\b/g, "1")
    .replaceAll(/\bfalse\b/g, "0")
    .replaceAll(/\b(\d+)(?:ul|u|l|ll|ull)\b/gi, "$1")
    .replaceAll("<unnamed>", "(anonymous namespace)")
    .replaceAll("(anonymous namespace)", "{anonymous}")
    .replace(/^(void|int|float) +/, "")
    .replaceAll(/\bconst\b|\s+/g, "");
  let depth = 0;
  for (let at = 0; at < plain.length; at++) {
    const char = plain[at];
    if (char === "<") depth++;
    else if (char === ">") depth--;
    else if (char === "(" && depth <= 0 && at > 0) return plain.slice(0, at);
  }
  return plain;
}

/** Whether it stands for a CUDA graph that was recorded as one operation, which has no grid. */
export function isGraph(name: string): boolean {
  return /^graph of \d+ kernels/.test(name);
}
