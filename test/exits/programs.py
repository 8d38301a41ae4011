#!/usr/bin/env python3
"""Python programs that use the driver by ctypes and end in all ways: `programs.py WAY [PLACE]`; without one it lists them.

They print the same each time: each is run bare and under Rigel, and compared. What a program has launched it writes to the
file EXITS_COUNTS, as counts.h has it; PLACE is where in it this process begins.
"""

import atexit
import ctypes
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings

KERNEL = b""".version 6.0
.target sm_52
.address_size 64
.visible .entry rigel_spin(.param .u64 iterations, .param .u64 block_ns)
{
    ret;
}
"""
SHORT_NS = 5000
PLACES = 64
FOLDER = os.environ.get("EXITS_FOLDER", ".")

cuda = None
context = ctypes.c_void_p()
kernel = ctypes.c_void_p()
counts = None
local = threading.local()
places = iter(range(int(sys.argv[2]) if len(sys.argv) > 2 else 0, PLACES))


def need(result, what):
    if result != 0:
        print(f"exits: {what} answered {result}", file=sys.stderr, flush=True)
        os._exit(99)


def start():
    """Initialises CUDA and opens the counts."""
    global cuda, counts
    import mmap

    with open(os.environ["EXITS_COUNTS"], "r+b") as file:
        counts = mmap.mmap(file.fileno(), 0)
    cuda = ctypes.CDLL("libcuda.so.1")
    module = ctypes.c_void_p()
    need(cuda.cuInit(0), "cuInit")
    need(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
    need(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    need(cuda.cuModuleLoadData(ctypes.byref(module), KERNEL), "cuModuleLoadData")
    need(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"rigel_spin"), "cuModuleGetFunction")


def add(place, which):
    at = 16 + 16 * place + 8 * which
    struct.pack_into("Q", counts, at, struct.unpack_from("Q", counts, at)[0] + 1)


def raw_launch():
    n, ns = ctypes.c_uint64(1), ctypes.c_uint64(SHORT_NS)
    params = (ctypes.c_void_p * 2)(ctypes.addressof(n), ctypes.addressof(ns))
    return cuda.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, None, params, None)


def launch():
    """One kernel; each thread counts in a place of its own."""
    if not hasattr(local, "place"):
        local.place = next(places)
    add(local.place, 0)
    result = raw_launch()
    if result == 0:
        add(local.place, 1)
    return result


def launch_some(n=20):
    for _ in range(n):
        need(launch(), "cuLaunchKernel")


def leaving():
    accepted = sum(struct.unpack_from("Q", counts, 24 + 16 * place)[0] for place in range(PLACES))
    struct.pack_into("Q", counts, 0, accepted + 1)


def tell(*what):
    os.write(1, (" ".join(str(w) for w in what) + "\n").encode())


class Memory:
    """Frees itself when it is collected."""

    def __init__(self):
        self.pointer = ctypes.c_uint64()
        self.cycle = self
        need(cuda.cuMemAlloc_v2(ctypes.byref(self.pointer), ctypes.c_size_t(4096)), "cuMemAlloc")

    def __del__(self):
        tell("free", cuda.cuMemFree_v2(self.pointer), cuda.cuCtxSynchronize())


def launching():
    """A daemon thread that launches until the interpreter takes it away."""
    begun = threading.Event()

    def body():
        cuda.cuCtxSetCurrent(context)
        launch_some()
        begun.set()
        while launch() == 0:
            cuda.cuCtxSynchronize()
        time.sleep(1000)

    threading.Thread(target=body, daemon=True).start()
    begun.wait()


def way_return():
    start()
    launch_some()
    leaving()


def way_sys_exit():
    way_return()
    sys.exit(7)


def way_immediate_exit_while_launching():
    start()
    launching()
    leaving()
    os._exit(7)


def way_daemon_threads_launch():
    start()
    for _ in range(3):
        launching()
    leaving()


def way_exit_in_thread():
    way_return()
    thread = threading.Thread(target=sys.exit, args=(7,))
    thread.start()
    thread.join()


def way_exception():
    way_return()
    raise ValueError("nobody catches this")


def way_keyboard_interrupt():
    start()
    launching()
    leaving()
    signal.raise_signal(signal.SIGINT)
    time.sleep(1000)


def way_sigterm():
    start()
    launching()
    leaving()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1000)


def way_atexit_from_before_cuda():
    memory = []
    atexit.register(lambda: (tell("launch", launch(), cuda.cuCtxSynchronize()), leaving(), memory.clear()))
    start()
    memory.append(Memory())
    launch_some()


def way_atexit_from_after_cuda():
    start()
    atexit.register(lambda: (tell("launch", launch(), cuda.cuCtxSynchronize()), leaving()))
    launch_some()


def way_objects_collected_at_the_end():
    global kept
    way_return()
    kept = [Memory(), Memory()]


def child():
    tell("child", cuda.cuInit(0), raw_launch(), cuda.cuCtxSynchronize())
    sys.exit(3)


def way_multiprocessing_fork():
    import multiprocessing

    start()
    launch_some()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    tell("status", process.exitcode)
    launch_some()
    leaving()


def way_os_fork_while_launching():
    start()
    launching()
    # That threads run is the point; Python 3.12 warns of it, with the number of the process, which no two runs share.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(4)
    tell("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    leaving()


def spawned(place):
    global places
    places = iter(range(place, PLACES))
    start()
    launch_some()


def way_multiprocessing_spawn():
    import multiprocessing

    start()
    launch_some()
    process = multiprocessing.get_context("spawn").Process(target=spawned, args=(8,))
    process.start()
    process.join()
    tell("status", process.exitcode)
    launch_some()
    leaving()


def way_subprocess():
    start()
    launch_some()
    tell("status", subprocess.run([sys.executable, __file__, "return", "8"]).returncode)
    launch_some()
    leaving()


def way_thread_pool():
    from concurrent.futures import ThreadPoolExecutor

    start()
    pool = ThreadPoolExecutor(3)
    for _ in range(3):
        pool.submit(lambda: (cuda.cuCtxSetCurrent(context), launch_some(), leaving()))


def way_library_closed():
    import _ctypes

    library = ctypes.CDLL(os.path.join(FOLDER, "libexits.so"))
    library.use_library()
    _ctypes.dlclose(library._handle)
    tell("closed")


def way_library_closed_between():
    import _ctypes

    for _ in range(2):
        library = ctypes.CDLL(os.path.join(FOLDER, "libexits.so"))
        library.use_library()
        _ctypes.dlclose(library._handle)
    start()
    launch_some(0)


def way_shutdown():
    way_return()
    try:
        end = ctypes.CDLL(None).rigel_shutdown
    except AttributeError:
        return
    end()
    end()


WAYS = {name[4:].replace("_", "-"): body for name, body in list(globals().items()) if name.startswith("way_")}

if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("\n".join(WAYS))
    else:
        signal.alarm(120)
        WAYS[sys.argv[1]]()
