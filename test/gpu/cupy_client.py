#!/usr/bin/env python3
"""A CuPy program with a result that can be compared: own kernel, cuBLAS, elementwise, reduction, two streams.

Prints one JSON line with a digest of the result's bytes. It must never import anything of Rigel.
"""

import hashlib
import json
import sys

import cupy

STEPS = 50
SIZE = 1024

SAXPY = cupy.RawKernel(
    r"""
extern "C" __global__ void saxpy(const float *x, float *y, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
""",
    "saxpy",
)


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    x = (cupy.arange(SIZE * SIZE, dtype=cupy.float32).reshape(SIZE, SIZE) % 97) / 97
    y = cupy.zeros_like(x)
    side = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    for _ in range(steps):
        product = x @ x
        SAXPY((SIZE * SIZE // 256,), (256,), (product, y, cupy.float32(1e-3), cupy.int32(SIZE * SIZE)))
        cupy.cuda.get_current_stream().synchronize()
        with side:
            y = cupy.tanh(y)
        side.synchronize()
    total = float(cupy.asnumpy(y).astype("float64").sum())
    digest = hashlib.sha256(cupy.asnumpy(y).tobytes()).hexdigest()
    print(json.dumps({"client": "cupy", "steps": steps, "sum": total.hex(), "sha256": digest}), flush=True)


if __name__ == "__main__":
    main()
