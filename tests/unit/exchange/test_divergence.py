"""Digests of tensors: equal for equal bits, dtypes and shapes only, and read from a device once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dgcopt
from dgcopt import kernels
from dgcopt.exchange.divergence import SMALL, digests, replicas
from dgcopt.kernels import hash_of
from tests.support.oracle import native, specification
from tests.support.worlds import together


def digest(*tensors: Tensor) -> list[int]:
    return digests({"w": tensors})[0].tolist()


@settings(max_examples=60, deadline=None)
@given(
    nbytes=st.one_of(
        st.integers(1, 40), st.integers(SMALL - 3, SMALL + 3), st.sampled_from([16384, 150_001, 2_100_000])
    ),
    seed=st.integers(0, 2**20),
    data=st.data(),
)
def test_every_bit_and_every_place_counts(nbytes, seed, data):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(256, (nbytes + 1,), dtype=torch.uint8, generator=generator)
    x, place = whole[1:], data.draw(st.integers(0, nbytes - 1))
    flipped, rolled = x.clone(), x.roll(4)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    assert not kernels.instructions() or torch.equal(native.hash_of(x), specification.hash_of(x))
    assert digest(x) == digest(x.clone())  # wherever it lies in memory
    assert digest(x) != digest(flipped)
    assert torch.equal(x, rolled) == (digest(x) == digest(rolled))
    assert digest(x) != digest(torch.cat((x, x.new_zeros(1))))


@pytest.mark.parametrize("numel", [1, 5000, 300_000])
def test_signs_dtypes_shapes_and_order(numel):
    x = torch.randn(numel, 2)
    both = x.clone()
    both[-1] *= -1  # two signs: the highest bit of two words
    others = [both, x.view(2, -1), x.view(torch.int32), torch.zeros_like(x), x.flip(1), x.half(), x[:, :1]]
    found = [digest(each) for each in (x, *others)]
    assert len({*map(tuple, found)}) == len(found)
    assert digest(x) == digest(x.T.contiguous().T) == digest(x.clone())
    assert digest(x, both) != digest(both, x)
    assert digests({"a": [x], "b": [both, x]}).tolist() == [digest(x), digest(both, x)]
    assert digest(x.to_sparse()) == digest(x)
    assert digest(x > 0) != digest(x <= 0)


def test_no_two_of_many_that_differ_in_little_have_one_hash():
    x = torch.zeros(1000, 5000, dtype=torch.uint8)
    x.view(-1)[torch.arange(1000) * 5001] = 128  # one highest bit each, at another place
    assert len({tuple(hash_of(row).tolist()) for row in x}) == 1000


def test_a_device_is_read_once(monkeypatch):
    reads = []
    cpu = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda x: reads.append(x.device) or cpu(x))
    tensors = {f"w{i}": [torch.randn(7 + i * 1000), torch.ones(())] for i in range(20)}
    with_bytes = digests(tensors)
    assert (
        len([device for device in reads if device.type != "cpu"]) == 0 and len(reads) == 1 + 40
    )  # as bytes, from there
    assert with_bytes.shape == (20, 16) and digests({}).shape == (0, 16)


def test_parameters_on_the_meta_device() -> None:
    """Those of an optimizer that was made before `to_empty()`: torch's "Cannot copy out of meta tensor" named none."""
    weights = {"real": [torch.ones(2)], "unreal": [torch.ones(2, device="meta")]}
    for error in together(2, lambda comm: replicas(weights, comm, 0, "raise")):
        assert "parameter 'unreal' is on the meta device and has no values" in str(error)
    with pytest.raises(dgcopt.ConfigError, match="parameter 'unreal' is on the meta device"):
        dgcopt.broadcast_parameters((name, tensor) for name, (tensor,) in weights.items())


def test_shards_that_differ_are_told_how_torch_loads_shards():
    """check_replicas, the remedy for whole parameters, refuses DTensors."""
    comms = [comm.across_replicas([(0, 1), (2, 3)]) for comm in dgcopt.simulated_world(4)]
    exchanges = [replicas({"w": [torch.full((2,), rank // 2)]}, comm, None, "raise") for rank, comm in enumerate(comms)]
    with pytest.raises(dgcopt.DivergenceError, match=r"set_model_state_dict.*broadcast_from_rank0=True"):
        dgcopt.simulate(exchanges, comms)


def test_one_element_has_the_digest_of_its_value_by_any_strides():
    lazy, strided = torch.tensor([1 + 2j]).conj().imag, torch.tensor([-2.0, 0.0])[::2]
    assert lazy.is_neg() and strided.stride() == (2,)
    for odd in (lazy, strided):
        assert torch.equal(digests({"a": [odd]}), digests({"a": [torch.tensor([-2.0])]}))
