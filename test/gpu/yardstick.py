#!/usr/bin/env python3
"""What PyTorch's operators do, one by one, so that two runs can be compared: `yardstick.py --out FILE [--seconds N]`.

The operators and their inputs are those of PyTorch's own tests (OpInfo: torch.testing._internal.common_methods_invocations.op_db).
Each is called on the GPU with the first sample inputs of each data type that it supports, of float32, float16 and complex64, forward
and, where it supports that, backward, each with a seed of its own. What is kept of it is a digest of all results, or the type and
message of the exception. The order is fixed, and the time a limit: of two runs, compare what both have. It must never import
anything of Rigel.

    {"schema": 1, "torch": "2.11.0", "device": "NVIDIA H200", "seconds": 90.1,
     "outcomes": [["add float32", "ok 1f0c..."], ["cholesky float16", "RuntimeError: ..."], ...]}
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import sys
import time
import types
import unittest
import warnings
import zlib

# Read by cuBLAS at start: bits should agree between runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402

SAMPLES = 2
# They compile a kernel for each call, or take many times as long as others.
SLOW = re.compile(r"jiterator|svd|pca_lowrank|lobpcg|linalg\.(matrix_exp|pinv|lstsq|cond)|ctc_loss|grid_sampler")


def operators():
    """The operators, in an order that is always the same, spread so that a short run has something of everything."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        # Imported by PyTorch's test utilities, and used by none of what is used here.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    chosen = [op for op in op_db if not SLOW.search(op.name)]
    return sorted(chosen, key=lambda op: zlib.crc32(f"{op.name}.{op.variant_test_name}".encode()))


def tensors(value):
    """All tensors in a result, however it nests them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors(value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)


def take_in(digest, value):
    for tensor in tensors(value):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode())
        if tensor.is_sparse or tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        plain = torch.empty(tensor.numel(), dtype=tensor.dtype)
        plain.copy_(tensor.detach().resolve_conj().resolve_neg().reshape(-1))
        digest.update(plain.view(torch.uint8).numpy().tobytes())
    if not any(True for _ in tensors(value)):
        digest.update(repr(value).encode())


def backward(result, leaves):
    """Gradients of the sum of what can be differentiated, by a fixed weight."""
    outputs = [t for t in tensors(result) if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    if not outputs or not leaves:
        return []
    weights = [torch.full_like(t, 0.5).detach() for t in outputs]
    return torch.autograd.grad(outputs, leaves, weights, allow_unused=True)


def call(op, dtype, seed):
    """One outcome: a digest of all results of the first samples, or how it failed."""
    differentiable = dtype in op.supported_backward_dtypes("cuda") if op.supports_autograd else False
    digest = hashlib.sha256()
    torch.manual_seed(seed)
    for sample in itertools.islice(op.sample_inputs("cuda", dtype, requires_grad=differentiable), SAMPLES):
        torch.manual_seed(seed)
        result = op(sample.input, *sample.args, **sample.kwargs)
        take_in(digest, result)
        if differentiable:
            given = tensors([sample.input, list(sample.args), dict(sample.kwargs)])
            leaves = [t for t in given if t.requires_grad and t.is_leaf]
            take_in(digest, list(backward(result, leaves)))
    torch.cuda.synchronize()
    return f"ok {digest.hexdigest()[:32]}"


def message(error):
    """Without addresses and the like, of which no two runs have the same."""
    text = re.sub(r"0x[0-9a-fA-F]+", "0x", f"{type(error).__name__}: {error}")
    text = re.sub(r"\d+\.\d+ [KMG]iB", "some memory", text)
    return text.splitlines()[0][:300]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=90, help="how long to go on (default 90)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    outcomes = []
    dtypes = (torch.float32, torch.float16, torch.complex64)
    chosen = operators()
    begun = time.monotonic()
    for op in chosen:
        if time.monotonic() - begun > options.seconds:
            break
        supported = op.supported_dtypes("cuda")
        for dtype in dtypes:
            if dtype not in supported:
                continue
            name = f"{op.name}{'.' if op.variant_test_name else ''}{op.variant_test_name} {str(dtype).removeprefix('torch.')}"
            try:
                outcome = call(op, dtype, zlib.crc32(name.encode()))
            except Exception as error:  # noqa: BLE001 whatever an operator raises is its outcome
                outcome = message(error)
            outcomes.append((name, outcome))
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                # Nothing works on this context any more.
                outcomes.append((f"after {name}", message(error)))
                chosen = []
        if not chosen:
            break
    result = {
        "schema": 1,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "seconds": round(time.monotonic() - begun, 1),
        "outcomes": outcomes,
    }
    with open(options.out, "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    fine = sum(outcome.startswith("ok ") for _, outcome in outcomes)
    print(f"{len(outcomes)} outcomes, {fine} of them ok, in {result['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
