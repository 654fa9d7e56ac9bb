"""Milliseconds of an optimizer's step: plain, with torch's foreach and fused, and by dgcopt.fuse_optimizer.

    python scripts/bench_fuse.py

On one thread, for 100 tensors of 1,000 elements and 10 of a million. Gradients lie apart, as autograd leaves them. All
take turns, and the least of many is told, so that it holds on a busy machine too.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import nn

import dgcopt

CASES = {"100 x 1,000": (100, 1_000, 60), "10 x 1,000,000": (10, 1_000_000, 12)}
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {},
    "AdamW": {},
    "Adagrad": {},
    "RMSprop": {},
    "NAdam": {},
    "Adadelta": {},
}


def make(kind: str, count: int, size: int, **how: Any) -> torch.optim.Optimizer:
    params = [nn.Parameter(torch.randn(size)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(size)
    return getattr(torch.optim, kind)(params, **KINDS[kind], **how)


def main() -> None:
    torch.set_num_threads(1)
    ways = ("plain", "foreach", "fused", "fuse_optimizer", "fuse_optimizer, same bits")
    print("| step | tensors | " + " | ".join(ways) + " |")
    print("|---|---|" + "---|" * len(ways))
    for tensors, (count, size, repeats) in CASES.items():
        for kind in KINDS:
            has_fused = "fused" in make(kind, 1, 1).defaults
            exact = {"foreach": False}
            optimizers = {
                "plain": make(kind, count, size, **exact),
                "foreach": make(kind, count, size, foreach=True),
                **({"fused": make(kind, count, size, fused=True)} if has_fused else {}),
                "fuse_optimizer": dgcopt.fuse_optimizer(make(kind, count, size)),
                "fuse_optimizer, same bits": dgcopt.fuse_optimizer(make(kind, count, size, **exact)),
            }
            best = dict.fromkeys(ways, math.inf)
            for _ in range(repeats):
                for way, optimizer in optimizers.items():
                    start = time.perf_counter()
                    optimizer.step()
                    best[way] = min(best[way], time.perf_counter() - start)
            cells = (f"{1e3 * best[way]:.2f}" if way in optimizers else "-" for way in ways)
            print(f"| {kind} | {tensors} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
