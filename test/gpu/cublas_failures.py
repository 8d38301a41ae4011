#!/usr/bin/env python3
"""Programs that use cuBLAS as users' programs did when they failed: `cublas_failures.py NAME [DEPTH]`, by ctypes, without Rigel's help.

  s1   sets its stream on its handle, captures it, multiplies
  s2   works on the second GPU; a fresh thread, which has no current context, makes a handle and multiplies
  s3   works on the second GPU
  s4   four threads make their handles at the same moment, with 150 MiB of the GPU left
  s5a  makes a handle on the first GPU and uses it for matrices on the second one, which is current
  s5b  four threads multiply with one handle

A product is right if every element is: ones times ones. Exit status 0: all are right. 1: it failed; the reason is on standard
error. 77: cannot run here. cuBLAS is looked up in the whole program's scope, as linking would, so that a preloaded library has its
say. It is libcublas.so.13 or .12, found by the loader, in CUBLAS_LIBRARY, or among Python's packages. It must never import
anything of Rigel.
"""

import ctypes
import glob
import os
import signal
import sys
import threading

# Long sums of few elements: cuBLAS divides them, which takes a workspace. A stand-in for it takes only short ones.
ROWS, DEPTH = 64, int(sys.argv[2]) if len(sys.argv) > 2 else 65536
ONE = 0x3F800000
LEFT_BYTES = 150 << 20


class Failed(Exception):
    pass


def need(what, got, wanted=0):
    if got != wanted:
        raise Failed(f"{what} is {got}, expected {wanted}")


def load_cublas():
    candidates = [os.environ.get("CUBLAS_LIBRARY"), "libcublas.so.13", "libcublas.so.12"]
    for folder in sys.path:
        for pattern in ("nvidia/*/lib/libcublas.so.1[23]", "nvidia/lib/libcublas.so.1[23]"):
            candidates += sorted(glob.glob(os.path.join(folder, pattern)), reverse=True)
    for name in filter(None, candidates):
        try:
            # It needs libcublasLt of the same folder, which the loader may not know.
            lt = os.path.join(os.path.dirname(name), os.path.basename(name).replace("libcublas.", "libcublasLt."))
            if os.path.dirname(name) and os.path.exists(lt):
                ctypes.CDLL(lt, mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    print("no libcublas.so.13 or .12: set CUBLAS_LIBRARY to its path")
    sys.exit(77)


try:
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
except OSError as error:
    print(f"no driver: {error}")
    sys.exit(77)
load_cublas()
scope = ctypes.CDLL(None)
word = ctypes.c_uint64


def call(name, *arguments):
    """Calls a function by the name that programs link."""
    return getattr(scope, name)(*arguments)


def select(device):
    context = word()
    need("cuDevicePrimaryCtxRetain", call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device))
    need("cuCtxSetCurrent", call("cuCtxSetCurrent", context))


def devices():
    count = ctypes.c_int()
    need("cuDeviceGetCount", call("cuDeviceGetCount", ctypes.byref(count)))
    return count.value


def several_devices():
    if devices() < 2:
        print("needs two GPUs")
        sys.exit(77)


def allocate(n_bytes):
    pointer = word()
    need("cuMemAlloc", call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(n_bytes)))
    return pointer


class Matrices:
    """A of ROWS x DEPTH ones, B of DEPTH x ROWS ones, C of ROWS x ROWS."""

    def __init__(self):
        self.a, self.b = allocate(4 * ROWS * DEPTH), allocate(4 * ROWS * DEPTH)
        self.c = allocate(4 * ROWS * ROWS)
        for pointer in (self.a, self.b):
            need("cuMemsetD32", call("cuMemsetD32_v2", pointer, ONE, ctypes.c_size_t(ROWS * DEPTH)))
        self.clear()
        need("cuCtxSynchronize", call("cuCtxSynchronize"))

    def clear(self):
        need("cuMemsetD32", call("cuMemsetD32_v2", self.c, 0, ctypes.c_size_t(ROWS * ROWS)))

    def multiply(self, handle):
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        status = call(
            "cublasSgemm_v2", handle, 0, 0, ROWS, ROWS, DEPTH, ctypes.byref(one), self.a, ROWS, self.b, DEPTH,
            ctypes.byref(zero), self.c, ROWS,
        )  # fmt: skip
        need("cublasSgemm", status)

    def check(self):
        need("cuCtxSynchronize", call("cuCtxSynchronize"))
        result = (ctypes.c_float * (ROWS * ROWS))()
        need("cuMemcpyDtoH", call("cuMemcpyDtoH_v2", result, self.c, ctypes.c_size_t(4 * ROWS * ROWS)))
        wrong = sum(x != DEPTH for x in result)
        if wrong:
            raise Failed(f"{wrong} of {ROWS * ROWS} elements are wrong, the first is {result[0]}, expected {DEPTH}")


def make():
    handle = ctypes.c_void_p()
    need("cublasCreate", call("cublasCreate_v2", ctypes.byref(handle)))
    return handle


def in_threads(n, body):
    """Runs body(i) in so many threads; what fails there fails here."""
    failures = []

    def guarded(i):
        try:
            body(i)
        except Failed as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise Failed("; ".join(map(str, failures)))


def s1():
    select(0)
    matrices, handle = Matrices(), make()
    stream, graph, found, nodes = word(), word(), word(), ctypes.c_size_t()
    need("cuStreamCreate", call("cuStreamCreate", ctypes.byref(stream), 0))
    need("cublasSetStream", call("cublasSetStream_v2", handle, stream))
    matrices.multiply(handle)
    matrices.check()
    # A workspace of the program's own: cuBLAS may not allocate while a stream is captured.
    workspace = allocate(32 << 20)
    need("cublasSetWorkspace", call("cublasSetWorkspace_v2", handle, workspace, ctypes.c_size_t(32 << 20)))
    need("cuStreamBeginCapture", call("cuStreamBeginCapture_v2", stream, 2))
    matrices.multiply(handle)
    need("cuStreamEndCapture", call("cuStreamEndCapture", stream, ctypes.byref(graph)))
    need("cuGraphGetNodes", call("cuGraphGetNodes", graph, None, ctypes.byref(nodes)))
    if nodes.value == 0:
        raise Failed("the captured graph is empty, expected the multiplication in it")
    need("cublasGetStream", call("cublasGetStream_v2", handle, ctypes.byref(found)))
    need("the stream", found.value, stream.value)


def s2():
    several_devices()
    select(1)
    matrices = Matrices()
    in_threads(1, lambda _: matrices.multiply(make()))
    matrices.check()


def s3():
    several_devices()
    select(1)
    matrices = Matrices()
    matrices.multiply(make())
    matrices.check()


def s4():
    select(0)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    matrices = [Matrices() for _ in range(4)]
    matrices[0].multiply(make())  # what cuBLAS takes once is there, its kernels too
    need("cuCtxSynchronize", call("cuCtxSynchronize"))
    need("cuMemGetInfo", call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total)))
    if free.value > LEFT_BYTES:
        allocate(free.value - LEFT_BYTES)
    together = threading.Barrier(4)

    def body(i):
        select(0)
        together.wait()
        matrices[i].multiply(make())
        make()  # and each a second one, as two libraries in a program do

    in_threads(4, body)
    for one in matrices:
        one.check()


def s5a():
    several_devices()
    select(0)
    handle = make()
    Matrices().multiply(handle)
    select(1)
    matrices = Matrices()
    matrices.multiply(handle)
    matrices.check()


def s5b():
    select(0)
    handle = make()
    matrices = [Matrices() for _ in range(4)]

    def body(i):
        select(0)
        for _ in range(500):
            matrices[i].multiply(handle)

    in_threads(4, body)
    for one in matrices:
        one.check()


def main():
    programs = {"s1": s1, "s2": s2, "s3": s3, "s4": s4, "s5a": s5a, "s5b": s5b}
    signal.alarm(100)
    need("cuInit", call("cuInit", 0))
    try:
        programs[sys.argv[1]]()
    except Failed as failure:
        print(f"failed: {failure}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
