#!/usr/bin/env python3
"""A CuPy program with deep queues of kernels of 0.3 ms in four streams, that ends in the middle of them: deep_queues.py WAY

  kill   by SIGKILL, as the kernel's out-of-memory killer ends one
  reset  after it has reset the device (cuDevicePrimaryCtxReset); prints what that returned

It must never import anything of Rigel.
"""

import ctypes
import os
import signal
import sys
import time

import cupy

ROUNDS = 20
DEPTH = 200

SPIN = cupy.RawKernel(
    r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - begin < ns);
}
""",
    "spin",
)


def fill(streams):
    for _ in range(DEPTH):
        for stream in streams:
            with stream:
                SPIN((132,), (128,), (cupy.uint64(300_000),))


def main():
    way = sys.argv[1]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    for _ in range(ROUNDS):
        fill(streams)
        cupy.cuda.Device().synchronize()
    fill(streams)
    time.sleep(0.02)  # in the middle of them
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    result = ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxReset_v2(0)
    print("reset", result, flush=True)
    os._exit(0 if result == 0 else 1)  # CuPy does not know


if __name__ == "__main__":
    main()
