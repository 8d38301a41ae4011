#!/usr/bin/env python3
"""Keeps a GPU busy: multiplies matrices without end, some hundred milliseconds queued at a time. Ended by who started it."""

import torch


def main():
    torch.manual_seed(7)
    a = torch.randn(4096, 4096, device="cuda")
    b = torch.randn(4096, 4096, device="cuda")
    while True:
        for _ in range(50):
            a = torch.mm(a, b)
            a = a / a.abs().max()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
