#!/usr/bin/env python3
"""Records four of the kernel profiles in this folder on a GPU host: python3 profiles/record.py --out DIR [--only NAME]

The others are by `rigel profile`, as their first lines say; the first line of these is `rigel-profile 1` with torch's version.

Runs the models of src/python/workload.py under torch.profiler and writes one representative iteration in Rigel's
format (header line `# rigel-profile 1; key=value; ...`, then one row per operation in launch order):

  duration_ns  median of that position over the iterations whose operations are the same
  gap_ns       host time between the return of the launch before and the start of this one

Tracing slows the host, not the GPU, so the gaps are multiplied by gap_scale: with launch_ns for each launch they
then add up to the host time that the same iteration takes untraced (host_ms). It must never change the models.
"""

import argparse
import collections
import csv
import gc
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time

PROFILES = {
    "h200-resnet50-infer-bs4": ["--model", "resnet50", "--mode", "infer", "--batch", "4"],
    "h200-resnet50-train-bs64": ["--model", "resnet50", "--mode", "train", "--batch", "64"],
    "h200-bert-infer-bs2x128": ["--model", "bert", "--mode", "infer", "--batch", "2", "--seq", "128"],
    "h200-gpt2-train-bs8x512": ["--model", "gpt2", "--mode", "train", "--batch", "8", "--seq", "512"],
}
COLUMNS = (
    "name,kind,stream,grid_x,grid_y,grid_z,block_x,block_y,block_z,registers,shared_bytes,bytes,duration_ns,gap_ns"
).split(",")
ITERATIONS = 20
DISCARDED = 3  # the first traced iterations hold the tracer's own start-up
LAUNCH_NS = 2600  # one launch call untraced, measured on the H200 (2.6 to 2.9 us)
BOUNDARY = "cudaDeviceSynchronize"  # torch.cuda.synchronize(): what separates the traced iterations
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize", "cuEventSynchronize")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORIES = ("cuda_runtime", "cuda_driver")

Op = collections.namedtuple("Op", "key stream nbytes duration_ns start_ns end_ns call_start_ns call_end_ns")
# key: what makes two operations the same one in two iterations.
Key = collections.namedtuple("Key", "name kind grid block registers shared_bytes")


def load_workload():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "src", "python", "workload.py")
    spec = importlib.util.spec_from_file_location("rigel_test_workload", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def iterate(work, mode):
    return work.request() if mode == "infer" else work.step()


def measure_untraced(torch, work, mode):
    """(iteration_ms, host_ms): one iteration as the program runs it, and the host's part of it with an empty queue."""
    host = []
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if mode == "infer":
            output = work.issue()
            host.append(time.perf_counter() - begin)
            work.finish(output)
        else:
            work.step()
            host.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    if mode == "infer":
        samples = []
        for _ in range(100):
            begin = time.perf_counter()
            work.request()
            samples.append(time.perf_counter() - begin)
        iteration = statistics.median(samples)
    else:
        begin = time.perf_counter()
        for _ in range(ITERATIONS):
            work.step()
        torch.cuda.synchronize()
        iteration = (time.perf_counter() - begin) / ITERATIONS
    return iteration * 1e3, statistics.median(host) * 1e3


def trace(torch, work, mode, iterations, with_cpu):
    """The trace's events, iterations separated by device synchronisations."""
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, activity.CUDA] if with_cpu else [activity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        torch.cuda.synchronize()
        for _ in range(iterations):
            iterate(work, mode)
            torch.cuda.synchronize()
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            return json.load(file)["traceEvents"]
    finally:
        os.unlink(path)


def ns(us):
    return int(round(float(us) * 1000))


def triple(value):
    values = [int(v) for v in value] if isinstance(value, (list, tuple)) else [1]
    return tuple((values + [1, 1, 1])[:3])


def copy_kind(name):
    if "HtoD" in name:
        return "copy_h2d"
    if "DtoH" in name:
        return "copy_d2h"
    return "copy_d2d"


def gpu_op(event, call):
    args = event.get("args", {})
    name = event.get("name", "")
    if event["cat"] == "kernel":
        key = Key(
            name,
            "kernel",
            triple(args.get("grid")),
            triple(args.get("block")),
            int(args.get("registers per thread") or 0),
            int(args.get("shared memory") or 0),
        )
    else:
        kind = "memset" if event["cat"] == "gpu_memset" else copy_kind(name)
        key = Key(name, kind, (0, 0, 0), (0, 0, 0), 0, 0)
    start = ns(event["ts"])
    duration = ns(event.get("dur", 0))
    return Op(
        key,
        args.get("stream", 0),
        int(args.get("bytes") or 0),
        duration,
        start,
        start + duration,
        ns(call["ts"]),
        ns(call["ts"]) + ns(call.get("dur", 0)),
    )


def split(events):
    """Iterations as (begin_ns, [Op in launch order]): what was launched between two device synchronisations."""
    calls = {}
    boundaries = []
    waits = []
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in HOST_CATEGORIES:
            continue
        name = event.get("name", "")
        if name == BOUNDARY:
            boundaries.append((ns(event["ts"]), ns(event["ts"]) + ns(event.get("dur", 0))))
        elif name in WAITS:
            waits.append(event)
        correlation = event.get("args", {}).get("correlation")
        if correlation is not None:
            calls[correlation] = event
    boundaries.sort()
    operations = []
    lost = 0
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in GPU_CATEGORIES:
            continue
        call = calls.get(event.get("args", {}).get("correlation"))
        if call is None:
            lost += 1
            continue
        operations.append(gpu_op(event, call))
    for wait in waits:
        begin, end = ns(wait["ts"]), ns(wait["ts"]) + ns(wait.get("dur", 0))
        operations.append(Op(Key("sync", "sync", (0, 0, 0), (0, 0, 0), 0, 0), None, 0, 0, begin, end, begin, end))
    # A graph launch is one call with many kernels: those stay in the order in which the GPU ran them.
    operations.sort(key=lambda op: (op.call_start_ns, op.start_ns))
    if lost:
        print(f"record: {lost} GPU operations without their launch call were left out", file=sys.stderr)
    segments = []
    for (_, begin), (end, _) in zip(boundaries, boundaries[1:]):
        inside = [op for op in operations if begin <= op.call_start_ns < end]
        if any(op.key.kind != "sync" for op in inside):
            segments.append((begin, inside))
    return segments


def busy_ns(operations):
    """Time in which the GPU ran at least one operation."""
    total = 0
    reached = 0
    for start, end in sorted((op.start_ns, op.end_ns) for op in operations if op.key.kind != "sync"):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def gaps_of(begin, operations):
    gaps = []
    previous = begin
    call = None
    for op in operations:
        if call == op.call_start_ns:  # a further kernel of the same call
            gaps.append(0)
            continue
        gaps.append(max(0, op.call_start_ns - previous))
        previous = max(previous, op.call_end_ns)
        call = op.call_start_ns
    return gaps


def representative(segments):
    """The segments with the most frequent sequence of operations."""
    groups = collections.defaultdict(list)
    for segment in segments:
        groups[tuple(op.key for op in segment[1])].append(segment)
    best = max(groups.values(), key=len)
    if len(best) < len(segments):
        lengths = sorted(len(s[1]) for s in segments)
        print(
            f"record: {len(best)} of {len(segments)} iterations have the same operations "
            f"({len(groups)} sequences, {lengths[0]} to {lengths[-1]} operations)",
            file=sys.stderr,
        )
    return best


def host_part(gaps, keys, mode):
    """Index of the operation from which on the host time is no longer part of host_ms (see measure_untraced)."""
    if mode == "train":
        return len(gaps)
    for i in range(len(keys) - 1, -1, -1):
        if keys[i].kind == "copy_d2h":
            return i
    return len(gaps)


def rows_of(segments, mode, host_ms):
    keys = [op.key for op in segments[0][1]]
    count = len(keys)
    durations = [int(statistics.median(s[1][i].duration_ns for s in segments)) for i in range(count)]
    all_gaps = [gaps_of(*segment) for segment in segments]
    gaps = [int(statistics.median(g[i] for g in all_gaps)) for i in range(count)]
    until = host_part(gaps, keys, mode)
    launches = sum(1 for key in keys[:until] if key.kind != "sync")
    waited_ns = sum(  # syncs inside the iteration: their wait is part of host_ms and not of any gap
        int(statistics.median(s[1][i].call_end_ns - s[1][i].call_start_ns for s in segments))
        for i in range(until)
        if keys[i].kind == "sync"
    )
    traced_ns = sum(gaps[:until])
    target_ns = host_ms * 1e6 - launches * LAUNCH_NS - waited_ns
    # Tracing only ever adds to a gap, so more than 1 would be a measuring error.
    scale = min(1.0, max(0.0, target_ns / traced_ns)) if traced_ns > 0 else 1.0
    streams = {}
    rows = []
    for i, op in enumerate(segments[0][1]):
        if op.key.kind == "sync":
            stream = 0
        else:
            stream = streams.setdefault(op.stream, len(streams))
        rows.append(
            [op.key.name, op.key.kind, stream, *op.key.grid, *op.key.block]
            + [op.key.registers, op.key.shared_bytes, op.nbytes, durations[i], int(gaps[i] * scale)]
        )
    if mode == "infer" and rows[-1][1] != "sync":
        rows.append(["sync", "sync", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    # Training runs ahead: a wait at its very end is the tracer's or a loss that the program reads.
    while mode == "train" and rows and rows[-1][1] == "sync":
        rows.pop()
    return rows, scale, traced_ns / 1e6


def record(torch, workload, name, out):
    args = workload.arguments(PROFILES[name])
    work = workload.make(torch, args)
    for _ in range(150 if args.mode == "infer" else 15):
        iterate(work, args.mode)
    gc.collect()
    gc.disable()
    iteration_ms, host_ms = measure_untraced(torch, work, args.mode)
    segments = []
    for with_cpu in (False, True):
        events = trace(torch, work, args.mode, ITERATIONS + DISCARDED, with_cpu)
        segments = split(events)[-ITERATIONS:]
        if segments:
            break
        found = collections.Counter(e.get("cat") for e in events)
        print(f"record: {name}: no iterations in the trace (CPU activity {with_cpu}): {found}", file=sys.stderr)
    gc.enable()
    if not segments:
        raise RuntimeError("the trace holds no launch between two cudaDeviceSynchronize calls")
    chosen = representative(segments)
    rows, scale, traced_ms = rows_of(chosen, args.mode, host_ms)
    gpu_busy_ms = statistics.median(busy_ns(s[1]) for s in chosen) / 1e6
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "model": args.model,
        "mode": args.mode,
        "batch": args.batch,
    }
    if args.model in ("bert", "gpt2"):
        facts["seq"] = args.seq
    facts |= {
        "iterations": len(chosen),
        "iteration_ms": f"{iteration_ms:.4f}",
        "host_ms": f"{host_ms:.4f}",
        "gpu_busy_ms": f"{gpu_busy_ms:.4f}",
        "traced_gaps_ms": f"{traced_ms:.4f}",
        "gap_scale": f"{scale:.4f}",
        "launch_ns": LAUNCH_NS,
    }
    path = os.path.join(out, name + ".csv")
    with open(path + ".part", "w", encoding="utf-8", newline="") as file:
        file.write("# rigel-profile 1; " + "; ".join(f"{key}={value}" for key, value in facts.items()) + "\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    os.replace(path + ".part", path)
    kinds = collections.Counter(row[1] for row in rows)
    print(
        f"{name}: {len(rows)} operations {dict(kinds)}, {len(set(r[2] for r in rows))} stream(s), "
        f"iteration {iteration_ms:.3f} ms, host {host_ms:.3f} ms, GPU busy {gpu_busy_ms:.3f} ms, "
        f"gap scale {scale:.3f}, {len(chosen)} iterations, {os.path.getsize(path)} bytes",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--only", choices=sorted(PROFILES), action="append")
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    workload = load_workload()
    import torch

    if not torch.cuda.is_available():
        sys.exit("record: no CUDA device: torch.cuda.is_available() is false")
    failed = []
    for name in options.only or PROFILES:
        try:
            record(torch, workload, name, options.out)
        except Exception as error:  # one failing model must not cost the others: the host is borrowed
            failed.append(name)
            print(f"record: {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
