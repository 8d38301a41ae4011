#!/usr/bin/env python3
"""GPipe-like training by client threads, with a result that can be compared: `torchrun --standalone --nproc-per-node=4 gpipe.py --losses
PREFIX`, or without torchrun on one GPU.

Each rank has four threads, each of them a client of its own (the even ones high, the odd ones best-effort) with a stream of its own, which
run the forward and backward pass of one micro-batch each: fp32 matrix products and batched ones. Before that each client's first product
is captured as a CUDA graph on its stream and replayed; its sum is the first line of losses. The rank adds their gradients up in
their order, averages them with the other ranks over NCCL and takes a step. It writes its losses, one a line, to the last
bit, to PREFIX.RANK, and on which devices its process has a context to PREFIX.RANK.devices. A deadlock ends by the alarm.
Without Rigel `rigel` does nothing.
"""

import argparse
import ctypes
import os
import signal
from concurrent.futures import ThreadPoolExecutor

# Read by cuBLAS at start: bits must agree between runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import rigel  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

CLIENTS = 4
LIMIT_S = 240


class Client:
    """One client thread, which goes on from one iteration to the next."""

    def __init__(self, number, device):
        self.number = number
        self.name = f"stage-{number}"
        self.kind = "best-effort" if number % 2 else "high"
        self.device = device
        self.thread = ThreadPoolExecutor(1)
        self.stream = torch.cuda.Stream(device)

    def capture(self, x, weight):
        """The product of the two, by a CUDA graph."""
        with torch.no_grad(), torch.cuda.stream(self.stream):
            x @ weight  # makes the thread's handle, and its workspace for this stream
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                product = x @ weight
            product.zero_()  # what ran instead of being captured is gone
            graph.replay()
            self.stream.synchronize()
        return product

    def start(self, weights, batch, ready):
        return self.thread.submit(self.micro_batch, weights, batch, ready)

    def micro_batch(self, weights, batch, ready):
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self.stream), rigel.client(self.name, self.kind, stream=self.stream, wait=False):
            with rigel.request():
                self.stream.wait_event(ready)
                x, y = batch
                hidden = torch.nn.functional.gelu(x @ weights[0])
                # 8 heads of 32: a batched product, and back.
                heads = hidden.view(-1, 8, 32).transpose(0, 1).contiguous()
                mixed = torch.bmm(heads, weights[1]).transpose(0, 1).reshape(-1, 256)
                loss = torch.nn.functional.mse_loss(mixed @ weights[2], y)
                gradients = torch.autograd.grad(loss, weights)
                done = torch.cuda.Event()
                done.record(self.stream)
                done.synchronize()
        return loss.detach(), gradients


def devices_with_context():
    cuda = ctypes.CDLL("libcuda.so.1")
    flags, active = ctypes.c_uint(), ctypes.c_int()
    found = []
    for device in range(torch.cuda.device_count()):
        if cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value:
            found.append(device)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", required=True)
    parser.add_argument("--iterations", type=int, default=200)
    options = parser.parse_args()
    signal.alarm(LIMIT_S)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    if ranks > 1:
        dist.init_process_group("nccl", device_id=device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    numbers = torch.Generator().manual_seed(7)
    shapes = [(128, 256), (8, 32, 32), (256, 16)]
    weights = [(torch.randn(shape, generator=numbers) / shape[-2] ** 0.5).to(device).requires_grad_() for shape in shapes]
    data = torch.Generator().manual_seed(100 + rank)
    batches = [
        (torch.randn(64, 128, generator=data).to(device), torch.randn(64, 16, generator=data).to(device)) for _ in range(16)
    ]
    clients = [Client(number, device) for number in range(CLIENTS)]
    torch.cuda.synchronize()
    losses = [[client.capture(batches[client.number][0], weights[0]).sum().item() for client in clients]]
    for iteration in range(options.iterations):
        ready = torch.cuda.Event()
        ready.record()
        pending = [
            client.start(weights, batches[(iteration * CLIENTS + number) % len(batches)], ready)
            for number, client in enumerate(clients)
        ]
        results = [each.result() for each in pending]
        with torch.no_grad():
            for index, weight in enumerate(weights):
                gradient = sum(gradients[index] for _, gradients in results) / (CLIENTS * ranks)
                if ranks > 1:
                    dist.all_reduce(gradient)
                weight -= 0.05 * gradient
        losses.append([loss.item() for loss, _ in results])
    torch.cuda.synchronize()
    with open(f"{options.losses}.{rank}", "w") as file:
        file.writelines(" ".join(loss.hex() for loss in row) + "\n" for row in losses)
    with open(f"{options.losses}.{rank}.devices", "w") as file:
        file.write(" ".join(map(str, devices_with_context())))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
