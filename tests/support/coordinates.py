"""Random coordinates and values of sparse messages, and their encoding and decoding."""

import random

import torch
from hypothesis import strategies as st

from dgcopt.coding import (
    VALUE_CODES,
    SparseCode,
    decode_rice,
    encode_rice,
)

INT32 = SparseCode("int32", "fp32")


def spread(count, numel, seed=0):
    return torch.tensor(sorted(random.Random(seed).sample(range(numel), count)), dtype=torch.int64)


def largest(values, count):
    """Positions of the largest magnitudes: int64, ascending."""
    return values.abs().topk(count, sorted=False).indices.sort().values


@st.composite
def positions(draw):
    """Sorted distinct positions: few or all, spread or in a heap at either end."""
    numel = draw(st.integers(1, 3000))
    count = draw(st.one_of(st.sampled_from([0, 1, numel]), st.integers(0, numel)))
    seed = draw(st.integers(0, 2**32))
    within = draw(st.integers(count, numel)) or 1
    offset = draw(st.integers(0, numel - within))
    return spread(count, within, seed) + offset, numel


def encoded(indices, count, numel):
    return encode_rice(indices, torch.tensor([len(indices)]), count, numel)[0]


def decoded(message, count, numel, rank):
    indices, counts = decode_rice(message.unsqueeze(0), count, numel, [rank])
    assert counts.tolist() == [len(indices)]
    return indices


CODES = st.builds(SparseCode, st.sampled_from(["rice", "int32"]), st.sampled_from(sorted(VALUE_CODES)))
