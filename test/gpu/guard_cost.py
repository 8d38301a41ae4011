#!/usr/bin/env python3
"""What Rigel with its cuBLAS guard costs a loop of small matrix products: `guard_cost.py [--rounds N] [--json FILE]`.

PyTorch multiplies two 256x256 matrices 10,000 times, as fast as the host can launch, in two processes that take turns in one run:
one bare, one a high client of Rigel's with the guard's mode `repair`, on the same GPU. The latter also runs 250 calls through Rigel and 250
past it (rigel.bypass()) in turn, since from one loop to the next a host's speed changes by more than what is measured. Printed and
written are the ratio of the medians of the rounds, governed over bare, and the median of the ratios of such neighbours; the target is
1.02 at most. Run it anywhere; it takes the Bun that `bun install` has put into the repository, or else the one on the PATH:

    python3 test/gpu/guard_cost.py --json guard-cost.json

It starts itself again as the two programs (--serve), the governed one by `bun src/cli.ts launch`. A round is one loop of each,
the first of them in turn, and 40 pairs of neighbours; each ends with a synchronize. A number, not a test: host noise is often larger
than what is measured.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
INSTALLED = os.path.join(ROOT, "node_modules", ".bin", "bun")
BUN = INSTALLED if os.path.exists(INSTALLED) else "bun"
CALLS, PART, SIZE = 10_000, 250, 256
TARGET = 1.02


def serve(path):
    """One of the two: a loop for each line that comes on the socket. Answers with its seconds, or the ratios of its parts."""
    import torch

    torch.manual_seed(7)
    a = torch.randn(SIZE, SIZE, device="cuda")
    b = torch.randn(SIZE, SIZE, device="cuda")
    out = torch.empty(SIZE, SIZE, device="cuda")
    for _ in range(1000):
        torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    stream = link.makefile("rw")
    governed = "librigel" in os.environ.get("LD_PRELOAD", "")
    if governed:
        import rigel
    stream.write(f"{'rigel' if governed else 'bare'}\n")
    stream.flush()

    def loop(calls):
        begun = time.perf_counter()
        for _ in range(calls):
            torch.mm(a, b, out=out)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    def parts(past):
        with rigel.bypass() if past else contextlib.nullcontext():
            return loop(PART)

    for line in stream:
        if line.strip() == "both":
            ratios = []
            for n in range(CALLS // PART):
                seconds = {past: parts(past) for past in ((False, True), (True, False))[n % 2]}
                ratios.append(seconds[False] / seconds[True])
            answer = json.dumps(ratios)
        else:
            answer = str(loop(CALLS))
        stream.write(f"{answer}\n")
        stream.flush()


def environment():
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RIGEL_") and name != "LD_PRELOAD"}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def measure(rounds):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "socket")
        command = [sys.executable, os.path.abspath(__file__), "--serve", path]
        config = os.path.join(folder, "jobs.json")
        with open(config, "w") as file:
            client = {"name": "gemm", "class": "high", "command": command, "cwd": ROOT}
            json.dump({"policy": {"name": "priority"}, "guard": "repair", "clients": [client]}, file)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(2)
        listener.settimeout(240)
        launch = [BUN, os.path.join(ROOT, "src", "cli.ts"), "launch", config, "--json"]
        started = [
            subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL),
            subprocess.Popen(launch, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True),
        ]
        streams = {}
        try:
            for _ in started:
                stream = listener.accept()[0].makefile("rw")
                streams[stream.readline().strip()] = stream
            if set(streams) != {"bare", "rigel"}:
                sys.exit(f"guard_cost.py: one of the programs does not run as it should: {sorted(streams)}")
            taken, within = {"bare": [], "rigel": []}, []

            def ask(way, what):
                streams[way].write(f"{what}\n")
                streams[way].flush()
                return json.loads(streams[way].readline())

            for n in range(rounds):
                for way in ("bare", "rigel") if n % 2 == 0 else ("rigel", "bare"):
                    taken[way].append(ask(way, "go"))
                within += ask("rigel", "both")
                print(f"round {n + 1} of {rounds}: {taken['rigel'][-1] / taken['bare'][-1]:.3f}", file=sys.stderr)
            for stream in streams.values():
                stream.close()
            report, _ = started[1].communicate(timeout=120)
            started[0].wait(timeout=60)
        finally:
            for process in started:
                if process.poll() is None:
                    process.terminate()
        guard = json.loads(report)["clients"][0]
        return taken, within, guard


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="loops of each program (default 15)")
    parser.add_argument("--json", metavar="FILE", help="keep what was measured")
    parser.add_argument("--serve", metavar="SOCKET", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    taken, within, client = measure(options.rounds)
    if not client["attached"] or client["launches"] < CALLS * options.rounds:
        sys.exit(f"guard_cost.py: the governed program was no client, or launched too little: {client['launches']}")
    medians = {way: statistics.median(values) for way, values in taken.items()}
    ratio = medians["rigel"] / medians["bare"]
    result = {
        "schema": 1,
        "calls": CALLS,
        "size": SIZE,
        "rounds": options.rounds,
        "call_us": {way: value / CALLS * 1e6 for way, value in medians.items()},
        "ratio": ratio,
        "ratios": [r / b for r, b in zip(taken["rigel"], taken["bare"])],
        "ratio_within": statistics.median(within),
        "ratios_within": within,
        "target": TARGET,
        "guard": client["guard"],
    }
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)
            file.write("\n")
    call = result["call_us"]
    print(f"{ratio:.3f} (bare {call['bare']:.2f} us, under Rigel {call['rigel']:.2f} us a call; target {TARGET})")
    print(f"{result['ratio_within']:.3f} of past Rigel, in one process")


if __name__ == "__main__":
    main()
