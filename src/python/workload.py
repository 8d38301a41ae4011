#!/usr/bin/env python3
"""A PyTorch program as users have it: one model, serving requests or training, with nothing of Rigel in it.

The GPU tests and `rigel bench` run it bare, beside another one, and under Rigel. But for --alternate and --announce, which are there to
measure Rigel, it must never import anything of Rigel, read a RIGEL_* variable, or do anything for the sake of being co-located.

Weights are random and nothing is fetched. Precision is PyTorch's default (fp32; TF32 in cuDNN convolutions only).

  serving   an open loop: requests fall due at --rate whatever happened to those before, and a latency counts from
            the due time to the output being in host memory. Input starts in pinned host memory. With several sizes
            of --batch, or lengths of --seq, each request has one of each by chance, all equally often, as where texts
            are of any length, and a server batches what has come.
            With --prepare images come as bytes, and each request has the host write them to pinned memory as numbers first;
            with --announce the program tells Rigel before that that a request is coming (rigel.request_coming).
            With --alternate one request of each two goes past Rigel (rigel.bypass), by chance the first or the second.
            With --served another process has the requests, and sends each over a TCP connection of this host as it falls due,
            its input with it.
  decoding  serving where a request is --decode tokens of GPT-2, each one replay of a captured CUDA graph over a past
            of --seq tokens whose keys and values are there already. With --stream kernel by kernel, and each is read back.
  training  a step loop over a batch that is already on the GPU, without reading the loss back, --ahead steps ahead of
            the GPU; with --graph each step is one replay of one captured CUDA graph. --windows says when it pauses.

One JSON line on standard output at the end. SIGTERM or SIGINT ends the run early: the line then holds what was measured. What cannot be
written at the end, for want of room, is told, and the exit status is 1; the line then still comes, at the worst on standard error.
"""

import argparse
import collections
import contextlib
import gc
import hashlib
import json
import math
import os
import random
import re
import signal
import socket
import struct
import sys
import tempfile
import threading
import time

# Before torch and transformers are imported: both read these once. cuBLAS's is for runs whose bits are compared only: it
# makes each bias-adding linear layer cost the host 109 us instead of 18 (measured on the H200 host).
if any(argument.split("=")[0] == "--losses" for argument in sys.argv):
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

MODELS = ("resnet50", "mobilenetv2", "bert", "gpt2")
TRACED = 20  # requests under the profiler for --gpu-time
SPIN_S = 300e-6  # the end of a wait is spun: time.sleep alone oversleeps by 50 to 100 us


class Stopped(BaseException):
    """SIGTERM before measuring began. Not an Exception, so that no library's handler swallows it."""


class Stop:
    """SIGTERM: ends set-up at once, and a measurement after the request or step in progress."""

    def __init__(self):
        self.asked = False
        self.measuring = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _signum, _frame):
        self.asked = True
        if not self.measuring:
            raise Stopped


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--mode", required=True, choices=("infer", "train"))
    parser.add_argument("--batch", required=True, metavar="N[,N...]", help="size of a batch; serving: or several, by chance")
    parser.add_argument("--seq", default="128", metavar="N[,N...]", help="tokens, for bert and gpt2; serving: or several, by chance")
    parser.add_argument("--rate", type=at_least_0(float), default=0.0, help="requests a second; 0 is a closed loop")
    parser.add_argument("--arrivals", default="poisson", help="poisson, uniform, or a JSON list of gaps in seconds")
    parser.add_argument(
        "--closed", action="store_true", help="arrivals that fall due while the one before is served are left out: one user, who asks again"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warmup", type=at_least_0(int), default=None, help="default: 150 requests or 10 iterations")
    parser.add_argument("--start-at", type=at_least_0(float), default=None, help="measure from this UNIX time on")
    parser.add_argument("--duration", type=at_least_0(float), default=None, help="seconds measured")
    parser.add_argument("--requests", type=at_least_0(int), default=None, help="requests or iterations measured")
    parser.add_argument("--losses", metavar="FILE", help="deterministic run; one loss (or output digest) a line")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--graph", action="store_true", help="serve, or train GPT-2, from a captured CUDA graph")
    parser.add_argument("--prepare", action="store_true", help="serve images that come as bytes, of which the host makes numbers for each request")
    parser.add_argument("--announce", action="store_true", help="serve, and tell Rigel that a request is coming as it has come in")
    parser.add_argument("--served", action="store_true", help="serve requests of another process, which come over a connection")
    parser.add_argument("--ahead", type=at_least_0(int), default=2, help="training steps issued before the first of them is waited for")
    parser.add_argument(
        "--windows", metavar="FILE", help="train by a JSON list of seconds: pause, work, pause, ...; then pause until the end"
    )
    parser.add_argument("--decode", type=int, default=0, metavar="N", help="a request is N tokens of GPT-2")
    parser.add_argument("--stream", action="store_true", help="decode without a graph; each token is read back before the next")
    parser.add_argument("--alternate", type=int, metavar="SEED", help="serve through Rigel and past it in turn; --log says which")
    parser.add_argument("--log", metavar="FILE", help="write every latency, or every step's end, as JSON")
    parser.add_argument("--gpu-time", action="store_true", help="only measure the GPU time of one request")
    args = parser.parse_args(argv)
    args.batches, args.lengths = (whole_numbers(parser, name, getattr(args, name)) for name in ("batch", "seq"))
    args.batch, args.seq = max(args.batches), max(args.lengths)
    args.kinds = [(size, length) for size in args.batches for length in args.lengths]
    if len(args.kinds) > 1 and (args.mode != "infer" or args.decode):
        parser.error("several sizes of --batch, or lengths of --seq, are for --mode infer without --decode")
    if args.graph and args.mode == "train" and args.model != "gpt2":
        parser.error("--graph with --mode train is for --model gpt2")
    if args.decode and (args.mode != "infer" or args.model != "gpt2" or args.decode < 1):
        parser.error("--decode is for --mode infer --model gpt2, and at least 1")
    if args.stream and not args.decode:
        parser.error("--stream is for --decode")
    if args.prepare and (args.mode != "infer" or args.model not in ("resnet50", "mobilenetv2")):
        parser.error("--prepare is for --mode infer of images")
    if args.announce and (args.mode != "infer" or args.decode):
        parser.error("--announce is for --mode infer without --decode")
    if args.served and (args.mode != "infer" or args.decode or args.closed):
        parser.error("--served is for --mode infer without --decode and --closed")
    if args.gpu_time and args.mode != "infer":
        parser.error("--gpu-time is for --mode infer")
    if args.alternate is not None and (args.mode != "infer" or args.gpu_time):
        parser.error("--alternate is for --mode infer without --gpu-time")
    if args.windows is not None and args.mode != "train":
        parser.error("--windows is for --mode train")
    for name in ("losses", "log"):
        check_output(parser, f"--{name}", getattr(args, name))
    args.gaps = None if args.arrivals in ("poisson", "uniform") else read_seconds(parser, "--arrivals", args.arrivals)
    args.spells = None if args.windows is None else read_seconds(parser, "--windows", args.windows)
    if args.served and not args.gpu_time and args.gaps is None and args.rate == 0:
        parser.error("--served needs --rate")
    if args.warmup is None:
        args.warmup = 150 if args.mode == "infer" else 10
    if args.losses and args.requests is None:
        args.requests = 20
    args.unwritten = False  # whether something could not be written
    return args


def at_least_0(kind):
    """Reads an argument. Of what is no number, or infinite, no run would ever be over."""

    def read(text):
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not 0 <= number <= sys.float_info.max:
            raise argparse.ArgumentTypeError(f"expected a {'whole ' if kind is int else ''}number of at least 0, got {text}")
        return number

    return read


def whole_numbers(parser, name, text):
    """One or several of 1 or more, joined by commas."""
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        parser.error(f"--{name}: expected whole numbers of at least 1, joined by commas, got {text}")
    return numbers


def read_seconds(parser, option, path):
    """The list in the file that an option names; what of it is none is an error with its line, as Rigel's own are."""
    kinds = "poisson, uniform, or " if option == "--arrivals" else ""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read()
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        parser.error(f"{option} {path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}")
    except (OSError, ValueError, RecursionError) as error:
        parser.error(f"{option} {path}: expected {kinds}a JSON list of seconds ({error})")
    if not isinstance(entries, list):
        parser.error(f"{option} {path}: expected a list of seconds, got {json.dumps(entries)[:80]}")
    for index, entry in enumerate(entries):
        is_number = isinstance(entry, (int, float)) and not isinstance(entry, bool)
        if not is_number or not 0 <= entry <= sys.float_info.max:
            line, column = place_of(text, index)
            got = json.dumps(entry)[:80]
            parser.error(f"{option} {path}:{line}:{column}: [{index}]: expected a number of seconds of at least 0, got {got}")
    return [float(entry) for entry in entries]


def check_output(parser, option, path):
    """Before minutes are spent on what could not be written down."""
    is_new = path is not None and not os.path.exists(path)
    if path is None or not (is_new or os.path.isfile(path) or os.path.isdir(path)):
        return  # a pipe would wait here for who reads it
    try:
        with open(path, "a", encoding="ascii"):
            pass
        if is_new:
            os.unlink(path)
    except OSError as error:
        parser.error(f"{option} {path}: cannot be written ({error.strerror})")


def say(text):
    """On standard error. Where nothing can be said a run goes on all the same."""
    with contextlib.suppress(OSError):
        print(f"workload: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def writing(args, option):
    """The file that an option names. Where it cannot be written, what was measured is still told."""
    path = getattr(args, option)
    try:
        with open(path, "w", encoding="ascii") as file:
            yield file
    except OSError as error:
        args.unwritten = True
        say(f"--{option} {path}: cannot be written ({error.strerror})")


def tell(args, report):
    """The line on standard output."""
    line = json.dumps(report)
    try:
        print(line, flush=True)
    except OSError as error:
        args.unwritten = True
        say(f"standard output cannot be written ({error.strerror}); it was to be:\n{line}")
        # Python writes what is left once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def place_of(text, index):
    """Line and column of an entry of the JSON list that a text is, from 1."""
    blank, decoder = re.compile(r"\s*"), json.JSONDecoder()
    at = blank.match(text, text.index("[") + 1).end()
    for _ in range(index):
        at = blank.match(text, text.index(",", decoder.raw_decode(text, at)[1]) + 1).end()
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


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


def by_chance(kinds, seed):
    """One of them after the other: each once, in an order drawn anew, and so on."""
    order = random.Random(seed)
    while True:
        yield from order.sample(kinds, len(kinds))


class Inference:
    """request() = issue() + finish(): input to the GPU, forward pass, output in host memory."""

    def __init__(self, torch, args):
        self.torch = torch
        model, batch, self.result = make_model(torch, args)
        self.net = torch.compile(model) if args.compile else model
        # Images have no length.
        hosts = [(batch[:size, :length] if batch.dim() == 2 else batch[:size]).contiguous().pin_memory() for size, length in args.kinds]
        # Each with its captured graph, if that is what serves it.
        self.kinds = [(host, *(self._capture(host) if args.graph else ())) for host in hosts]
        self.turn = by_chance(range(len(self.kinds)), args.seed)
        self.announce = self._announcer() if args.announce else lambda: None
        if args.prepare:
            torch.set_num_threads(1)  # on a host whose processors are shared, threads that wait for one another take 100 times as long
        # As they come in, once for all.
        self.images = {id(host): torch.randint(0, 256, host.shape, dtype=torch.uint8) for host in hosts} if args.prepare else {}

    def inputs(self):
        """Where the input of a request of each kind is to be, as it comes in: bytes."""
        return [memoryview(self.images.get(id(host), host).numpy()).cast("B") for host, *_ in self.kinds]

    def _announcer(self):
        try:
            import rigel
        except ImportError:
            return lambda: None  # without Rigel
        return rigel.request_coming

    def _capture(self, host):
        torch = self.torch
        static_in = host.cuda()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(5):
                self.result(self.net, static_in)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            static_out = self.result(self.net, static_in)
        return graph, static_in, static_out

    def issue(self):
        self.announce()
        host, *captured = self.kinds[next(self.turn)]
        if self.images:
            host.copy_(self.images[id(host)])
        with self.torch.no_grad():
            if captured:
                graph, static_in, static_out = captured
                static_in.copy_(host, non_blocking=True)
                graph.replay()
                return static_out
            return self.result(self.net, host.to("cuda", non_blocking=True))

    def finish(self, output):
        return output.cpu()

    def request(self):
        return self.finish(self.issue())


def gpt2_forward(model, hidden, attend):
    """GPT-2's layers and output layer on embeddings. `attend(layer, q, k, v)` is the attention.

    Spelled out over the model's own modules: transformers' forward makes masks and cache objects in ways that differ
    between versions, and what it asks of the GPU on the way cannot be captured in all of them.
    """
    batch, tokens, width = hidden.shape
    heads = model.config.n_head
    for i, block in enumerate(model.transformer.h):
        parts = block.attn.c_attn(block.ln_1(hidden)).split(width, dim=2)
        q, k, v = (part.view(batch, tokens, heads, width // heads).transpose(1, 2) for part in parts)
        attended = attend(i, q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        hidden = hidden + block.attn.resid_dropout(block.attn.c_proj(attended))
        hidden = hidden + block.mlp(block.ln_2(hidden))
    return model.lm_head(model.transformer.ln_f(hidden))


class Decoding:
    """request(): --decode tokens, one after the other, greedily. Everything the graph touches lies still."""

    def __init__(self, torch, args):
        self.torch = torch
        self.model, _, _ = make_model(torch, args)
        config = self.model.config
        self.past = args.seq
        slots = args.seq + args.decode
        if slots > config.n_positions:
            raise SystemExit(f"--seq and --decode: gpt2 has {config.n_positions} positions in all")
        shape = (args.batch, config.n_head, slots, config.n_embd // config.n_head)
        self.keys = [torch.randn(shape, device="cuda") for _ in range(config.n_layer)]
        self.values = [torch.randn(shape, device="cuda") for _ in range(config.n_layer)]
        self.slots = torch.arange(slots, device="cuda")
        self.position = torch.full((1,), self.past, dtype=torch.long, device="cuda")
        self.host = torch.randint(0, config.vocab_size, (args.batch, 1)).pin_memory()
        self.token = self.host.cuda()
        self.decoded = torch.zeros((args.batch, args.decode), dtype=torch.long, device="cuda")
        self._capture()

    def _step(self):
        """One token: reads and advances `token` and `position`, and fills in its keys and values."""
        transformer = self.model.transformer
        visible = (self.slots <= self.position).view(1, 1, 1, -1)

        def attend(layer, q, k, v):
            self.keys[layer].index_copy_(2, self.position, k)
            self.values[layer].index_copy_(2, self.position, v)
            attention = self.torch.nn.functional.scaled_dot_product_attention
            return attention(q, self.keys[layer], self.values[layer], attn_mask=visible)

        hidden = transformer.wte(self.token) + transformer.wpe(self.position)
        logits = gpt2_forward(self.model, hidden, attend)
        self.token.copy_(logits.argmax(dim=-1))
        self.position.add_(1)

    def _capture(self):
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(3):
                self.position.fill_(self.past)
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.position.fill_(self.past)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self._step()

    def issue(self):
        with self.torch.no_grad():
            self.token.copy_(self.host, non_blocking=True)
            self.position.fill_(self.past)
            for i in range(self.decoded.size(1)):
                self.graph.replay()
                self.decoded[:, i].copy_(self.token[:, 0])
        return self.decoded

    def finish(self, output):
        return output.cpu()

    def request(self):
        return self.finish(self.issue())


class Streaming(Decoding):
    """The same kernel by kernel, as generate() of transformers has it: each token is in host memory before the next is begun."""

    def _capture(self):
        pass

    def issue(self):
        with self.torch.no_grad():
            self.token.copy_(self.host, non_blocking=True)
            self.position.fill_(self.past)
            for i in range(self.decoded.size(1)):
                self._step()
                self.decoded[:, i].copy_(self.token[:, 0])
                self.token.tolist()
        return self.decoded


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
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=args.graph)
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


class GraphTraining(Training):
    """A GPT-2 training step (forward, backward, optimiser) as one CUDA graph, captured once and replayed."""

    def __init__(self, torch, args):
        super().__init__(torch, args)
        self.keep_losses = bool(args.losses)
        self.positions = torch.arange(args.seq, device="cuda").unsqueeze(0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                super().step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        # Without gradients at the start, those that the capture makes lie in the graph's memory and are overwritten.
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.static_loss = self.loss()
            self.static_loss.backward()
            self.optimizer.step()

    def loss(self):
        functional = self.torch.nn.functional
        transformer, config = self.net.transformer, self.net.config

        def attend(_layer, q, k, v):
            dropout = config.attn_pdrop
            return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)

        hidden = transformer.drop(transformer.wte(self.batch) + transformer.wpe(self.positions))
        logits = gpt2_forward(self.net, hidden, attend)
        return functional.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), self.target)

    def step(self):
        self.graph.replay()
        # The next replay overwrites it, so whoever keeps the losses gets copies.
        return self.static_loss.detach().clone() if self.keep_losses else self.static_loss.detach()


def make(torch, args):
    """The workload of the arguments, seeded. profiles/record.py uses it too."""
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.cuda.manual_seed_all(args.seed)
    if args.losses:
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)
    if args.mode == "infer":
        if args.decode:
            return (Streaming if args.stream else Decoding)(torch, args)
        return Inference(torch, args)
    return GraphTraining(torch, args) if args.graph else Training(torch, args)


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
    """Waits for --start-at: time.perf_counter() of it, also if it has passed, and for how many seconds it had."""
    now = time.perf_counter()
    if args.start_at is None:
        return now, 0.0
    left = args.start_at - time.time()
    if left < 0:
        say(f"late by {-left:.3f} s: set-up ended after --start-at")
        return now + left, -left
    wait_until(now + left, stop)
    return now + left, 0.0


def pause_at(spells, at):
    """Until when to pause `at` so many seconds after the start, by --windows; 0 where it is time to work."""
    end = 0.0
    for index, seconds in enumerate(spells or ()):
        end += seconds
        if at < end:
            return 0.0 if index % 2 else end
    return 0.0 if spells is None else math.inf


def due_times(args, start):
    """Seconds after the start at which requests fall due, one after the other."""
    if args.gaps is not None:
        due = 0.0
        for gap in args.gaps:
            due += gap
            if not args.closed or due >= time.perf_counter() - start:
                yield due
        return
    arrivals = random.Random(args.seed)
    due = 0.0
    while True:
        if args.rate > 0:
            due += arrivals.expovariate(args.rate) if args.arrivals == "poisson" else 1.0 / args.rate
            if args.closed and due < time.perf_counter() - start:
                continue
        else:
            due = time.perf_counter() - start
        yield due


def turns(seed):
    """Whether each request goes past Rigel: one of each two does, by chance the first or the second."""
    order = random.Random(seed)
    while True:
        first = order.random() < 0.5
        yield first
        yield not first


class Switch:
    """Through Rigel or past it: set between two requests, so that its own cost is in neither. Without --alternate: nothing."""

    def __init__(self, seed):
        self._turns = None if seed is None else turns(seed)
        self._bypass = None
        self._past = False
        self.log = []

    def begin(self):
        """Once the program has used the GPU. A request past Rigel that goes through it would be logged as what it is not."""
        if self._turns is None:
            return
        try:
            import rigel
        except ImportError:
            raise SystemExit("workload: --alternate: there is no Rigel here; run it by `rigel run --class high`") from None
        self._bypass = rigel.bypass()
        self._set(True)
        self._set(False)

    def _set(self, past):
        if past and not self._past and not self._bypass.__enter__():
            raise SystemExit("workload: --alternate: Rigel cannot be bypassed here; run it by `rigel run --class high`")
        if not past and self._past:
            self._bypass.__exit__(None, None, None)
        self._past = past

    def next(self):
        if self._turns is not None:
            self._set(next(self._turns))

    def served(self):
        self.log.append(self._past)

    def end(self):
        self._set(False)


class Clients:
    """Another process that sends each request as it falls due, and takes the answers."""

    ORDER = struct.Struct("dd")  # when the start was or will be, and how late it is by then; then the bytes of an input of each kind
    LENGTH = struct.Struct("Q")
    DUE = struct.Struct("dI")  # in front of an input: when, and of which kind
    NO_MORE = 2**32 - 1  # in place of a kind: all have been sent, so that an end before that is none
    ANSWER = bytes(8)

    def __init__(self, args, stop):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            if os.fork() == 0:
                try:
                    for number in (signal.SIGTERM, signal.SIGINT):
                        signal.signal(number, signal.SIG_DFL)
                    listener.close()  # or it would be connected to itself, once the other process has ended
                    with contextlib.suppress(OSError):
                        self._send_all(args, stop, address)
                finally:
                    os._exit(0)  # whatever comes: a signal too, just before
            listener.settimeout(60)
            self.connection, _ = listener.accept()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.settimeout(0.05)  # so that SIGTERM is seen

    def _send_all(self, args, stop, address):
        with socket.create_connection(address) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            whole = self.ORDER.size + self.LENGTH.size * len(args.kinds)
            order = connection.recv(whole, socket.MSG_WAITALL)
            if len(order) < whole:
                return
            start, late_s = self.ORDER.unpack_from(order)
            lengths = [length for (length,) in self.LENGTH.iter_unpack(order[self.ORDER.size :])]
            kinds = by_chance(range(len(lengths)), args.seed)
            answers = threading.Thread(target=self._take_answers, args=(connection,), daemon=True)
            answers.start()
            for due in due_here(args, start, late_s, stop):
                kind = next(kinds)
                connection.sendall(self.DUE.pack(due, kind) + bytes(lengths[kind]))
            connection.sendall(self.DUE.pack(0.0, self.NO_MORE))
            connection.shutdown(socket.SHUT_WR)
            answers.join()  # what is closed before its answers have been taken is lost on the way

    @staticmethod
    def _take_answers(connection):
        """Until there is nobody to send to."""
        with contextlib.suppress(OSError):
            while connection.recv(4096):
                pass
        os._exit(0)

    def requests(self, start, late_s, stop, to, before_each):
        """When each fell due, once its input has come to that of its kind in `to`; of which kind it is says `kinds`."""
        head = bytearray(self.DUE.size)
        with contextlib.suppress(ConnectionError):
            self.connection.sendall(self.ORDER.pack(start, late_s) + b"".join(self.LENGTH.pack(len(one)) for one in to))
            while True:
                before_each()
                if not self._fill(memoryview(head), stop):
                    break
                due, self._kind = self.DUE.unpack(head)
                if self._kind == self.NO_MORE:
                    return
                if not self._fill(to[self._kind], stop):
                    break
                yield due
                self.connection.sendall(self.ANSWER)
        wait_until(time.perf_counter() + 1, stop)  # a SIGTERM for both may have come to the other one first
        if not stop.asked:
            raise SystemExit("workload: --served: the process that sends the requests ended before the last of them")

    def kinds(self):
        """That of the request which came last, whenever it is asked for."""
        while True:
            yield self._kind

    def _fill(self, to, stop):
        while to and not stop.asked:
            with contextlib.suppress(TimeoutError):
                got = self.connection.recv_into(to)
                if not got:
                    return False
                to = to[got:]
        return not stop.asked


def due_here(args, start, late_s, stop, before_each=lambda: None):
    """When each request falls due, once it does."""
    for due in due_times(args, start):
        if args.duration is not None and due >= args.duration:
            wait_until(start + args.duration, stop)
            return
        if due < late_s:
            continue
        before_each()
        wait_until(start + due, stop)
        if stop.asked:
            return
        yield due


def serve(work, args, stop, clients=None):
    outputs = []
    switch = Switch(args.alternate)
    for _ in range(args.warmup):
        work.request()
    switch.begin()
    gc.collect()
    gc.disable()
    stop.measuring = True
    start, late_s = wait_for_start(args, stop)
    served = []  # (seconds after the start at which it fell due, latency in seconds)
    if clients is None:
        requests = due_here(args, start, late_s, stop, switch.next)
    else:
        work.turn = clients.kinds()
        requests = clients.requests(start, late_s, stop, work.inputs(), switch.next)
    for due in requests if args.requests != 0 else ():
        output = work.request()
        served.append((due, time.perf_counter() - start - due))
        switch.served()
        if args.losses:
            outputs.append(output)
        if len(served) == args.requests:
            break
    elapsed = time.perf_counter() - start
    switch.end()
    if args.losses:
        with writing(args, "losses") as file:
            for output in outputs:
                file.write(hashlib.sha256(output.contiguous().numpy().tobytes()).hexdigest() + "\n")
    log = [[round(due, 6), round(latency * 1e3, 6)] for due, latency in served]
    write_log(args, late_s, requests=log, **({} if args.alternate is None else {"past": switch.log}))
    return infer_report(args, [latency for _, latency in served], elapsed, late_s > 0)


def write_log(args, late_s, **measured):
    if args.log:
        with writing(args, "log") as file:
            json.dump({"late_s": round(late_s, 6), "versions": versions(), **measured}, file)


def versions():
    """Of what is loaded."""
    names = [name for name in ("torch", "torchvision", "transformers") if name in sys.modules]
    found = {name: str(sys.modules[name].__version__) for name in names}
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    return {"python": sys.version.split()[0], **found}


def gpu_events(torch, iterate, times):
    """What the GPU does in so many iterations: events of a Chrome trace by torch.profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            iterate()
        torch.cuda.synchronize()
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    finally:
        os.unlink(path)
    return [e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def gpu_time_ms(torch, work, kinds):
    """Time in which the GPU does anything for one request, from a trace of its kernels and copies; of so many kinds the mean."""
    for _ in range(30 * kinds):
        work.request()
    torch.cuda.synchronize()
    traced = TRACED * kinds
    spans = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)))
        for event in gpu_events(torch, work.request, traced)
    )
    if not spans:
        raise SystemExit("workload: --gpu-time: the trace holds no work of the GPU; is profiling allowed on this host?")
    busy_us = 0.0
    reached = spans[0][0]
    for begin, end in spans:
        busy_us += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy_us / 1e3 / traced


def gpu_time_report(gpu_ms):
    return {"role": "gpu-time", "gpu_ms": None if gpu_ms is None else round(gpu_ms, 6)}


def infer_report(args, latencies, elapsed, late):
    ordered = sorted(latencies)

    def ms(seconds):
        return None if seconds is None else round(seconds * 1e3, 4)

    return {
        "role": "infer",
        "model": args.model,
        "batch": args.batches if len(args.batches) > 1 else args.batch,
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
    for _ in range(args.warmup):
        loss = work.step()
        if args.losses:
            losses.append(loss)
    torch.cuda.synchronize()
    gc.collect()
    gc.disable()
    stop.measuring = True
    start, late_s = wait_for_start(args, stop)
    issued = 0
    ends = []  # of steps, in seconds after the start
    ahead = collections.deque()

    def wait_for_first():
        ahead.popleft().synchronize()
        ends.append(time.perf_counter() - start)

    while not stop.asked and (args.requests is None or issued < args.requests):
        paused_until = pause_at(args.spells, time.perf_counter() - start)
        if paused_until > 0:
            while ahead:
                wait_for_first()
            wait_until(start + min(paused_until, math.inf if args.duration is None else args.duration), stop)
            if args.duration is not None and paused_until >= args.duration:
                break
            continue
        loss = work.step()
        issued += 1
        ahead.append(torch.cuda.Event())
        ahead[-1].record()
        if args.losses:
            losses.append(loss)
        if len(ahead) > args.ahead:
            wait_for_first()
        if args.duration is not None and ends and ends[-1] >= args.duration:
            break
    while ahead:
        wait_for_first()
    if args.losses:
        with writing(args, "losses") as file:
            for loss in losses:
                file.write(float(loss.item()).hex() + "\n")
    write_log(args, late_s, ends_s=[round(end, 6) for end in ends])
    within = [end for end in ends if args.duration is None or end <= args.duration]
    return train_report(args, len(within), within[-1] - late_s if within else 0.0, late_s > 0)


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
        clients = Clients(args, stop) if args.served and not args.gpu_time else None  # before there is anything that a fork would share
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("workload: no CUDA device: torch.cuda.is_available() is false")
        work = make(torch, args)
        if args.gpu_time:
            gpu_ms = gpu_time_ms(torch, work, len(args.kinds))
            write_log(args, 0.0, gpu_ms=gpu_ms)
            report = gpu_time_report(gpu_ms)
        elif args.mode == "infer":
            report = serve(work, args, stop, clients)
        else:
            report = train(torch, work, args, stop)
    except Stopped:
        if args.gpu_time:
            report = gpu_time_report(None)
        else:
            report = infer_report(args, [], 0.0, False) if args.mode == "infer" else train_report(args, 0, 0.0, False)
    tell(args, report)
    return 1 if args.unwritten else 0


if __name__ == "__main__":
    sys.exit(main())
