"""Whatever bytes arrive in place of those that were sent: an error of the library, or a step; in bounded memory."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dgcopt
import dgcopt.hvd as hvd
from dgcopt import DGCError
from dgcopt.coding import DENSE_CODES, VALUE_CODES, SparseCode, decode_rows, encode_rows
from dgcopt.coding.minmax import MinMaxUInt8
from dgcopt.coding.scaled import decode_scaled, encode_scaled
from dgcopt.coding.trits import put_trits, trit_bytes
from dgcopt.collectives import Link
from dgcopt.comm import SimulatedComm
from dgcopt.errors import CommError, PayloadError
from dgcopt.exchange.agreement import compare
from dgcopt.exchange.broadcast import _sent
from dgcopt.exchange.group_settings import GroupSettings
from dgcopt.exchange.link import measure_link
from dgcopt.kernels import BLOCK
from tests.support.damage import Damaged, Echo, at_most, damage
from tests.support.library import SETTINGS
from tests.support.worlds import Ranks, small_batch

ROOM = 2**28
"""Bytes that a damaged message may cost."""

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def attempt(what: Callable[[], object], seed: object) -> bool:
    """True if it raised an error of the library; fails for any other."""
    try:
        with at_most(ROOM):
            what()
    except DGCError as error:
        assert str(error)
        return True
    except Exception as error:
        raise AssertionError(f"{seed}: {type(error).__name__}: {error}") from error
    return False


def small() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5)).double()


class Words(nn.Module):
    """Sparse gradients, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.EmbeddingBag(40, 12, sparse=True, mode="sum", dtype=torch.float64)
        self.norm = nn.BatchNorm1d(12, dtype=torch.float64)
        self.out = nn.Linear(12, 5, dtype=torch.float64)

    def forward(self, rows: Tensor) -> Tensor:
        return self.out(self.norm(self.words((rows[:, :3].abs() * 10).long() % 40)))


def kinds(seen: list[str]) -> set[str]:
    """Labels without numbers and names."""
    return {re.sub(r"\(.*?\)|\b\d+\b", "", label).split(" of ", 1)[1].strip() for label in seen}


@pytest.mark.parametrize(
    "place", range(len(SETTINGS)), ids=lambda place: f"{place}-{type(SETTINGS[place][0]).__name__}"
)
def test_the_messages_of_a_step(place: int) -> None:
    compressor, given = SETTINGS[place]
    seen: list[str] = []
    for seed in range(2):
        ranks = Ranks(2, given.get("optimizer", SGD), small, nodes=2, compression=compressor, check_replicas_every=2)
        damaged = Damaged(ranks.comms, seed, every=(2, 7)[seed % 2], only=" round " if seed % 3 else "")
        damaged.on = False
        for step in range(2 * (seed % 2)):
            ranks.step(step)
        damaged.on = True
        attempt(lambda ranks=ranks: [ranks.step(step) for step in range(3)], (compressor, seed))
        seen += damaged.seen
    assert any(" round " in label for label in seen)


def test_the_messages_of_agreement_sparse_gradients_buffers_and_uneven_data() -> None:
    seen: list[str] = []
    for seed in range(72):
        ranks = Ranks(3, SGD, Words)
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
            dgcopt.sync_buffers(model, optimizer, how=("mean", "broadcast")[seed % 2])
        damaged = Damaged(ranks.comms, seed, every=(1, 3, 6, 12)[seed // 2 % 4])
        damaged.on = seed % 3 == 0

        def uneven(ranks: Ranks = ranks, damaged: Damaged = damaged) -> None:
            with dgcopt.join(ranks.optimizers[1]):
                ranks.step(0)
                damaged.on = True
            inputs, targets = small_batch()
            for step in range(2):
                for rank in (0, 2):
                    ranks.optimizers[rank].zero_grad()
                    loss = nn.functional.cross_entropy(ranks.models[rank](inputs[step::3]), targets[step::3])
                    loss.backward()
                for rank in (0, 2):
                    ranks.optimizers[rank].step()

        attempt(uneven, seed)
        seen += damaged.seen
    expected = {"order of gradients", "sparse gradients", "vote", "vote in detail", "learning rates", "buffers"}
    expected |= {"means of buffers", "ranks with data", "hash of initial state", "digests of parameters"}
    found = {re.sub(r"^optimizer\s+", "", kind) for kind in kinds(seen)}
    assert expected <= found, expected - found
    assert any(kind.startswith("sparse gradient ") for kind in found)


def test_objects() -> None:
    value = {
        "text": "x" * 200,
        (1, "k"): torch.arange(30),
        "empty": torch.zeros(0),
        "deep": [[({"z": torch.ones(3)},)]],
    }
    refused = 0
    for seed in range(600):
        comms = dgcopt.simulated_world(3)
        Damaged(comms, seed, every=(1, 2, 4)[seed % 3])

        def send(comms: list[SimulatedComm] = comms) -> None:
            dgcopt.simulate([_sent(value if comm.rank == 1 else None, 1, comm, "settings") for comm in comms], comms)

        refused += attempt(send, seed)
    assert refused > 300


HOSTILE = [
    b"[" * 100_000,
    b"null",
    b"[]",
    b'{"tree": ["value", 1]}',
    b'{"tree": ["value", {}], "bytes": []}',
    b'{"tree": 1, "bytes": []}',
    b'{"tree": ["tensor", [7, "float32", [1]]], "bytes": []}',
    b'{"tree": ["tensor", [-1, "float32", [1]]], "bytes": [4]}',
    b'{"tree": ["tensor", [0, "load", [1]]], "bytes": [4]}',
    b'{"tree": ["tensor", [0, "float32", [-1]]], "bytes": [4]}',
    b'{"tree": ["tensor", [0, "float32", [2]]], "bytes": [4]}',
    b'{"tree": ["dict", [[["list", []], ["value", 1]]]], "bytes": []}',
    b'{"tree": ["value", 1], "bytes": [-1]}',
    b'{"tree": ["value", 1], "bytes": [true]}',
    b'{"tree": ["value", 1], "bytes": 5}',
    b'{"tree": ["value", %s], "bytes": []}' % (b"9" * 5000),
    b"\xff\xfe\x00",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_an_object_that_is_none_names_its_sender(text: bytes) -> None:
    comm, data = SimulatedComm.__new__(SimulatedComm), torch.frombuffer(bytearray(text), dtype=torch.uint8)
    comm.rank = 0
    exchange = _sent(None, 3, comm, "settings")
    next(exchange)
    with at_most(ROOM), pytest.raises(CommError, match="rank 0: settings from rank 3 cannot be read: its text is"):
        exchange.send(torch.tensor([len(text)]))
        exchange.send(data)
        exchange.send(torch.zeros(4, dtype=torch.uint8))


def test_a_length_is_not_believed_before_its_bytes_arrive() -> None:
    comm = SimulatedComm.__new__(SimulatedComm)
    comm.rank = 0
    with at_most(ROOM):
        exchange = _sent(None, 3, comm, "settings")
        next(exchange)
        assert exchange.send(torch.tensor([2**62])).tensor.numel() <= 2**24
        exchange = _sent(None, 3, comm, "settings")
        next(exchange)
        with pytest.raises(CommError, match="settings from rank 3 cannot be read: its length is -5"):
            exchange.send(torch.tensor([-5]))
        agreement = compare(["lr: 0.1"], 0, "settings")
        next(agreement)
        agreement.send(torch.arange(64, dtype=torch.uint8).view(2, 32))
        with pytest.raises(CommError, match=f"rank 0: settings, from rank 1, has a length of {2**40}"):
            agreement.send(torch.tensor([[7], [2**40]]))


def test_agreement() -> None:
    refused = 0
    for seed in range(600):
        comms = dgcopt.simulated_world(3)
        Damaged(comms, seed, every=(1, 2, 4)[seed % 3])

        def agree(comms: list[SimulatedComm] = comms, seed: int = seed) -> None:
            lines = [[f"line {i}: {comm.rank if i == 7 and seed % 2 else 0}" for i in range(20)] for comm in comms]
            dgcopt.simulate([compare(lines[comm.rank], comm.rank, "settings") for comm in comms], comms)

        refused += attempt(agree, seed)
    assert refused > 300


def test_a_learning_rate_of_one_takes_over_what_a_scheduler_made_of_another() -> None:
    comms = dgcopt.simulated_world(2)
    optimizers = [torch.optim.SGD([torch.zeros(1)], lr=lr) for lr in (0.9, 1)]
    told = [GroupSettings(o).take_over(0, comm, comm.rank == 1) for o, comm in zip(optimizers, comms, strict=True)]
    dgcopt.simulate(told, comms)  # type: ignore[arg-type]
    assert optimizers[1].param_groups[0]["lr"] == 0.9


def test_the_speed_of_the_link() -> None:
    class Asks(dgcopt.NoCompression):
        asks_link = True

    for seed in range(100):
        comms = dgcopt.simulated_world(2)
        Damaged(comms, seed, every=1, only="slowest rank")
        for comm in comms:
            comm.link = None
        attempt(
            lambda c=comms: dgcopt.simulate([measure_link(comm, Asks(), torch.device("cpu")) for comm in c], c), seed
        )
        for comm in comms:
            assert comm.link is None or isinstance(comm.link, Link)


def test_the_collectives_of_hvd(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[[], object]] = [
        lambda: hvd.allgather(torch.ones(3, 2), process_set=some),
        lambda: hvd.alltoall(torch.ones(4, 2), [1, 3], process_set=some),
        lambda: hvd.alltoall(torch.ones(4, 2), process_set=some),
        lambda: hvd.allreduce(torch.ones(3), process_set=some),
        lambda: hvd.broadcast(torch.ones(3), 1, process_set=some),
        lambda: hvd.reducescatter(torch.ones(3, 2), process_set=some),
        lambda: hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), "rows", hvd.Sum, some)(),
    ]
    some = hvd.ProcessSet([0, 1])
    refused = 0
    for seed in range(500):
        comm = Echo()
        monkeypatch.setattr("dgcopt.hvd.operations.comm_of", lambda process_set, comm=comm: comm)
        Damaged([comm], seed, every=2)
        refused += attempt(random.Random(seed).choice(calls), seed)
    assert refused > 100


def trits(packed: Tensor, count: int) -> Tensor:
    out = torch.zeros(count)
    put_trits(packed, count, torch.ones(1), torch.zeros(-(-count // BLOCK), dtype=torch.int64), out, "set", 5)
    return out


SPARSE = [SparseCode(indices, values) for indices in ("rice", "int32") for values in VALUE_CODES]


def test_every_code() -> None:
    """What is decoded has the promised length and range, and an error names the sender."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    refused = 0

    def arrives(message: Tensor) -> Tensor:
        message = message.clone()
        for _ in range(rng.choice((1, 1, 3))):
            damage(message, rng)
        return message

    def decoded(decode: Callable[[], Tensor], count: int) -> None:
        nonlocal refused
        try:
            with at_most(ROOM):
                assert decode().numel() == count
        except PayloadError as error:
            refused += 1
            assert "rank" in str(error) and "5" in str(error)

    for _ in range(12):
        count, numel = rng.randrange(1, 90), rng.choice((97, 1000, 2**20))
        values = torch.randn(count, generator=generator)
        indices = torch.randperm(numel, generator=generator)[:count].sort().values
        for sparse in SPARSE:
            message = arrives(sparse.encode(indices, values, numel)[0])
            try:
                with at_most(ROOM):
                    places, theirs, _ = sparse.decode_rows(message.unsqueeze(0), count, numel, [5])
            except PayloadError as error:
                refused += 1
                assert "rank 5" in str(error)
            else:
                assert len(places) == len(theirs) <= count
                assert not len(places) or (places[0] >= 0 and places[-1] < numel and bool((places.diff() > 0).all()))
        for code in (*VALUE_CODES.values(), *DENSE_CODES.values()):
            message = arrives(encode_rows(values.unsqueeze(0), code)[0][0])
            decoded(lambda m=message, c=code, count=count: decode_rows(m.unsqueeze(0), count, c, [5])[0], count)
        minmax = MinMaxUInt8(count)
        message = arrives(minmax.encode(values.unsqueeze(0)))
        decoded(lambda m=message, code=minmax: code.decode(m, [5]), count)
        message = arrives(encode_scaled(values.abs(), torch.arange(9, dtype=torch.uint8)))
        decoded(lambda m=message, count=count: decode_scaled(m, count, 9, 5)[0], count)
        packed = arrives(torch.full((trit_bytes(count),), 121, dtype=torch.uint8))
        decoded(lambda m=packed, count=count: trits(m, count), count)
    assert refused > 100
