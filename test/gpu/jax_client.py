#!/usr/bin/env python3
"""A JAX program with a result that can be compared: a small network trained for some steps by XLA's own kernels.

Prints one JSON line with a digest of the result's bytes. It must never import anything of Rigel.
"""

import hashlib
import json
import os
import sys

# Read by XLA at start: bits must agree between runs, and memory is shared with other programs.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true").strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy  # noqa: E402

STEPS = 50


def loss(params, x, target):
    hidden = jnp.tanh(x @ params[0])
    return jnp.mean((hidden @ params[1] - target) ** 2)


@jax.jit
def step(params, x, target):
    gradients = jax.grad(loss)(params, x, target)
    return [p - 0.01 * g for p, g in zip(params, gradients)]


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    keys = jax.random.split(jax.random.PRNGKey(7), 4)
    params = [jax.random.normal(keys[0], (512, 512)) * 0.05, jax.random.normal(keys[1], (512, 64)) * 0.05]
    x = jax.random.normal(keys[2], (256, 512))
    target = jax.random.normal(keys[3], (256, 64))
    for _ in range(steps):
        params = step(params, x, target)
    result = [numpy.asarray(p) for p in params]
    digest = hashlib.sha256(b"".join(p.tobytes() for p in result)).hexdigest()
    device = jax.devices()[0].platform
    print(json.dumps({"client": "jax", "platform": device, "steps": steps, "sha256": digest}), flush=True)


if __name__ == "__main__":
    main()
