"""One rank's values reach all ranks as they are, and what cannot be sent is an error on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dgcopt
from dgcopt import ConfigError
from dgcopt.comm import LocalComm
from dgcopt.exchange.broadcast import _sent, broadcast_object, broadcast_optimizer_state
from tests.support.worlds import same, together

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    return (torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 3).to(
        draw(st.sampled_from(DTYPES))
    )


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors()
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.text(), st.integers())
trees = st.recursive(
    leaves, lambda t: st.lists(t, max_size=4) | st.dictionaries(keys, t, max_size=4) | st.tuples(t, t), max_leaves=12
)


@given(value=trees, size=st.integers(1, 4), data=st.data())
def test_any_tree_arrives_as_it_was(value: Any, size: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    outcomes = together(size, lambda comm: _sent(value if comm.rank == root else "not looked at", root, comm, "tree"))
    assert all(same(outcome, value) for outcome in outcomes)


def test_floats_survive() -> None:
    values = [math.inf, -math.inf, math.nan, -0.0, 5e-324, 0.1, 1.7976931348623157e308]
    assert same(broadcast_object(values, comm=LocalComm()), values)


def test_views_arrive_as_what_they_show() -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    value = [conjugate, conjugate.imag, torch.arange(6).view(2, 3).t(), torch.zeros(1).expand(4)]
    value.append(torch.arange(2.0)[::2])  # contiguous by any strides
    assert conjugate.is_conj() and conjugate.imag.is_neg()
    got = broadcast_object(value, comm=LocalComm())
    assert [tensor.tolist() for tensor in got] == [tensor.tolist() for tensor in value]


def test_received_tensors_are_copies() -> None:
    value = {"t": torch.zeros(3), "view": torch.arange(6.0).view(2, 3).t(), "p": torch.nn.Parameter(torch.ones(2))}
    for got in together(2, lambda comm: _sent(value, 0, comm, "tree")):
        assert torch.equal(got["view"], value["view"]) and type(got["p"]) is Tensor
        got["t"] += 1
    assert value["t"].sum() == 0


cycle: list[Any] = []
cycle.append(cycle)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", lambda: 0, torch.float32, [torch.eye(3).to_sparse()], cycle, {"deep": ({"x": 1j},)}],
    ids=lambda value: type(value).__name__,
)
def test_unsendable_values_are_an_error_on_every_rank(value: Any) -> None:
    outcomes = together(3, lambda comm: _sent(value if comm.rank == 1 else None, 1, comm, "settings"))
    assert all(isinstance(error, ConfigError) for error in outcomes), outcomes
    assert {str(error) for error in outcomes} == {str(outcomes[0])}
    assert "settings of rank 1 cannot be sent" in str(outcomes[0])
    with pytest.raises(ConfigError, match="object of rank 0 cannot be sent"):
        broadcast_object(value, comm=LocalComm())


def test_a_root_that_does_not_exist() -> None:
    with pytest.raises(dgcopt.CommError, match="root 3"):
        broadcast_object(1, 3, LocalComm())


def test_subclasses_arrive_as_what_they_are_subclasses_of() -> None:
    value = {"size": torch.Size([2, 3]), "state": torch.nn.Linear(1, 1).state_dict()}
    got = broadcast_object(value, comm=LocalComm())
    assert type(got["size"]) is tuple and type(got["state"]) is dict and got["size"] == (2, 3)


def test_optimizer_state_alone_is_left_as_it_is() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["odd"] = object()
    broadcast_optimizer_state(optimizer, comm=LocalComm())
    assert optimizer.param_groups[0]["lr"] == 0.1
