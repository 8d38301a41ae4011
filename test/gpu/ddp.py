#!/usr/bin/env python3
"""DistributedDataParallel with a result that can be compared: `torchrun --standalone --nproc-per-node=2 ddp.py --losses PREFIX`.

Each rank trains the same small network on data of its own, on the GPU of its local rank, over NCCL, and writes its losses, one a
line, to the last bit, to PREFIX.RANK. A deadlock ends with an error: NCCL's after a minute, or the alarm. It must never import
anything of Rigel.
"""

import argparse
import datetime
import os
import signal

# Read by cuBLAS at start: bits must agree between runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

LIMIT_S = 240


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", required=True)
    parser.add_argument("--iterations", type=int, default=1000)
    options = parser.parse_args()
    signal.alarm(LIMIT_S)
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60), device_id=device)
    rank = dist.get_rank()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024),
        torch.nn.GELU(),
        torch.nn.Linear(1024, 1024),
        torch.nn.GELU(),
        torch.nn.Linear(1024, 16),
    ).to(device)
    # Small buckets: several collectives an iteration, among the kernels of the backward pass.
    model = DistributedDataParallel(model, device_ids=[local], bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = torch.Generator().manual_seed(100 + rank)
    batches = [(torch.randn(64, 256, generator=data), torch.randn(64, 16, generator=data)) for _ in range(16)]
    batches = [(x.to(device), y.to(device)) for x, y in batches]
    losses = []
    for iteration in range(options.iterations):
        x, y = batches[iteration % len(batches)]
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        # Every tenth is waited for, as programs do that print it.
        losses.append(loss.item() if iteration % 10 == 0 else loss.detach())
    torch.cuda.synchronize()
    with open(f"{options.losses}.{rank}", "w") as file:
        file.writelines(f"{float(loss).hex()}\n" for loss in losses)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
