"""What a loader costs: ranks that wait for each other, and samples that are made anew in each epoch.

    torchrun --nproc-per-node 2 scripts/bench_data.py balance
    python scripts/bench_data.py cache [--redis redis://host:6379]

**balance.** Ranks train a small recurrent network on sentences of different length, 8 at a time, and meet after each
step. Both samplers take turns, every 10 steps, so that whatever else the machine does disturbs both alike. The table
says what part of its time each rank waited: by the clock; by the processor time that the ranks' steps took, which
counts what they wait for each other and not what they wait for other programs; and as counted in words.

**cache.** Seconds of the first two epochs of 200 images, which are blurred and scaled to 3 x 224 x 224, without a
model; and of an epoch in another process that opens the same store.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

import dgcopt
from dgcopt import Comm
from dgcopt.collectives import AllGather
from dgcopt.data import CachedDataset, LoadBalancingDistributedSampler

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


class Images(Dataset):
    """Large images, and a transform that takes its time."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.rand(1, 3, 448, 448, generator=torch.Generator().manual_seed(index))
        blurred = nn.functional.avg_pool2d(image, 9, 1, 4)
        small = nn.functional.interpolate(blurred, (224, 224), mode="bicubic", antialias=True)
        return small[0].mul(255).clamp(0, 255).byte(), index


def cached(store: str | None, run: str) -> Dataset:
    return Images() if store is None else CachedDataset(Images(), store, run)


def epoch(data: Dataset) -> float:
    """Seconds."""
    start = time.perf_counter()
    for _ in DataLoader(data, batch_size=10):
        pass
    return time.perf_counter() - start


def epoch_elsewhere(store: str | None, run: str) -> float:
    return epoch(cached(store, run))


def cache(redis: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, str | None] = {"none": None, "memory": "memory", "disk": f"disk:{folder}"}
        if redis is not None:
            stores["redis"] = redis
        print("| store | epoch 1 | epoch 2 | another process |")
        print("|---|---|---|---|")
        for name, store in stores.items():
            run = f"bench {time.time_ns()}"
            data = cached(store, run)
            seconds = [epoch(data), epoch(data)]
            with multiprocessing.get_context("fork").Pool(1) as pool:
                seconds.append(pool.apply(epoch_elsewhere, (store, run)))
            print(f"| {name} | " + " | ".join(f"{each:.2f}" for each in seconds) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["balance", "cache"])
    parser.add_argument("--redis", help="URL of a server that may be written to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "balance":
        balance()
    else:
        cache(options.redis)
