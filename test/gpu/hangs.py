#!/usr/bin/env python3
"""Programs of PyTorch that hang, or seem to: `hangs.py WHAT --marker FILE`. FILE is written when it has come to that.

  late   (torchrun) trains with DistributedDataParallel; after 20 iterations rank 1 sleeps in data loading
  skip   (torchrun) reduces a number over all ranks; after 20 times rank 1 leaves that out and goes on with work of its own
  spin   waits for a kernel that spins for more than ten seconds
  busy   multiplies matrices without end and never waits for them
  loop   multiplies matrices without end

Whoever started it ends it, else the alarm does. It must never import anything of Rigel.
"""

import argparse
import os
import pathlib
import signal
import time

import torch

LIMIT_S = 60
GOOD_ITERATIONS = 20
# At 2 GHz and less: 12 seconds and more.
SPIN_CYCLES = 24_000_000_000


def join_ranks():
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return dist, device


def late(marker):
    dist, device = join_ranks()
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 16)).to(device)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index], bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    iteration = 0
    while True:
        if iteration == GOOD_ITERATIONS and dist.get_rank() == 1:
            marker.touch()
            time.sleep(LIMIT_S)
        x, y = torch.randn(64, 256), torch.randn(64, 16)
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        loss.item()
        iteration += 1


def skip(marker):
    dist, device = join_ranks()
    total = torch.ones(1024, device=device)
    for _ in range(GOOD_ITERATIONS):
        dist.all_reduce(total)
        total.mean().item()
    if dist.get_rank() == 1:
        loop(marker)
    dist.all_reduce(total)
    total.mean().item()


def spin(marker):
    x = torch.ones(1024, device="cuda")
    # A kernel that is new is loaded when it is first launched, and that may wait for all that runs.
    x += 1
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    x += 1
    marker.touch()
    torch.cuda.synchronize()


def busy(marker):
    a, b, c = (torch.ones(4096, 4096, device="cuda") for _ in range(3))
    torch.mm(a, b, out=c)
    torch.cuda.synchronize()
    marker.touch()
    while True:
        torch.mm(a, b, out=c)


def loop(marker):
    marker.touch()
    a = torch.ones(1024, 1024, device="cuda")
    while True:
        for _ in range(50):
            b = torch.mm(a, a)
        b.mean().item()


def main():
    programs = {"late": late, "skip": skip, "spin": spin, "busy": busy, "loop": loop}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=programs)
    parser.add_argument("--marker", type=pathlib.Path, required=True)
    options = parser.parse_args()
    signal.alarm(LIMIT_S)
    programs[options.what](options.marker)


if __name__ == "__main__":
    main()
