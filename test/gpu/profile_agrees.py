#!/usr/bin/env python3
"""Whether `rigel profile` records what torch.profiler does: python3 test/gpu/profile_agrees.py DIR [--only NAME]

For each model and mode of src/python/workload.py, on the same fixed number of iterations: as many kernels, exactly; GPU time
within 3%. The two never are in one process: rigel profile runs the workload by itself, torch.profiler all of them in this one's
child. Prints how much longer requests take while they are recorded. What was recorded is left in DIR as profiles that can be
shipped. Exit status 1 if anything differs.
"""

import argparse
import gc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
WORKLOAD = os.path.join(ROOT, "src", "python", "workload.py")
ITERATIONS = 20
WITHIN = 0.03
LIMIT_S = 60
MODELS = {
    "resnet50-infer-bs4": "--model resnet50 --mode infer --batch 4",
    "resnet50-train-bs64": "--model resnet50 --mode train --batch 64",
    "mobilenetv2-infer-bs4": "--model mobilenetv2 --mode infer --batch 4",
    "mobilenetv2-train-bs64": "--model mobilenetv2 --mode train --batch 64",
    "bert-infer-bs2x128": "--model bert --mode infer --batch 2 --seq 128",
    "bert-train-bs8x128": "--model bert --mode train --batch 8 --seq 128",
    "gpt2-infer-bs1x128": "--model gpt2 --mode infer --batch 1 --seq 128",
    "gpt2-train-bs8x512": "--model gpt2 --mode train --batch 8 --seq 512",
}


def load_workload():
    spec = importlib.util.spec_from_file_location("rigel_test_workload", WORKLOAD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def traced(torch, workload, flags):
    """Kernels, and GPU time of everything in ms, of ITERATIONS iterations under torch.profiler."""
    args = workload.arguments(flags.split())
    work = workload.make(torch, args)
    iterate = work.request if args.mode == "infer" else work.step
    for _ in range(150 if args.mode == "infer" else 15):
        iterate()
    torch.cuda.synchronize()
    done = workload.gpu_events(torch, iterate, ITERATIONS)
    kernels = sum(e["cat"] == "kernel" for e in done)
    return {"kernels": kernels, "gpu_ms": sum(float(e.get("dur", 0)) for e in done) / 1e3}


def torch_side(names):
    import torch

    workload = load_workload()
    for name in names:
        print(json.dumps({"name": name, **traced(torch, workload, MODELS[name])}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def rigel_command():
    bun = shutil.which("bun") or os.path.join(ROOT, "node_modules", ".bin", "bun")
    return [bun, os.path.join(ROOT, "src", "cli.ts")]


def recorded(name, out, times):
    path = os.path.join(out, f"{device_word()}-{name}.csv")
    flags = ["--json", "--requests", str(ITERATIONS), "--times", times, "-o", path]
    command = rigel_command() + ["profile", *flags, "--", sys.executable, WORKLOAD, *MODELS[name].split()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if run.returncode != 0:
        raise RuntimeError(f"rigel profile ended with {run.returncode}:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout)


def device_word():
    """The GPU's name as profiles are called: "h200" of "NVIDIA H200"."""
    run = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    words = run.stdout.split("\n")[0].lower().replace("nvidia", "").split()
    return words[0] if words else "gpu"


def compare(name, rigel, torch):
    """What differs, in words."""
    wrong = []
    if rigel["alike"] != rigel["requests"] or rigel["requests"] != ITERATIONS:
        wrong.append(f"{rigel['alike']} of {rigel['requests']} recorded iterations launch the same")
    kernels = rigel["kernels"] * ITERATIONS
    if kernels != torch["kernels"]:
        wrong.append(f"{kernels} kernels against {torch['kernels']}")
    gpu_ms = rigel["gpu_ms"] * ITERATIONS
    ratio = gpu_ms / torch["gpu_ms"] if torch["gpu_ms"] else float("nan")
    if not abs(ratio - 1) <= WITHIN:
        wrong.append(f"GPU time {ratio:.4f} of torch.profiler's")
    overhead = rigel["overhead"] or {"ratio": float("nan"), "with_ms": float("nan"), "without_ms": float("nan")}
    print(
        f"{name:24} {kernels:8} {torch['kernels']:8}  {gpu_ms:10.3f} {torch['gpu_ms']:10.3f} {ratio:8.4f}  "
        f"{overhead['ratio']:6.3f} ({overhead['with_ms']:.3f} / {overhead['without_ms']:.3f} ms)  {rigel['mechanism']}  "
        f"{'; '.join(wrong) or 'agrees'}",
        flush=True,
    )
    for note in rigel["notes"]:
        print(f"{'':24} note: {note}")
    if rigel["why"]:
        print(f"{'':24} not CUPTI: {rigel['why']}")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", metavar="DIR", nargs="?", help="where the recordings go")
    parser.add_argument("--only", choices=sorted(MODELS), action="append")
    parser.add_argument("--times", choices=("auto", "cupti", "events"), default="auto", help="as for rigel profile")
    parser.add_argument("--torch-side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.only or list(MODELS)
    if options.torch_side:
        torch_side(names)
        return
    if options.out is None:
        parser.error("expected the folder where the recordings go")
    os.makedirs(options.out, exist_ok=True)
    began = time.monotonic()
    command = [sys.executable, os.path.abspath(__file__), "--torch-side", *[f"--only={name}" for name in names]]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    by_torch = {line["name"]: line for line in map(json.loads, run.stdout.splitlines())}
    print(f"{'':24} {'kernels':>17}  {'GPU ms':>21} {'ratio':>8}  slow-down (recorded / not)")
    failed = run.returncode != 0
    for name in names:
        try:
            if name not in by_torch:
                raise RuntimeError("torch.profiler has nothing of it")
            failed |= bool(compare(name, recorded(name, options.out, options.times), by_torch[name]))
        except (RuntimeError, subprocess.TimeoutExpired, ValueError) as error:
            failed = True
            print(f"{name:24} FAILED: {error}", flush=True)
    print(f"{'differs' if failed else 'all agree'}; {time.monotonic() - began:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
