"""Checksums on the simulated wire: clean messages pass unchanged, a flipped bit is found and names its sender."""

import pytest
import torch

import dgcopt
from dgcopt.collectives import AllGather, AllReduce, AllToAll, Barrier, Broadcast, ReduceScatter, SendRecv
from dgcopt.errors import PayloadError

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.int8,
    torch.bool, torch.complex64,
)  # fmt: skip
SIZE = 3
MESSAGES = {
    "AllGather": lambda x, rank, **where: AllGather(x, **where),
    "AllToAll": lambda x, rank, **where: AllToAll(x, **where),
    "Broadcast": lambda x, rank, **where: Broadcast(x, root=1, **where),
    "SendRecv": lambda x, rank, **where: SendRecv(x, to=(rank + 1) % SIZE, source=(rank - 1) % SIZE, **where),
}


def one(collective):
    return (yield collective)


def compare(make):
    """Run a collective with and without checksums; returns what each rank got with them."""
    plain, safe = (
        dgcopt.simulate(
            [one(make(rank)) for rank in range(SIZE)], dgcopt.simulated_world(SIZE, nodes=SIZE, checksums=on)
        )
        for on in (False, True)
    )
    for ours, theirs in zip(safe, plain, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and torch.equal(ours, theirs)
    return safe


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", ["world", "across", "control", "node"])
def test_clean_messages_pass_unchanged(dtype, group):
    for shape in ((SIZE, 5), (SIZE,), (SIZE, 0), (SIZE, 3, 2)) if group != "node" else ((1, 5), (1,), (1, 0)):
        torch.manual_seed(1)
        data = torch.randint(0, 2 if dtype == torch.bool else 100, (SIZE, *shape)).to(dtype)
        for kind, make in MESSAGES.items():
            if group == "node" and kind != "AllGather":
                continue  # one rank alone: nobody to be root or peer
            compare(lambda rank, make=make, data=data: make(data[rank].clone(), rank, group=group, label="it"))
        if dtype not in (torch.bool, torch.complex64):
            compare(lambda rank, data=data: AllReduce(data[rank].clone(), op="sum", group=group))
            compare(lambda rank, data=data: ReduceScatter(data[rank].clone(), op="max", group=group))


def test_odd_shapes():
    compare(lambda rank: AllGather(torch.tensor(float(rank))))
    compare(lambda rank: AllGather(torch.arange(2.0)[::2]))  # contiguous by any strides
    compare(lambda rank: AllReduce(torch.arange(2)[::2], op="max"))
    compare(lambda rank: AllReduce(torch.tensor(float(rank))))
    compare(lambda rank: AllReduce(torch.zeros(0)))
    compare(lambda rank: AllToAll(torch.arange(24).view(4, 2, 3).permute(2, 1, 0) + rank))
    compare(lambda rank: SendRecv(torch.full((2,), rank), to=0 if rank == 2 else None, source=2 if rank == 0 else None))
    compare(lambda rank: Barrier())


def flip_on(comm, method):
    """From now on, one bit of what this comm sends (`start`) or is given (`wait`) is not what it should be."""
    original = getattr(comm, method)

    def broken(subject, *rest):
        if method == "start":
            subject.tensor.view(-1).view(torch.uint8)[2] ^= 16
            return original(subject, *rest)
        result = original(subject, *rest)
        result.view(-1).view(torch.uint8)[2] ^= 16
        return result

    setattr(comm, method, broken)


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("group", ["world", "across"])
def test_a_flipped_bit_is_found_and_names_its_sender(kind, group):
    comms = dgcopt.simulated_world(SIZE, nodes=SIZE, checksums=True)
    flip_on(comms[1], "start")
    what = r"rank \d: {}\[3x4 float32\] of what it carries arrived damaged from rank 1{}: .*checkpoint".format(
        kind, "" if group == "world" else " of group across"
    )
    with pytest.raises(PayloadError, match=what):
        dgcopt.simulate(
            [one(MESSAGES[kind](torch.ones(SIZE, 4), r, group=group, label="what it carries")) for r in range(SIZE)],
            comms,
        )


def test_a_flipped_bit_in_a_reduce_scatter_names_its_sender():
    """Each rank gets another sum, so that sums cannot be compared: the summands travel with checksums."""
    comms = dgcopt.simulated_world(SIZE, checksums=True)
    flip_on(comms[1], "start")
    exchanges = [one(ReduceScatter(torch.ones(SIZE, 4), label="shards")) for _ in range(SIZE)]
    with pytest.raises(PayloadError, match=r"of shards arrived damaged from rank 1"):
        dgcopt.simulate(exchanges, comms)


def test_a_sum_that_is_not_the_same_everywhere_is_found_by_every_rank():
    for looks_on in range(SIZE):
        comms = dgcopt.simulated_world(SIZE, checksums=True)
        exchanges = [dgcopt.comm.lowered(one(AllReduce(torch.ones(4), label="sums")), comm) for comm in comms]
        handles = [comm.start(exchange.send(None)) for comm, exchange in zip(comms, exchanges, strict=True)]
        results = [comm.wait(handle) for comm, handle in zip(comms, handles, strict=True)]
        results[2][3] += 2**-20
        gathers = [comm.start(e.send(r)) for comm, e, r in zip(comms, exchanges, results, strict=True)]
        with pytest.raises(PayloadError, match=rf"rank {looks_on}: the result of AllReduce.* sums .*rank\(s\) 2 have"):
            exchanges[looks_on].send(comms[looks_on].wait(gathers[looks_on]))


def test_errors_use_the_label_under_which_a_message_was_sent():
    """An engine labels what an exchange yields."""
    (comm,) = dgcopt.simulated_world(1, checksums=True)
    exchange = dgcopt.comm.lowered(one(Broadcast(torch.ones(2))), comm)
    sent = exchange.send(None)
    sent.label = "bucket 3 round 0"
    with pytest.raises(PayloadError, match=r"Broadcast\[2 float32\] of bucket 3 round 0 arrived damaged from rank 0"):
        exchange.send(sent.tensor ^ 1)


def test_nans_and_zeros_of_either_sign_are_no_damage():
    """A gradient that overflowed must not be taken for a broken wire: hardware keeps either operand's NaN."""
    values = torch.tensor([0x7FC00000, -0x400000, 0, -(2**31)], dtype=torch.int32).view(torch.float32)
    swapped = values[[1, 0, 3, 2]]
    assert not torch.equal(values.view(torch.int32), swapped.view(torch.int32))
    comms = dgcopt.simulated_world(2, checksums=True)
    exchanges = [dgcopt.comm.lowered(one(AllReduce(values.clone())), comm) for comm in comms]
    for exchange in exchanges:
        exchange.send(None)
    pending = [e.send(r) for e, r in zip(exchanges, (values, swapped), strict=True)]
    assert torch.equal(pending[0].tensor, pending[1].tensor)


def test_run_and_drive_are_protected_where_checksums_are_on():
    for on, nbytes in ((False, 8), (True, 12)):
        comms, sizes = dgcopt.simulated_world(2, checksums=on), []

        def meet(sizes=sizes, other=comms[1], start=comms[0].start):
            """Rank 1 sends what rank 0 does, whatever its form."""

            def both(collective):
                sizes.append(collective.nbytes)
                other.start(AllGather(collective.tensor.clone()))
                return start(collective)

            return both

        comms[0].start = meet()
        for result in (comms[0].run(AllGather(torch.ones(2))), comms[0].drive(one(AllGather(torch.ones(2))))):
            assert torch.equal(result, torch.ones(2, 2))
        assert sizes == [nbytes] * 2


def test_lazy_conjugates_and_negations():
    wave = torch.tensor([1 + 2j, 3j, 4.0])
    for lazy in (wave.conj(), wave.conj().imag):
        for make in MESSAGES.values():
            compare(lambda rank, make=make, lazy=lazy: make(lazy, rank))
