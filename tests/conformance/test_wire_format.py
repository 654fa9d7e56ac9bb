"""docs/wire-format.md: the decoder on the page reads the messages, votes and checkpoints that the library writes."""

from __future__ import annotations

import hashlib
import re
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dgcopt
from dgcopt.checkpoint import saving
from dgcopt.collectives import AllGather, AllReduce, AllToAll, Collective, watched
from dgcopt.compressors import Compressor
from dgcopt.exchange.vote import Ballot, Touch, checksum, fingerprint, vote
from tests.support.worlds import Ranks, bucket_of, context_of, raw, together

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "wire-format.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SIZES = (1, 63, 64, 65, 700, 5000)
RANKS = 3
F = np.float32


@pytest.fixture(scope="module")
def page() -> SimpleNamespace:
    names: dict[str, Any] = {}
    exec(CODE, names)
    return SimpleNamespace(**names)


class Bucket:
    """One step of a compressor on simulated ranks: its messages, `[collective][rank]`, and the result."""

    def __init__(self, compressor: Compressor, ranks: int = RANKS, kind: object = None, sizes=SIZES) -> None:
        generator = np.random.default_rng(3)
        bucket = bucket_of([torch.zeros(size) for size in sizes], kind)
        self.segments, self.numel, self.ranks = bucket.segments, bucket.numel, ranks
        self.contexts = [context_of(bucket, rank, ranks) for rank in range(ranks)]
        self.sent: list[list[Collective]] = [[] for _ in range(ranks)]
        exchanges = []
        for rank, context in enumerate(self.contexts):
            flat = bucket.empty()
            for place, segment in enumerate(self.segments):
                scale = 10.0 ** (place - 2)
                values = (generator.standard_normal(segment.numel) * scale).astype(F)
                flat[segment.start : segment.stop] = torch.from_numpy(values)
            exchanges.append(watched(compressor.exchange(flat, context), self.sent[rank].append))
        results = dgcopt.simulate(exchanges)
        results = [context.dense(result) for context, result in zip(self.contexts, results, strict=True)]
        assert all(raw(result) == raw(results[0]) for result in results)
        self.result = results[0].numpy()

    def messages(self, collective: int, kind: type[Collective] = AllGather) -> list[np.ndarray]:
        assert all(isinstance(sent[collective], kind) for sent in self.sent)
        return [sent[collective].tensor.numpy() for sent in self.sent]

    def place(self, block: int | None = None) -> np.ndarray:
        """The number of the scale of each element: one per tensor, or per `block` of a tensor."""
        found, count = np.zeros(self.numel, int), 0
        stops = [segment.start for segment in self.segments[1:]] + [self.numel]
        for segment, stop in zip(self.segments, stops, strict=True):
            within = np.arange(stop - segment.start) // block if block else np.zeros(stop - segment.start, int)
            found[segment.start : stop] = count + within
            count = found[stop - 1] + 1
        return found

    def assert_is(self, result: np.ndarray, whole: bool = False) -> None:
        """Compare every bit, of zeros the magnitude; without gaps, which nobody reads, unless `whole`."""
        assert result.dtype == F
        for span in [slice(None)] if whole else [slice(one.start, one.stop) for one in self.segments]:
            assert (result[span] + F(0)).tobytes() == (self.result[span] + F(0)).tobytes()


def count_of(bucket: Bucket, ratio: float) -> int:
    return sum(-(-int(segment.numel * ratio * 1000) // 1000) for segment in bucket.segments)


@pytest.mark.parametrize("indices", ["int32", "rice"])
@pytest.mark.parametrize("values", ["fp64", "fp32", "fp16", "bf16", "int8", "int4", "int2", "sign"])
@pytest.mark.parametrize("ratio", [0.001, 0.125])
def test_sparse_messages(page: SimpleNamespace, indices: Any, values: Any, ratio: float) -> None:
    bucket = Bucket(dgcopt.TopK(ratio, values=values, indices=indices))
    count, total = count_of(bucket, ratio), np.zeros(bucket.numel, F)
    for message in bucket.messages(0):
        positions, decoded = page.sparse(message, count, bucket.numel, indices, values)
        assert len(positions) == count or indices == "rice"
        total[positions] += (decoded.astype(F) / F(RANKS)).astype(F)
    bucket.assert_is(total, whole=True)


def test_clustered_coordinates_that_do_not_fit(page: SimpleNamespace) -> None:
    """The message then tells of fewer coordinates than it has room for."""
    numel, count = 64 * 1000, 800
    positions = torch.cat((torch.arange(0, 799 * 64, 64) + 1, torch.tensor([numel - 1])))[-count:]
    values = torch.linspace(1, 2, count)
    code = dgcopt.coding.SparseCode("rice", "int2")
    for clustered in (torch.arange(count), positions):
        sent = code.send(clustered, values, numel, dgcopt.coding.Checks())
        at, decoded = page.sparse(sent.message.numpy(), count, numel, "rice", "int2")
        fits = torch.ones(count, dtype=torch.bool) if sent.fits is None else sent.fits.bool()
        assert at.tolist() == sent.indices[fits].tolist()
        assert decoded.tobytes() == sent.values[fits].numpy().tobytes()


def test_lengths(page: SimpleNamespace) -> None:
    for numel in (1, 64, 1000, 25_557_032):
        for count in {1, numel // 1000, numel // 100, numel // 2, numel} - {0}:
            assert page.rice_length(count, numel)[1] == dgcopt.coding.rice_bytes(count, numel)


@pytest.mark.parametrize("values", ["fp32", "int2"])
def test_messages_to_and_from_owners(page: SimpleNamespace, values: Any) -> None:
    ratio = 0.05
    bucket = Bucket(dgcopt.TopK(ratio, values=values, reduce="owner", keep=0.7))
    k, length = count_of(bucket, ratio), 64 * -(-bucket.numel // (64 * RANKS))
    mean = k / RANKS
    room = min(k, int(np.ceil(mean + 2 * np.sqrt(mean * (1 - 1 / RANKS)))))
    forwarded = min(length, int(np.ceil(0.7 * k / RANKS)))
    to_owners, from_owners = bucket.messages(0, AllToAll), bucket.messages(1)
    total = np.zeros(bucket.numel, F)
    for owner in range(RANKS):
        sums = np.zeros(length, F)
        for message in to_owners:
            rows, decoded = page.sparse(message[owner], room, length, "rice", values, to_owner=True)
            sums[rows] += decoded
        rows, decoded = page.sparse(from_owners[owner], forwarded, length, "rice", values, to_owner=True)
        assert abs(sums[rows]).min() >= np.sort(abs(sums))[-forwarded], "the largest sums"
        if values == "fp32":
            assert decoded.tobytes() == sums[rows].tobytes()
        turn = (2654435761 * rows % 2**32) // 2**16
        total[rows * RANKS + (owner - turn) % RANKS] = decoded / F(RANKS)
    bucket.assert_is(total, whole=True)


@pytest.mark.parametrize("vectors", ["fp32", "bf16", "int8", "int4", "int2", "sign"])
@pytest.mark.parametrize("reduce", ["gather", "owner"])
def test_dense_messages(page: SimpleNamespace, vectors: Any, reduce: Any) -> None:
    bucket = Bucket(dgcopt.DGC(0.1, vectors=vectors, reduce=reduce), kind="vector")
    if reduce == "gather":
        parts = [page.values(message, bucket.numel, vectors, page.VECTORS) for message in bucket.messages(0)]
        total = sum((part.astype(F) / F(RANKS) for part in parts), np.zeros(bucket.numel, F))
    else:
        length = 64 * -(-bucket.numel // (64 * RANKS))
        parts = [page.values(message, length, vectors, page.VECTORS) for message in bucket.messages(1)]
        total = np.concatenate(parts)[: bucket.numel].astype(F) / F(RANKS)
    bucket.assert_is(total)


@pytest.mark.parametrize(
    "compressor",
    [
        *(dgcopt.QSGD(levels=levels, block=block) for levels in (1, 7, 100) for block in (128, None)),
        dgcopt.TernGrad(),
        dgcopt.Natural(),
        dgcopt.EFSignSGD(),
        dgcopt.OneBit(),
    ],
    ids=repr,
)
def test_quantised_messages(page: SimpleNamespace, compressor: Any) -> None:
    bucket, total = Bucket(compressor), np.zeros(0, F)
    place = bucket.place(getattr(compressor, "block", None))
    for rank, message in enumerate(bucket.messages(0)):
        decoded = page.quantised(message, place, type(compressor).__name__, getattr(compressor, "levels", 7))
        total = total + decoded if rank else decoded
    bucket.assert_is(total.astype(F) / F(RANKS))


def test_majority_of_signs(page: SimpleNamespace) -> None:
    bucket = Bucket(dgcopt.SignSGD(), ranks=4)
    part = -(-bucket.numel // (4 * 8)) * 8
    ballots, counted = bucket.messages(0, AllToAll), bucket.messages(1)
    result = np.concatenate([page.trits(message.astype(int), part) for message in counted])[: bucket.numel]
    minuses = sum(page.fields(np.ascontiguousarray(ballot).reshape(-1), 4 * part, 1) for ballot in ballots)
    assert (np.sign(4 - 2 * minuses)[: bucket.numel] == result).all()
    bucket.assert_is(result.astype(F))


def test_min_max_chunks(page: SimpleNamespace) -> None:
    bucket = Bucket(dgcopt.ByteGrad())
    arrived, means = bucket.messages(0, AllToAll), bucket.messages(1)
    for owner in range(RANKS):
        mean = sum(page.minmax(message[owner]) for message in arrived) / F(RANKS)
        low, high = means[owner][:8].view("<f4")
        assert low == mean.min() and high == mean.max()
    elements = np.concatenate([page.minmax(message) for message in means])
    spans, done = np.zeros(bucket.numel, F), 0
    for segment in bucket.segments:
        spans[segment.start : segment.stop] = elements[done : done + segment.numel]
        done += segment.numel
    bucket.assert_is(spans)


def cast(ballots: list[Ballot]) -> list[list[Collective]]:
    sent: list[list[Collective]] = [[] for _ in ballots]
    dgcopt.simulate(
        [watched(vote(one, range(len(ballots)), "vote"), mine.append) for one, mine in zip(ballots, sent, strict=True)]
    )
    return sent


def test_votes(page: SimpleNamespace) -> None:
    names, used = ["fc.weight", "fc.bias"], [True, False]
    assert checksum(names) == zlib.crc32(b"fc.weight\nfc.bias")
    hashed = hashlib.blake2b(bytes([1, 0]), digest_size=8).digest()
    calm = Ballot(True, True, 7, checksum(names), 3, settings=5, own=Touch.CHANGED, used=fingerprint(used))
    sent = cast([calm, calm])
    words = [mine[0].tensor.numpy() for mine in sent]
    assert all(len(mine) == 1 and isinstance(mine[0], AllReduce) and mine[0].op == "max" for mine in sent)
    assert words[0].dtype == "<i4"
    place = b"".join(number.to_bytes(4, "little") for number in (7, checksum(names), 5)) + bytes([1])
    assert words[0][0].tobytes() == zlib.crc32(place).to_bytes(4, "little")
    assert words[0][1:3].tobytes() == hashed
    assert page.verdict(np.maximum(*words)) == {"in detail": False, "same gradients": True, "launched": 3}

    other = Ballot(True, False, 7, 1, 4, used=1, averaged=Touch.KEPT, prepared=False)
    sent = cast([calm, other])
    told = page.verdict(np.maximum(*(mine[0].tensor.numpy() for mine in sent)))
    assert told == {"in detail": True, "same gradients": False, "launched": 4} and len(sent[0]) == 2
    for one, mine in zip((calm, other), sent, strict=True):
        decoded = page.ballot(mine[1].tensor.numpy())
        assert decoded == {name: getattr(one, name) for name in decoded}


def test_words_of_a_vote(page: SimpleNamespace) -> None:
    """The place of each flag."""
    calm = Ballot(True, True, 7, 1, 3)
    changes = {7: {"stale": True}, 8: {"prepared": False}, 9: {"complete": False}, 10: {"final": False}}
    rows = {place: Ballot(**vars(calm) | change).summary().tolist() for place, change in changes.items()}
    base = calm.summary().tolist()
    assert len(base) == 11 and base[7:] == [0, 0, 0, 0]
    for place, row in rows.items():
        assert row == [*base[:place], 1, *base[place + 1 :]]


def test_checkpoints(page: SimpleNamespace, tmp_path: Path) -> None:
    ranks = Ranks(2, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), compression=dgcopt.DGC(0.1))
    for seed in range(3):
        ranks.step(seed)
    states = [{"optimizer": optimizer.state_dict()} for optimizer in ranks.optimizers]
    (folder, _) = together(2, lambda comm: saving._save(tmp_path, states[comm.rank], 3, comm, 2))
    step, files = page.checkpoint(folder)
    assert step == 3 and sorted(path.name for path in folder.iterdir()) == ["manifest.json", *[f.name for f in files]]
    keys = re.findall(r"^\| `(.*?)` \|", PAGE[PAGE.index('has an entry `"dgcopt"`') :], re.MULTILINE)
    for rank, file in enumerate(files):
        entry = torch.load(file, weights_only=True)["optimizer"]["dgcopt"]
        named = {key for words in keys for key in words.split("`, `")}
        assert set(entry) == named, "the keys on the page"
        assert (entry["format"], entry["rank"], entry["world_size"], entry["step"]) == (1, rank, 2, 3)
        sums = entry["memory"]["residual"]
        assert {name: tuple(one.shape) for name, one in sums.items()}["0.weight"] == (30, 12)
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"x")
    with pytest.raises(AssertionError):
        page.checkpoint(folder)
