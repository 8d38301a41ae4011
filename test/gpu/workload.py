#!/usr/bin/env python3
"""A PyTorch program as users have it: one model, serving requests or training, with nothing of Rigel in it.

The GPU tests and the README's table run it bare, beside another one, and under Rigel. It must never import
anything of Rigel, read a RIGEL_* variable, or do anything for the sake of being co-located.

Weights are random and nothing is fetched. Precision is PyTorch's default (fp32; TF32 in cuDNN convolutions only).

  serving   an open loop: requests fall due at --rate whatever happened to those before, and a latency counts from
            the due time to the output being in host memory. Input starts in pinned host memory.
  training  a step loop over a batch that is already on the GPU, without reading the loss back.

One JSON line on standard output at the end. SIGTERM ends the run early: the line then holds what was measured.
"""

import argparse
import gc
import hashlib
import json
import os
import random
import signal
import sys
import time

# Before torch and transformers are imported: both read these once. cuBLAS's is for runs whose bits are compared only: it
# makes each bias-adding linear layer cost the host 109 us instead of 18 (measured on the H200 host).
if "--losses" in sys.argv:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

MODELS = ("resnet50", "mobilenetv2", "bert", "gpt2")
SPIN_S = 300e-6  # the end of a wait is spun: time.sleep alone oversleeps by 50 to 100 us


class Stopped(BaseException):
    """SIGTERM before measuring began. Not an Exception, so that no library's handler swallows it."""


class Stop:
    """SIGTERM: ends set-up at once, and a measurement after the request or step in progress."""

    def __init__(self):
        self.asked = False
        self.measuring = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, _signum, _frame):
        self.asked = True
        if not self.measuring:
            raise Stopped


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--mode", required=True, choices=("infer", "train"))
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seq", type=int, default=128, help="tokens, for bert and gpt2")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0 is a closed loop")
    parser.add_argument("--arrivals", choices=("poisson", "uniform"), default="poisson")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=None, help="default: 150 requests or 10 iterations")
    parser.add_argument("--start-at", type=float, default=None, help="measure from this UNIX time on")
    parser.add_argument("--duration", type=float, default=None, help="seconds measured")
    parser.add_argument("--requests", type=int, default=None, help="requests or iterations measured")
    parser.add_argument("--losses", metavar="FILE", help="deterministic run; one loss (or output digest) a line")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--graph", action="store_true", help="serve from a captured CUDA graph")
    args = parser.parse_args(argv)
    if args.batch < 1 or args.seq < 1 or args.rate < 0:
        parser.error("--batch and --seq must be at least 1, --rate at least 0")
    if args.graph and args.mode != "infer":
        parser.error("--graph is for --mode infer")
    if args.warmup is None:
        args.warmup = 150 if args.mode == "infer" else 10
    if args.losses and args.requests is None:
        args.requests = 20
    return args


def make_model(torch, args):
    """The model in eval or train mode on the GPU, a host batch, and a function from batch to result."""
    if args.model in ("resnet50", "mobilenetv2"):
        import torchvision

        make = torchvision.models.resnet50 if args.model == "resnet50" else torchvision.models.mobilenet_v2
        model = make(weights=None)
        batch = torch.randn(args.batch, 3, 224, 224)

        def result(net, x):
            return net(x)
    else:
        import transformers

        # Eager attention where bits must agree between runs: the fused backward uses atomics.
        attention = "eager" if args.losses else "sdpa"
        if args.model == "bert":
            config = transformers.BertConfig(attn_implementation=attention)
            model = transformers.BertModel(config)

            def result(net, x):
                return net(input_ids=x).pooler_output
        else:
            config = transformers.GPT2Config(attn_implementation=attention, use_cache=False)
            model = transformers.GPT2LMHeadModel(config)

            def result(net, x):
                logits = net(input_ids=x, use_cache=False).logits
                return logits if args.mode == "train" else logits[:, -1]
        if args.seq > config.max_position_embeddings:
            raise SystemExit(f"--seq: {args.model} takes at most {config.max_position_embeddings} tokens")
        batch = torch.randint(0, config.vocab_size, (args.batch, args.seq))
    model = model.cuda()
    model.train(args.mode == "train")
    return model, batch, result


class Inference:
    """request() = issue() + finish(): input to the GPU, forward pass, output in host memory."""

    def __init__(self, torch, args):
        self.torch = torch
        model, batch, self.result = make_model(torch, args)
        self.net = torch.compile(model) if args.compile else model
        self.host = batch.pin_memory()
        self.graph = None
        if args.graph:
            self._capture()

    def _capture(self):
        torch = self.torch
        self.static_in = self.host.cuda()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(5):
                self.result(self.net, self.static_in)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            self.static_out = self.result(self.net, self.static_in)
        self.graph = graph

    def issue(self):
        with self.torch.no_grad():
            if self.graph is not None:
                self.static_in.copy_(self.host, non_blocking=True)
                self.graph.replay()
                return self.static_out
            return self.result(self.net, self.host.to("cuda", non_blocking=True))

    def finish(self, output):
        return output.cpu()

    def request(self):
        return self.finish(self.issue())


class Training:
    """step() = one optimiser step; it returns the loss, still on the GPU."""

    def __init__(self, torch, args):
        self.torch = torch
        model, batch, self.result = make_model(torch, args)
        self.net = torch.compile(model) if args.compile else model
        self.batch = batch.cuda()
        self.tokens = args.model in ("bert", "gpt2")
        if args.model == "gpt2":
            self.target = self.batch[:, 1:].reshape(-1)
        elif args.model == "bert":
            self.target = torch.randn(args.batch, model.config.hidden_size).cuda()
        else:
            self.target = torch.randint(0, 1000, (args.batch,)).cuda()
        self.model_name = args.model
        if self.tokens:
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        else:
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loss(self):
        functional = self.torch.nn.functional
        output = self.result(self.net, self.batch)
        if self.model_name == "gpt2":
            return functional.cross_entropy(output[:, :-1].reshape(-1, output.size(-1)), self.target)
        if self.model_name == "bert":
            return functional.mse_loss(output, self.target)
        return functional.cross_entropy(output, self.target)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def make(torch, args):
    """The workload of the arguments, seeded. profiles/record.py uses it too."""
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.cuda.manual_seed_all(args.seed)
    if args.losses:
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)
    return Inference(torch, args) if args.mode == "infer" else Training(torch, args)


def percentile(ordered, q):
    """Nearest rank: the smallest sample with at least q percent of all at or below it."""
    if not ordered:
        return None
    rank = -(-len(ordered) * q // 100)
    return ordered[max(1, int(rank)) - 1]


def wait_until(due, stop):
    """Until time.perf_counter() is due: naps, so that SIGTERM is seen, then a spin."""
    while not stop.asked:
        left = due - time.perf_counter()
        if left <= 0:
            return
        if left > SPIN_S:
            time.sleep(min(left - SPIN_S, 0.05))


def wait_for_start(args, stop):
    """Waits for --start-at; true if it had passed already."""
    if args.start_at is None:
        return False
    left = args.start_at - time.time()
    if left < 0:
        print(f"workload: late by {-left:.3f} s: set-up ended after --start-at", file=sys.stderr, flush=True)
        return True
    wait_until(time.perf_counter() + left, stop)
    return False


def serve(work, args, stop):
    outputs = []
    for _ in range(args.warmup):
        work.request()
    gc.collect()
    gc.disable()
    stop.measuring = True
    late = wait_for_start(args, stop)
    arrivals = random.Random(args.seed)
    latencies = []
    start = time.perf_counter()
    due = 0.0
    while not stop.asked and (args.requests is None or len(latencies) < args.requests):
        if args.rate > 0:
            due += arrivals.expovariate(args.rate) if args.arrivals == "poisson" else 1.0 / args.rate
        else:
            due = time.perf_counter() - start
        if args.duration is not None and due >= args.duration:
            break
        wait_until(start + due, stop)
        if stop.asked:
            break
        output = work.request()
        latencies.append(time.perf_counter() - start - due)
        if args.losses:
            outputs.append(output)
    elapsed = time.perf_counter() - start
    if args.losses:
        with open(args.losses, "w", encoding="ascii") as file:
            for output in outputs:
                file.write(hashlib.sha256(output.contiguous().numpy().tobytes()).hexdigest() + "\n")
    return infer_report(args, latencies, elapsed, late)


def infer_report(args, latencies, elapsed, late):
    ordered = sorted(latencies)

    def ms(seconds):
        return None if seconds is None else round(seconds * 1e3, 4)

    return {
        "role": "infer",
        "model": args.model,
        "batch": args.batch,
        "count": len(ordered),
        "elapsed_s": round(elapsed, 6),
        "p50_ms": ms(percentile(ordered, 50)),
        "p95_ms": ms(percentile(ordered, 95)),
        "p99_ms": ms(percentile(ordered, 99)),
        "mean_ms": ms(sum(ordered) / len(ordered)) if ordered else None,
        "max_ms": ms(ordered[-1]) if ordered else None,
        "late": late,
    }


def train(torch, work, args, stop):
    losses = []
    step_s = 0.05
    for i in range(args.warmup):
        loss = work.step()
        if args.losses:
            losses.append(loss)
        if i == args.warmup // 2:  # later steps are timed: the first ones choose algorithms and compile
            torch.cuda.synchronize()
            timed_from = (time.perf_counter(), i)
    torch.cuda.synchronize()
    if args.warmup > 2:
        step_s = (time.perf_counter() - timed_from[0]) / (args.warmup - 1 - timed_from[1])
    # Each synchronisation drains the queue, so they are few; half a second at most, so that the window is kept.
    sync_every = max(1, min(10, int(0.5 / max(step_s, 1e-6))))
    gc.collect()
    gc.disable()
    stop.measuring = True
    late = wait_for_start(args, stop)
    start = time.perf_counter()
    done = issued = 0
    elapsed = 0.0
    while not stop.asked and (args.requests is None or issued < args.requests):
        loss = work.step()
        issued += 1
        if args.losses:
            losses.append(loss)
        if issued % sync_every == 0 or issued == args.requests:
            torch.cuda.synchronize()
            now = time.perf_counter() - start
            if args.duration is not None and now > args.duration and done > 0:
                break  # ended outside the window: not counted
            done, elapsed = issued, now
            if args.duration is not None and now >= args.duration:
                break
    if stop.asked and issued > done:
        torch.cuda.synchronize()
        done, elapsed = issued, time.perf_counter() - start
    if args.losses:
        with open(args.losses, "w", encoding="ascii") as file:
            for loss in losses:
                file.write(float(loss.item()).hex() + "\n")
    return train_report(args, done, elapsed, late)


def train_report(args, iterations, elapsed, late):
    return {
        "role": "train",
        "model": args.model,
        "batch": args.batch,
        "iterations": iterations,
        "elapsed_s": round(elapsed, 6),
        "iterations_per_s": round(iterations / elapsed, 4) if elapsed > 0 else None,
        "late": late,
    }


def main():
    args = arguments()
    stop = Stop()
    try:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("workload: no CUDA device: torch.cuda.is_available() is false")
        work = make(torch, args)
        report = serve(work, args, stop) if args.mode == "infer" else train(torch, work, args, stop)
    except Stopped:
        report = infer_report(args, [], 0.0, False) if args.mode == "infer" else train_report(args, 0, 0.0, False)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
