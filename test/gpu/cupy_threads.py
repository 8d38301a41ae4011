#!/usr/bin/env python3
"""A CuPy program that multiplies on another thread, and on another device where there is one; the result can be compared.

Prints one JSON line with a digest of the products' bytes. It must never import anything of Rigel.
"""

import hashlib
import json
import threading

import cupy

SIZE, ROUNDS = 512, 20


def products(device, seed, out):
    with cupy.cuda.Device(device):
        x = (cupy.arange(SIZE * SIZE, dtype=cupy.float32).reshape(SIZE, SIZE) * seed % 97) / 97
        y = x
        for _ in range(ROUNDS):
            y = (x @ y) / SIZE
        out[(device, seed)] = cupy.asnumpy(y).tobytes()


def main():
    out, devices = {}, range(min(2, cupy.cuda.runtime.getDeviceCount()))
    products(0, 1, out)
    threads = [threading.Thread(target=products, args=(d, 2 + i, out)) for i in range(2) for d in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    digest = hashlib.sha256(b"".join(out[key] for key in sorted(out))).hexdigest()
    print(json.dumps({"client": "cupy-threads", "devices": len(devices), "products": len(out), "sha256": digest}), flush=True)


if __name__ == "__main__":
    main()
