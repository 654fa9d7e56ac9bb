"""What a loader costs: ranks that wait for each other.

    torchrun --nproc-per-node 2 scripts/bench_data.py balance

Ranks train a small recurrent network on sentences of different length, 8 at a time, and meet after each step. Both
samplers take turns, every 10 steps, so that whatever else the machine does disturbs both alike. The table says what
part of its time each rank waited: by the clock; by the processor time that the ranks' steps took, which counts what
they wait for each other and not what they wait for other programs; and as counted in words.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler

import dgcopt
from dgcopt import Comm
from dgcopt.collectives import AllGather
from dgcopt.data import LoadBalancingDistributedSampler

TURN, SENTENCES, BATCH = 10, 1600, 8


def sentences() -> list[Tensor]:
    """Of 1 to 120 words; half have less than 20."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(SENTENCES, generator=generator) * 0.8 + 3).exp().clamp(1, 120).long()
    return [torch.randint(1000, (length,), generator=generator) for length in lengths.tolist()]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.reads, self.says = nn.Embedding(1000, 64), nn.GRU(64, 64, batch_first=True), nn.Linear(64, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return self.says(self.reads(self.words(batch))[0][:, -1])


def steps(comm: Comm, data: list[Tensor], sampler: Sampler[int]) -> Iterator[Tensor]:
    """Of each rank in each step: seconds at work, seconds waiting, processor seconds, and words. Shape `[ranks, 4]`."""
    model = Reader()
    loader = DataLoader(data, BATCH, sampler=sampler, collate_fn=lambda batch: nn.utils.rnn.pad_sequence(batch, True))  # type: ignore[arg-type]
    for batch in loader:
        start, began = time.perf_counter(), time.thread_time()
        model(batch).square().mean().backward()
        worked, processor = time.perf_counter() - start, time.thread_time() - began
        comm.run(AllGather(torch.zeros(1)))
        waited = time.perf_counter() - start - worked
        mine = torch.tensor([worked, waited, processor, float(batch.numel())])
        yield comm.run(AllGather(mine)).view(-1, 4)


def balance() -> None:
    comm, data = dgcopt.init(), sentences()
    samplers: dict[str, Sampler[int]] = {
        "DistributedSampler": DistributedSampler(data, comm.size, comm.rank),  # type: ignore[arg-type]
        "LoadBalancingDistributedSampler": LoadBalancingDistributedSampler(data, len),
        "the same, random_level=0.2": LoadBalancingDistributedSampler(data, len, random_level=0.2),
    }
    going = {name: steps(comm, data, sampler) for name, sampler in samplers.items()}
    for _ in itertools.islice(steps(comm, data, samplers["DistributedSampler"]), TURN):
        pass  # until everything is warm
    seen: dict[str, list[Tensor]] = {name: [] for name in samplers}
    for _ in range(SENTENCES // BATCH // comm.size // TURN):
        for name, each in going.items():
            seen[name] += itertools.islice(each, TURN)
    if comm.rank == 0:
        print("| sampler | ranks wait, by the clock | by processor time | by words |")
        print("|---|---|---|---|")
        for name, rows in seen.items():
            table = torch.stack(rows)  # [steps, ranks, 4]
            worked, waited = table[:, :, 0].sum(0), table[:, :, 1].sum(0)
            counted = [1 - of.sum(0) / of.amax(1).sum() for of in (table[:, :, 2], table[:, :, 3])]
            shares = [waited / (worked + waited), *counted]
            print(f"| {name} | " + " | ".join(f"{float(s.min()):.1%} - {float(s.max()):.1%}" for s in shares) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["balance"])
    parser.parse_args()
    torch.set_num_threads(1)
    balance()
