#!/usr/bin/env python3
"""What matrix products reach on this GPU in each precision, for the rooflines of src/peaks.ts: python3 test/gpu/peaks.py [--json]

Square products of PyTorch's (cuBLAS), 8192 wide, of random numbers, as the rate depends on them through the power that they take; the
median of ROUNDS stretches of REPEATS products, timed by events. What device memory reaches is measured by `rigel calibrate`
(read_bytes_per_us). A precision that PyTorch has no product for here is left out, with the reason.
"""

import argparse
import json
import statistics

import torch

SIZE = 8192
REPEATS = 10
ROUNDS = 5


def normal(dtype):
    return torch.randn(SIZE, SIZE, device="cuda").to(dtype)


def whole():
    return torch.randint(-128, 128, (SIZE, SIZE), device="cuda", dtype=torch.int8)


def plain(dtype, tf32=False):
    a, b = normal(dtype), normal(dtype)
    out = torch.empty_like(a)

    def product():
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.mm(a, b, out=out)

    return product


def fp8():
    a, b = normal(torch.float8_e4m3fn), normal(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def int8():
    a, b = whole(), whole().t()
    return lambda: torch._int_mm(a, b)


PRODUCTS = {
    "fp64": lambda: plain(torch.float64),
    "fp32": lambda: plain(torch.float32),
    "tf32": lambda: plain(torch.float32, tf32=True),
    "fp16": lambda: plain(torch.bfloat16),
    "fp8": fp8,
    "int8": int8,
}


def rate(product):
    """Operations a second."""
    for _ in range(REPEATS):
        product()
    times_s = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPEATS):
            product()
        end.record()
        end.synchronize()
        times_s.append(begin.elapsed_time(end) / 1e3 / REPEATS)
    return 2 * SIZE**3 / statistics.median(times_s)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rates, left_out = {}, {}
    for name, make in PRODUCTS.items():
        try:
            rates[name] = rate(make())
        except (RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
            left_out[name] = str(error).splitlines()[0]
    device = torch.cuda.get_device_name()
    if options.json:
        print(json.dumps({"device": device, "flops_per_s": rates, "left_out": left_out}))
        return
    print(device)
    for name, value in rates.items():
        print(f"  {name}: {value / 1e12:.4g} TFLOP/s")
    for name, why in left_out.items():
        print(f"  {name}: left out: {why}")


if __name__ == "__main__":
    main()
