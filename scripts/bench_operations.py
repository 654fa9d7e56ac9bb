"""How fast each kernel is: bytes per second, against a copy on the same device, and against its specification in torch.

    python scripts/bench_operations.py --device cuda
    python scripts/bench_operations.py --numel 2000000 select round_levels

A row for each operation that runs in Triton (C on a CPU), on random numbers. Its bytes are those of all tensors that it
takes and returns, and once more of those that it reads and writes, such as momenta. Of operations at few positions
(select, gather and their like) only the time says something. Launches are part of the time. Medians over the rounds,
in which operations take turns with the copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgcopt import kernels
from dgcopt.kernels import Chunks, Groups, Matrices, Mixture, Momentum, Parts

KEY = 0x123456789ABCDEF1
WARMUP = 3


def calls(n: int, device: torch.device) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Operations by name, and operands of n elements, a multiple of 8192; some in several of their variants."""
    blocks, tensors, half, float32 = n // 64, 8, torch.bfloat16, torch.float32

    def flat(numel: int, dtype: torch.dtype = float32) -> Tensor:
        return torch.randn(numel, device=device).to(dtype)

    def whole(numel: int, below: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(below, (numel,), dtype=dtype, device=device)

    x, y, out, bits = flat(n), flat(n), flat(n), whole(n, 243)
    place = torch.arange(blocks).mul(tensors).div(blocks, rounding_mode="floor").long().to(device)
    scales = flat(tensors).abs() + 10
    spread = torch.arange(0, n, 1000).to(device)  # one position of every thousand
    third = n // 192 * 64
    groups = Groups([[(0, third - 24)], [(third, 2 * third - 24), (2 * third, n)]], [third // 1000, n // 1000], device)
    some = torch.arange(0, blocks, 100).to(device)
    for dtype, g in ((float32, flat(n, half)), (half, flat(n))):
        v, u, maxima = flat(n, dtype), flat(n, dtype), flat(blocks, dtype)
        rule = Momentum(0.9, 0.1, True) if dtype == half else Momentum(0.9)
        for operation in ("accumulate", "preview_block_maxima"):
            yield operation, (v, u, g, maxima, rule, 0.5)
        yield "preview_block_maxima", (v, u, g, maxima, rule, 0.5, flat(n, dtype))
        yield "update_momentum", (u, g, rule, 0.5)
        yield "preview_blocks", (v, u, g, some, flat(64 * len(some), dtype).view(-1, 64), rule)
        yield "block_maxima", (v,)
        found = kernels.block_maxima.specification(v)
        yield "select", (v, found, groups)
        yield "select_ahead", (lambda chosen, v=v: v.view(-1, 64).index_select(0, chosen), found, groups)
        spans = [(start, start + 4096) for start in range(0, n, 4096)]
        yield "select_chunks", (v, Chunks(spans, [32] * len(spans), device))
    yield "accumulate", (x, None, None, flat(blocks), None)
    yield "add_and_maxima", (x, y, 0.9, out)
    yield "add_and_norms", (x, y, 0.9, out)
    yield "add_and_select_chunks", (x, y, 0.9, out, Chunks(spans, [32] * len(spans), device))
    for most in (n // 1000, n):
        yield "select_above", (x, 2.5, most)
        yield "add_and_select_above", (x, y, 0.9, out, 2.5, most)
    yield "copy_scaled", ([x.narrow(0, 0, n - 24)], [out], 0.5)
    yield "copy_scaled", ([flat(n, half)], [flat(n, half)], 0.5)
    yield "decay", ([x, flat(65)], [y, flat(65)], Momentum(0.9), 1e-4, 0.1)
    yield "decay", ([x], [y], Momentum(0.9, 0.1, True), 1e-4, 0.1)
    yield "decay", ([flat(n, half)], [flat(n, half)], Momentum(0.9), 1e-4, 0.1)
    matrices = Matrices([(0, n // 128, 128)])
    yield "dct", (x, matrices, out)
    yield "inverse_dct", (x, matrices, out, "sign")
    yield "draw_from_spans", (place, place + 1, KEY)
    yield "pack_small", (bits & 7, 3)
    yield "pack_small", (bits & 31, 5)
    yield "unpack_small", (bits, n, 5)
    yield "peaks", ([x, out.narrow(0, 1, n - 1).view(1, -1)],)
    yield "peaks", ([flat(n, half), flat(64, half)],)
    yield "gather", (x, spread)
    yield "subtract_at", (flat(n, half), spread, flat(len(spread)))
    yield "clear_at", (x, spread)
    cuts = torch.tensor(range(0, n + 1, n // tensors))
    parts = Parts([flat(n // tensors) for _ in range(tensors)], cuts[:-1], cuts[1:])
    yield "add_at", (parts, spread.repeat(2), flat(2 * len(spread)))
    yield "step_at", (parts, [0.1] * tensors, spread.repeat(2), flat(len(spread)).repeat(2))
    count, nbytes = torch.tensor([len(spread)]), n // 500
    row, there = spread.view(1, -1), count.to(device)
    yield "by_owner", (spread, 8)
    yield "of_owners", (spread, count, 8)
    yield "rice_measure", (row, there, 9, n)
    yield "rice_pack", (row, there, 9, nbytes)
    yield "rice_unpack", (kernels.rice_pack(row, there, 9, nbytes), there, 9, n, len(spread))
    yield "round_levels", (x, scales, place, 7, KEY)
    yield "round_levels", (x, scales, place, 127, KEY)
    yield "put_levels", (bits, 3, scales, place, out, "set")
    yield "put_levels", (bits, 7, scales, place, out, "add")
    yield "round_powers", (x, KEY)
    yield "put_powers", (whole(n + n // 8, 140), out, "subtract")
    yield "round_trits", (x, scales, place, KEY)
    yield "put_trits", (bits, scales, place, out, "add")
    yield "majority", (bits.view(4, -1),)
    yield "pack_signs", (x, True)
    yield "mix_signs", (x, 0.9, y, 0.1, out)
    yield "split_signs", (x,)
    mixture = Mixture(0.9, 0.1, [64], [flat(n - 64)])
    yield "mix", (out, mixture)
    yield "split_sum", (x, y, out)
    yield "split_sum", (x, y, out, mixture)
    yield (
        "split_sum_of_signs",
        (x, [bits, bits], flat(2 * tensors).view(2, -1), place, whole(blocks, 65, torch.int64), out),
    )
    yield "put_signs", (bits, scales, scales, place, out, "set")
    yield "put_signs", (bits, scales, scales, place, out, "set", mixture)
    yield "tensor_sums", (flat(3 * blocks).view(3, -1), place, tensors)
    yield "tensor_norms", (x, place, tensors)
    ends = torch.tensor([[-5.0, 5.0], [-4.0, 4.0]]).to(device)
    yield "minmax_ends", (x.view(2, -1).narrow(1, 8, n // 2 - 8),)
    yield "minmax_ends", (x.view(2, -1), mixture)
    yield "minmax_codes", (x.view(2, -1), ends, whole(n, 256).view(2, -1))
    yield "put_minmax", (bits, torch.tensor([-5.0, 5.0]).to(device), out, "add")
    yield "put_minmax", (bits, torch.tensor([-5.0, 5.0]).to(device), out, "set", mixture)
    yield "minmax_of_mean", (bits.view(2, -1), ends, 2, whole(n // 2, 256))
    yield "put_product", (flat(n // 16).view(-1, 4), flat(256).view(-1, 4), out, x)
    for cuts in (None, torch.arange(0, n + 1, 512).to(device)):
        yield "round_steps", (x, 512, 127, cuts)
        yield "of_steps", (whole(n, 127, torch.int8), flat(n // 512), 512, cuts)
        yield "nearest_levels", (x, flat(n // 64).view(-1, 8), 512, cuts)
        yield "of_levels", (bits & 15, flat(n // 64).view(-1, 8), 512, cuts)
        yield "means", (x, 512, 2, cuts)


UPDATED = {
    "accumulate": (0, 1, 2),
    "update_momentum": (0, 1),
    "decay": (0, 1),
    "mix": (0,),
    "put_levels": (4,),
    "put_trits": (3,),
    "put_powers": (1,),
    "put_minmax": (2,),
    "put_product": (3,),
}
"""Places of the operands that an operation reads and writes; of those that put something, unless they set it."""


def moved(name: str, operands: tuple[Any, ...], returned: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    again = () if "set" in operands else UPDATED.get(name, ())
    return nbytes(operands) + nbytes(returned) + sum(nbytes(operands[place]) for place in again)


def nbytes(things: Any) -> int:
    """Of all tensors among them."""
    if isinstance(things, Tensor):
        return things.numel() * things.element_size()
    if isinstance(things, Mixture):
        return nbytes(tuple(things.parts))
    return sum(map(nbytes, things)) if isinstance(things, tuple | list) else 0


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """How long it takes until the device is done."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, or cuda")
    parser.add_argument("--numel", type=int, default=2**25, help="elements, rounded down to a multiple of 8192")
    parser.add_argument("--rounds", type=int, default=10, help="how often each operation runs")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("names", nargs="*", help="operations; all, unless some are named")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device, n = arguments.device, arguments.numel // 8192 * 8192
    source = torch.randn(n, device=device)
    target, records = torch.empty_like(source), []
    print("| operation | MB | ms | GB/s | of a copy | torch: ms | |\n|---|---|---|---|---|---|---|")
    for name, operands in calls(n, device):
        if arguments.names and name not in arguments.names:
            continue
        kernel = getattr(kernels, name)
        runs = (lambda k=kernel, o=operands: k(*o), lambda k=kernel, o=operands: k.specification(*o))
        size = moved(name, operands, kernel(*operands))
        turns = [
            [seconds(run, device) for run in (*runs, lambda: target.copy_(source))]
            for _ in range(WARMUP + arguments.rounds)
        ]
        ours, theirs, copy = (statistics.median(column) for column in zip(*turns[WARMUP:], strict=True))
        speed, of_copy = 1e-9 * size / ours, 1e-9 * nbytes((source, target)) / copy
        cells = f"{1e-6 * size:.0f} | {1e3 * ours:.3f} | {speed:.1f} | {speed / of_copy:.0%}"
        print(f"| {name} | {cells} | {1e3 * theirs:.3f} | {theirs / ours:.1f}x |", flush=True)
        records.append({"operation": name, "bytes": size, "seconds": ours, "torch": theirs, "copy GB/s": of_copy})
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
