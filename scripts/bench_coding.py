"""Size, speed and error of the codes for indices and values, on one thread.

    python scripts/bench_coding.py

Prints three tables: bits per index against log2 C(n, k) / k, which no code can beat for positions spread at random,
with milliseconds to encode and decode; the same for whole messages; and the relative squared error of each code for
values. Times are the least of many, so they hold on a busy machine too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from dgcopt.coding import (
    DENSE_CODES,
    VALUE_CODES,
    SparseCode,
    coded_bytes,
    decode_rice,
    encode_rice,
    encode_rows,
    rice_excess,
)

COUNT, NUMEL = 25_557, 25_557_032  # 0.1% of ResNet-50


def floor_bits(count: int, numel: int) -> float:
    """log2 C(numel, count)."""
    logarithm = math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    return logarithm / math.log(2)


def spread(count: int, numel: int) -> Tensor:
    """Positions at random."""
    positions = torch.randint(numel, (count + count // 4 + 10,)).unique()
    return positions[torch.randperm(len(positions))[:count]].sort().values


def clustered(count: int, numel: int) -> Tensor:
    """Positions in runs of 16 neighbours."""
    return (spread(count // 16, numel // 16) * 16).repeat_interleave(16) + torch.arange(16).repeat(count // 16)


def milliseconds(function: Callable[[], object], repeats: int = 200, seconds: float = 2.0) -> float:
    best, end = math.inf, time.perf_counter() + seconds
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return 1e3 * best


def heaviest(samples: Tensor, ratio: float = 0.001) -> Tensor:
    """The largest magnitudes, in the order in which they lie."""
    return samples[samples.abs().topk(math.ceil(ratio * len(samples))).indices.sort().values]


def index_table() -> None:
    print("| density | positions | k | bits per index | log2 C(n,k) / k | over | left out | encode ms | decode ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for density, count in ((1e-4, 25_557), (1e-3, 25_557), (1e-2, 25_557), (1e-1, 25_557), (1e-3, 255_570)):
        for positions in (spread, clustered):
            numel = round(count / density)
            indices = positions(count, numel)
            asked = len(indices)
            excess = int(rice_excess(indices, torch.tensor([asked]), asked, numel))
            sent = indices[torch.randperm(asked)[: asked - excess].sort().values]
            message = encode_rice(sent, torch.tensor([len(sent)]), asked, numel)
            assert torch.equal(decode_rice(message, asked, numel, [0])[0], sent)
            bits, least = 8 * message.numel() / asked, floor_bits(asked, numel) / asked

            def encode(indices: Tensor = indices, sent: Tensor = sent, asked: int = asked, numel: int = numel) -> None:
                rice_excess(indices, torch.tensor([asked]), asked, numel)
                encode_rice(sent, torch.tensor([len(sent)]), asked, numel)

            def decode(message: Tensor = message, asked: int = asked, numel: int = numel) -> None:
                decode_rice(message, asked, numel, [0])

            print(
                f"| {density:g} | {positions.__name__} | {asked:,} | {bits:.3f} | {least:.3f} | {bits / least - 1:.2%} "
                f"| {excess / asked:.2%} | {milliseconds(encode):.2f} | {milliseconds(decode):.2f} |"
            )


def message_table() -> None:
    print(f"\nk = {COUNT:,} of n = {NUMEL:,}, positions at random, everything counted\n")
    print("| indices | values | bits per coordinate | vs fp32 dense | encode ms | decode ms |")
    print("|---|---|---|---|---|---|")
    indices, values = spread(COUNT, NUMEL), torch.randn(COUNT)
    for code in (SparseCode("int32", "fp32"), *(SparseCode("rice", kind) for kind in VALUE_CODES)):
        message, _, _ = code.encode(indices, values, NUMEL)

        def encode(code: SparseCode = code) -> None:
            code.encode(indices, values, NUMEL)

        def decode(code: SparseCode = code, message: Tensor = message) -> None:
            code.decode(message, COUNT, NUMEL, rank=0)

        print(
            f"| {code.indices} | {code.values} | {8 * len(message) / COUNT:.3f} | {4 * NUMEL / len(message):,.0f}x "
            f"| {milliseconds(encode):.2f} | {milliseconds(decode):.2f} |"
        )


def error_table() -> None:
    n = 10_000_000
    gaussian = torch.randn(n)
    student = torch.randn(n) / torch.randn(3, n).square().mean(0).sqrt()
    print("\nRelative squared error. Selected: the largest 0.1%; dense: all elements, as of biases and norms\n")
    print("| code | bits | |N| selected | |N|^3 selected | Student t(3) selected | dense bits | N dense | t(3) dense |")
    print("|---|---|---|---|---|---|---|---|")
    selected = [heaviest(gaussian), heaviest(gaussian.pow(3)), heaviest(student)]
    dense = [gaussian[:54_120], student[:54_120]]

    def error(values: Tensor, arrived: Tensor) -> str:
        return f"{((values.double() - arrived.double()).square().sum() / values.double().square().sum()).item():.2g}"

    for kind, code in VALUE_CODES.items():
        errors = [error(v, encode_rows(v.unsqueeze(0), code)[1][0]) for v in selected]
        bits = 8 * coded_bytes(COUNT, code) / COUNT
        whole = [error(v, encode_rows(v.unsqueeze(0), DENSE_CODES[kind])[1][0]) for v in dense]
        whole_bits = 8 * coded_bytes(54_120, DENSE_CODES[kind]) / 54_120
        print(f"| {kind} | {bits:.2f} | {' | '.join(errors)} | {whole_bits:.2f} | {' | '.join(whole)} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    index_table()
    message_table()
    error_table()
