"""Five trits in a byte: the same bits in C as in torch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import EXAMPLES, assert_same_bits, built, numbers, places

from dgcopt.kernels import native
from dgcopt.kernels import torch as specification


@built
@settings(max_examples=EXAMPLES, deadline=None)
@given(numel=st.integers(0, 700), shift=st.integers(0, 3), seed=st.integers(0, 2**20))
def test_pack_trits(numel, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    trits = torch.randint(-1, 2, (numel + shift,), generator=generator, dtype=torch.int8)[shift:]
    packed = native.pack_trits(trits)
    assert torch.equal(packed, specification.pack_trits(trits))
    arrived = native.unpack_trits(packed, numel)
    assert arrived is not None and torch.equal(arrived, trits)
    damaged = packed ^ torch.randint(256, packed.shape, generator=generator).byte()
    ours, theirs = native.unpack_trits(damaged, numel), specification.unpack_trits(damaged, numel)
    assert (ours is None) == (theirs is None) and (ours is None or theirs is None or torch.equal(ours, theirs))


def test_every_byte():
    for of in (native, specification) if native.instructions() else (specification,):
        for byte in range(256):
            trits = of.unpack_trits(torch.tensor([byte], dtype=torch.uint8), 5)
            if byte >= 243:
                assert trits is None
            else:
                assert trits is not None and sum(3 ** (4 - i) * (t + 1) for i, t in enumerate(trits.tolist())) == byte


@built
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    blocks=st.sampled_from([0, 1, 3, 17, 2200]),
    tensors=st.integers(1, 5),
    how=st.sampled_from(["set", "add", "subtract"]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_put_trits(blocks, tensors, how, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    trits = torch.randint(-1, 2, (64 * blocks + shift,), generator=generator, dtype=torch.int8)[shift:]
    scales, place = numbers(tensors, torch.float32, "normal", seed), places(blocks, tensors, seed)
    ours = numbers(64 * blocks, torch.float32, "of all sizes", seed)
    theirs = ours.clone()
    native.put_trits(trits, scales, place, ours, how)
    specification.put_trits(trits, scales, place, theirs, how)
    assert_same_bits(ours, theirs)
