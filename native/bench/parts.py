#!/usr/bin/env python3
"""parts.py: how long each part of a decoding request takes on the GPU, beside a best-effort client that runs and that is paused: docs/experiments.md.

Requests of src/python/workload.py's GPT-2 decoding (batch 4, 4 tokens after 256), 60 a second at random, with a CUDA event between their parts:
the copy of the input, the kernel that sets the position, and the graph of each token. The client is paused for 1.5 s of every 3.5 s. Printed are, for
both, how many requests there were; of the host, from the first call to the last and to the end; and of the GPU each part: p50 and p90 in ms. A
request is late that needs 0.2 ms more for its first graph than for its last.

jobs.json: {"duration_s": 60, "policy": {"name": "priority", "stop_us": 60}, "clients": [
  {"name": "serve", "class": "high", "command": ["python3", "native/bench/parts.py", "train"]},
  {"name": "train", "class": "best-effort", "command": ["python3", "src/python/workload.py", "--model", "gpt2", "--mode", "train",
    "--batch", "8", "--seq", "512"]}]}

  bun run launch jobs.json        # from the top of a clone; with "stay_us": 0 in the policy the GPU never stays
"""
import gc
import os
import random
import subprocess
import sys
import threading
import time

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(TOP, "src", "python"))
import torch  # noqa: E402
import workload  # noqa: E402

PARTS = ("copy", "position", "1st graph", "2nd", "3rd", "4th")
PAUSED_S, RUNS_S = 1.5, 2.0
EDGE_S, COMMAND_S = 0.3, 0.2  # left out on both sides of a pause; and what `rigel pause` takes


def quantile(values, q):
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def issue(work, events):
    with torch.no_grad():
        events[0].record()
        work.token.copy_(work.host, non_blocking=True)
        events[1].record()
        work.position.fill_(work.past)
        events[2].record()
        for i in range(4):
            work.graph.replay()
            work.decoded[:, i].copy_(work.token[:, 0])
            events[3 + i].record()
    return work.decoded


def main():
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: parts.py CLIENT [SECONDS]")
    client, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 30
    args = workload.arguments(["--mode", "infer", "--model", "gpt2", "--batch", "4", "--seq", "256", "--decode", "4"])
    work = workload.Decoding(torch, args)
    for _ in range(150):
        work.request()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(PARTS) + 1)]
    pauses, over = [], threading.Event()  # (from, to): the client was off the GPU, but for the moments at both ends

    def rigel(command):
        subprocess.run(["bun", "src/cli.ts", command, client], cwd=TOP, check=True, stdout=subprocess.DEVNULL)

    def pause_and_resume():
        while not over.wait(RUNS_S):
            rigel("pause")
            since = time.perf_counter()
            over.wait(PAUSED_S)
            pauses.append((since, time.perf_counter()))
            rigel("resume")

    thread = threading.Thread(target=pause_and_resume)
    thread.start()
    gc.collect()
    gc.disable()
    chance = random.Random(1)
    rows = []  # (when, launched, took, of each part), ms but for the first
    due = begun = time.perf_counter()
    while due - begun < seconds:
        while (left := due - time.perf_counter()) > 0:
            if left > 0.001:
                time.sleep(left - 0.0005)
        began = time.perf_counter()
        output = issue(work, events)
        launched = time.perf_counter()
        work.finish(output)
        ended = time.perf_counter()
        parts = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
        rows.append((began, (launched - began) * 1e3, (ended - began) * 1e3, *parts))
        due += chance.expovariate(60)
    over.set()
    thread.join()

    def is_paused(at):
        return any(since + EDGE_S <= at < to for since, to in pauses)

    def is_shared(at):
        return all(at < since - EDGE_S - COMMAND_S or at >= to + EDGE_S for since, to in pauses)

    for name, holds in (("beside it", is_shared), ("paused", is_paused)):
        some = [row[1:] for row in rows if holds(row[0])]
        if not some:
            continue
        late = sum(row[4] > row[7] + 0.2 for row in some)
        print(f"{name}: {len(some)} requests, {late} late")
        for title, column in zip(("launched", "took", *PARTS), zip(*some)):
            print(f"  {title:<10} {quantile(column, 0.5):6.3f} {quantile(column, 0.9):6.3f}", flush=True)


if __name__ == "__main__":
    main()
