"""Every training loop that people write, against the same loop in one process on the whole batch.

A loop is a generator: it yields where, in a simulated world, every rank must have come before any may go on. Real
ranks run straight through.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import dgcopt
from dgcopt import DGC, Comm, Warmup
from dgcopt.collectives import AllReduce, Exchange
from dgcopt.data import LoadBalancingDistributedSampler
from tests.support.wires import HOROVOD, WIRES, only, share

from .persistence import shared_folder
from .training import TINY, assert_close, batch, fingerprint, make_model, memory_of, tensors_in

Loop = Generator[None, None, None]

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.01)
COMPRESSIONS: dict[str, Any] = {
    "dense": None,
    "DGC at ratio 1": DGC(1.0, overlap=True),
    "DGC": DGC(0.1, overlap=True, values="fp64"),
}


class Halves(dgcopt.Compressor):
    """Sends half of what it has, and keeps its memory in place, as a compressor of a user's own would."""

    def exchange(self, grad: Tensor, ctx: dgcopt.Context) -> Exchange:
        residual = ctx.memory.remember("residual", grad).add_(grad)
        grad.copy_(residual).mul_(0.5)
        residual.sub_(grad)
        return (yield AllReduce(grad, op=ctx.op))


def wrap(optimizer: torch.optim.Optimizer, model: nn.Module, comm: Comm, compression: Any = None, **more: Any) -> Any:
    return dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), compression, comm=comm, **{**TINY, **more})


class Pair:
    """The same training twice: on the whole batch with the bare optimizer, and on this rank's rows with ours."""

    def __init__(self, comm: Comm, make: Callable[..., Any] = SGD, compression: Any = None, **more: Any) -> None:
        self.comm = comm
        self.models = (make_model(), make_model())
        self.bare = make(self.models[0].parameters())
        self.ours = wrap(make(self.models[1].parameters()), self.models[1], comm, compression, **more)
        self.optimizers = (self.bare, self.ours)

    def loss(self, which: int, step: int, micro: int = 0) -> Tensor:
        x, y = batch(step, micro, self.comm if which else None)
        return mse_loss(self.models[which](x), y)

    def both(self) -> Iterator[tuple[int, nn.Module, Any]]:
        return iter([(which, self.models[which], self.optimizers[which]) for which in (0, 1)])

    def assert_equal(self, what: str) -> None:
        assert_close(list(self.models[1].parameters()), list(self.models[0].parameters()), 1e-9, what)


# -- accumulation ----------------------------------------------------------------------------------------------------


def passes_vary(comm: Comm) -> Loop:
    """One, two or three backward passes before a step, announced or not, and a short last window."""
    announcements = ((1, [1, 2, 2, 3, 1, 3, 2]), (3, [3, 3, 2, 3, 1]))
    cases = itertools.product(("dense", "DGC at ratio 1"), announcements, (True, False))
    for compression, (announced, windows), set_to_none in share(comm, cases):
        pair = Pair(comm, compression=COMPRESSIONS[compression], backward_passes_per_step=announced)
        for step, passes in enumerate(windows):
            for which, _, optimizer in pair.both():
                optimizer.zero_grad(set_to_none=set_to_none)
                for micro in range(passes):
                    pair.loss(which, step, micro).backward()
            yield
            for optimizer in pair.optimizers:
                optimizer.step()
            yield
        pair.assert_equal(f"{compression}, {announced} announced, set_to_none={set_to_none}")
        telemetry = pair.ours.telemetry
        assert telemetry.steps == len(windows) * (comm.size > 1), "not one exchange per step"
        assert telemetry.repeated <= 2 * (announced == 1), f"{telemetry.repeated} exchanges were repeated"


def backward_in_evaluation(comm: Comm) -> Loop:
    """A backward pass whose gradients are thrown away, between two steps."""
    pair = Pair(comm, compression=DGC(1.0, overlap=True))
    for step in range(6):
        for which, _, optimizer in pair.both():
            if step in (2, 4):
                pair.loss(which, step, 5).backward()
            optimizer.zero_grad()
            pair.loss(which, step).backward()
        yield
        for optimizer in pair.optimizers:
            optimizer.step()
        yield
    pair.assert_equal("a backward pass in evaluation")
    assert pair.ours.telemetry.repeated == 1 * (comm.size > 1), "the second one should have found it careful"


def a_count_that_is_wrong(comm: Comm) -> Loop:
    """Said to be 2, but a third pass comes: refused with the name, the count and the fix, on every rank alike."""
    pair = Pair(comm, backward_passes_per_step=2)
    for micro in (0, 1):
        pair.loss(1, 0, micro).backward()
    try:
        pair.loss(1, 0, 2).backward()
    except RuntimeError as error:
        for words in (f"rank {comm.rank}", "computed 3 times", "backward_passes_per_step is 2", "no_sync()", "'4."):
            assert words in str(error), f"does not say {words!r}: {error}"
    else:
        raise AssertionError("a third pass was accepted")
    yield


# -- hooks written for DDP --------------------------------------------------------------------------------------------


def gathered_mean(group: Any, bucket: Any) -> Any:
    """A communication hook that gathers all gradients, and in a callback waits for an allreduce."""
    grad = bucket.buffer()
    rows = [torch.empty_like(grad) for _ in range(group.size())]

    def mean(_: Any) -> Tensor:
        total = torch.stack(rows).sum(0)
        work = torch.distributed.all_reduce(torch.ones(1, dtype=grad.dtype), group=group, async_op=True)
        return total / work.get_future().wait()[0]

    return torch.distributed.all_gather(rows, grad, group=group, async_op=True).get_future().then(mean)


def a_hook_written_for_ddp(comm: Comm) -> Loop:
    """Over any wire, though it speaks to torch.distributed."""
    pair = Pair(comm, compression=dgcopt.from_ddp_hook(None, gathered_mean))
    for step in range(4):
        for which, _, optimizer in pair.both():
            optimizer.zero_grad()
            pair.loss(which, step).backward()
        yield
        for optimizer in pair.optimizers:
            optimizer.step()
        yield
    pair.assert_equal("a DDP hook")


# -- several optimizers ----------------------------------------------------------------------------------------------


def two_players(comm: Comm) -> Loop:
    """As in a GAN: the first player's loss leaves gradients at the second one, who throws them away before its own."""
    for compression in (None, DGC(1.0, overlap=True)):
        sides = []
        for whole in (True, False):
            maker, judge = make_model(seed=2), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
            with torch.no_grad():
                for place, param in enumerate(judge.parameters()):
                    param.fill_(0.1 + 0.05 * place)
            players: list[Any] = [ADAM(maker.parameters()), SGD(judge.parameters())]
            if not whole:
                players = [wrap(players[0], maker, comm, compression), wrap(players[1], judge, comm, compression)]
            sides.append((maker, judge, players, None if whole else comm))
        for step in range(5):
            for maker, judge, (make, _), where in sides:
                make.zero_grad()
                judge(maker(batch(step, 0, where)[0])).square().mean().backward()
            yield
            for _, _, (make, _), _ in sides:
                make.step()
            yield
            for maker, judge, (_, decide), where in sides:
                decide.zero_grad()
                x, y = batch(step, 1, where)
                (judge(y) - 1).square().mean().backward()
                judge(maker(x).detach()).square().mean().backward()
            yield
            for _, _, (_, decide), _ in sides:
                decide.step()
            yield
        for place in (0, 1):
            assert_close(
                list(sides[1][place].parameters()), list(sides[0][place].parameters()), 1e-9, f"player {place}"
            )


def two_optimizers_of_one_model(comm: Comm) -> Loop:
    """One backward pass fills the buckets of both, on some ranks in another order; and their steps change places."""
    for name, ratio in (("dense", None), ("DGC at ratio 1", 1.0)):
        model = make_model()
        weights, biases = (
            wrap(torch.optim.SGD(part, 0.1), model, comm, None if ratio is None else DGC(ratio, overlap=True))
            for part in ([p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2])
        )
        whole = [param.detach().clone() for param in model.parameters()]
        for step in range(9):
            weights.zero_grad()
            biases.zero_grad()
            last = list(model.parameters())[-2]
            for rank in range(comm.size):
                for place, param in enumerate(model.parameters()):
                    if param is last and rank and step in (4, 7):
                        continue
                    grad = torch.full_like(param, 0.1 * (step + 1) * (rank + 1) * (place + 1))
                    whole[place] -= 0.1 * grad / comm.size
                    if rank == comm.rank:
                        (param * grad).sum().backward()
            yield
            for optimizer in (weights, biases) if step < 6 else (biases, weights):
                optimizer.step()
                yield
        assert_close(list(model.parameters()), whole, 1e-9, f"two optimizers, {name}")


@only(wires=["torch"], sizes=range(2, 2**10))
def what_the_script_reduces_itself(comm: Comm) -> Loop:
    """A number of its own between backward and step, where some ranks have sent buckets and others have not."""
    model = make_model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1), model, comm)
    whole = [param.detach().clone() for param in model.parameters()]
    last = list(model.parameters())[-1]
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(comm.size):
            for place, param in enumerate(model.parameters()):
                if param is last and rank and step == 2:
                    continue
                grad = torch.full_like(param, 0.1 * (step + 1) * (rank + 1) * (place + 1))
                whole[place] -= 0.1 * grad / comm.size
                if rank == comm.rank:
                    (param * grad).sum().backward()
        losses = torch.full((last.numel(),), float(comm.rank), dtype=torch.float64)
        torch.distributed.all_reduce(losses)
        assert losses.unique().tolist() == [sum(range(comm.size))]
        yield
        optimizer.step()
        yield
    assert_close(list(model.parameters()), whole, 1e-9, "beside numbers of the script's own")


def fused_steps(comm: Comm) -> Loop:
    """Parameters that lie as the gradients in their buckets do."""
    for kind in (SGD, ADAM):
        for compression in COMPRESSIONS:
            makes = iter([kind, lambda params, kind=kind: dgcopt.fuse_optimizer(kind(params))])
            pair = Pair(comm, lambda params, makes=makes: next(makes)(params), COMPRESSIONS[compression])
            for step in range(4):
                for which, _, optimizer in pair.both():
                    optimizer.zero_grad()
                    pair.loss(which, step).backward()
                yield
                for optimizer in pair.optimizers:
                    optimizer.step()
                yield
            if compression != "DGC":
                pair.assert_equal(f"{compression}, fused")


# -- clipping --------------------------------------------------------------------------------------------------------


def clipped(comm: Comm) -> Loop:
    """The norm of the averaged gradient: by one call, or by hand between synchronize() and skip_synchronize()."""
    for way in ("one call", "by hand"):
        for make in (SGD, ADAM):
            pair = Pair(comm, make)
            for step in range(4):
                for which, _, optimizer in pair.both():
                    optimizer.zero_grad()
                    pair.loss(which, step).backward()
                yield
                expected = nn.utils.clip_grad_norm_(pair.models[0].parameters(), 0.05)
                pair.bare.step()
                if way == "one call":
                    norm = pair.ours.clip_grad_norm_(0.05)
                    torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
                    pair.ours.step()
                else:
                    pair.ours.synchronize()
                    nn.utils.clip_grad_norm_(pair.models[1].parameters(), 0.05)
                    with pair.ours.skip_synchronize():
                        pair.ours.step()
                yield
            pair.assert_equal(f"clipped {way}")
            assert pair.ours.telemetry.steps == 4 * (comm.size > 1) and pair.ours.telemetry.repeated == 0


def clipped_locally(comm: Comm) -> Loop:
    """Gradients changed between backward and step, after they were sent: what counts is what the step finds."""
    pair = Pair(comm)
    for step in range(8):
        pair.bare.zero_grad()
        parts = []
        for rank in range(comm.size):
            x, y = batch(step, 0, None)
            loss = mse_loss(pair.models[0](x[rank :: comm.size]), y[rank :: comm.size])
            grads = list(torch.autograd.grad(loss, list(pair.models[0].parameters())))
            norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))
            parts.append([grad * (0.05 / (norm + 1e-6)).clamp(max=1) for grad in grads])
        for place, param in enumerate(pair.models[0].parameters()):
            param.grad = sum(part[place] for part in parts) / comm.size
        pair.ours.zero_grad()
        pair.loss(1, step).backward()
        nn.utils.clip_grad_norm_(pair.models[1].parameters(), 0.05)
        yield
        for optimizer in pair.optimizers:
            optimizer.step()
        yield
    pair.assert_equal("clipped locally")
    repeated = pair.ours.telemetry.repeated
    assert comm.size == 1 or 1 <= repeated <= 3, f"gradients were sent too early {repeated} times in 8 steps"


# -- steps that nobody takes -----------------------------------------------------------------------------------------


def rounding(comm: Comm, real: float) -> float:
    """How far two runs of the same steps may differ: libraries add up in another order from one time to the next."""
    return 0.0 if comm.takes_turns else real


def bits_of(model: nn.Module, optimizer: Any) -> str:
    """Parameters, the optimizer's state, what is held back, and the position in schedules."""
    state = optimizer.state_dict()
    kept = state.get("dgcopt", {"memory": {}, "step": 0})
    memory = {kind: dict(sorted(by_name.items())) for kind, by_name in sorted(kept["memory"].items())}
    step = torch.tensor(kept["step"])
    return fingerprint([*model.parameters(), *tensors_in(state["state"]), *tensors_in(memory), step])


def a_step_without_finite_gradients(comm: Comm) -> Loop:
    """NaN or Inf in one number on one rank: nobody takes the step, nothing is remembered of it."""
    makers: dict[str, Any] = {"SGD": SGD, "damped": functools.partial(SGD, weight_decay=0, dampening=0.2), "Adam": ADAM}
    warmup = Warmup(ratios=(0.5, 0.2), steps=2)
    compressions = (
        None,
        DGC(0.1, overlap=True, warmup=warmup),
        DGC(1.0, overlap=True, vectors="sparse"),
        Halves(),
    )
    for (name, make), compression in share(comm, itertools.product(makers.items(), compressions)):
        bad = [0, 4, 5]  # the very first step, and two in a row, once buckets leave early
        disturbed, calm = (Pair(comm, make, compression) for _ in range(2))
        for step in range(8):
            before = bits_of(disturbed.models[1], disturbed.ours)
            for pair in (disturbed, calm):
                if pair is calm and step in bad:
                    continue
                pair.ours.zero_grad()
                pair.loss(1, step).backward()
                if step in bad and comm.rank == comm.size - 1:
                    grad = pair.models[1][2].weight.grad
                    assert grad is not None
                    grad[1, 2] = (torch.nan, torch.inf)[step % 2]
                yield
                pair.ours.step()
                yield
            if step in bad:
                after = bits_of(disturbed.models[1], disturbed.ours)
                assert step == 0 or after == before, f"{name}: a skipped step left something behind"
        what = f"{name}, {compression}, steps {bad}"
        assert_close(
            list(disturbed.models[1].parameters()),
            list(calm.models[1].parameters()),
            rounding(comm, 1e-9),
            what,
        )
        if compression is not None:
            ours, theirs = (memory_of(pair.ours) for pair in (disturbed, calm))
            assert {k: sorted(v) for k, v in ours.items()} == {k: sorted(v) for k, v in theirs.items()}
            for kind, by_name in ours.items():
                values = [theirs[kind][name] for name in by_name]
                assert_close(list(by_name.values()), values, rounding(comm, 1e-9), f"{what}: {kind}")
        assert disturbed.ours.telemetry.skipped == len(bad) and disturbed.ours.telemetry.repeated == 0


def loss_scaling(comm: Comm) -> Loop:
    """The loop of torch's documentation, unmodified, with an overflow on one rank: skipped and rescaled on all."""
    compressions = (None, DGC(0.1, overlap=True, warmup=Warmup(ratios=(0.5, 0.2), steps=2)))
    ways = ("as documented", "unscale_", "unscale_ and clip_grad_norm_")
    for way, compression in share(comm, itertools.product(ways, compressions)):
        runs = []
        for overflow in (True, False):
            model = make_model(torch.float32)
            optimizer = wrap(SGD(model.parameters()), model, comm, compression)
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
            for step in range(6):
                bad = step in (2, 4)
                if bad and not overflow:
                    continue
                before = bits_of(model, optimizer)
                optimizer.zero_grad()
                x, y = batch(step, 0, comm, torch.float32)
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(x)
                loss = mse_loss(output.float(), y)
                if bad and comm.rank == comm.size - 1:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                if way != "as documented" or comm.takes_turns:
                    scaler.unscale_(optimizer)
                    yield
                if "clip" in way:
                    optimizer.clip_grad_norm_(1e6)
                    yield
                scaler.step(optimizer)
                scaler.update()
                yield
                assert not bad or bits_of(model, optimizer) == before, "a skipped step left something behind"
            assert optimizer.telemetry.steps == 4
            runs.append((model, optimizer, scaler.get_scale()))
        (disturbed, _, scale), (calm, _, calm_scale) = runs
        # scaling by powers of two changes no bits, so skipping must not either
        assert_close(
            list(disturbed.parameters()), list(calm.parameters()), rounding(comm, 1e-4), f"loss scaling, {way}"
        )
        assert calm_scale == 256.0
        if way == "as documented" and not comm.takes_turns:
            assert scale == 64.0, f"rank {comm.rank} did not hear of the others' overflow: {scale}"


# -- parameters that come and go -------------------------------------------------------------------------------------


def parameters_come_and_go(comm: Comm) -> Loop:
    """Frozen, unfrozen, added, unused on every rank (with momentum and weight decay), and used by some ranks only.

    Also frozen when their gradient is there already, which the step uses as any other.
    """
    for name, make in share(comm, itertools.product(("dense", "DGC at ratio 1"), (SGD, ADAM))):
        models = [make_model(), make_model()]
        optimizers: list[Any] = [make(list(model.parameters())[:4]) for model in models]
        wrap(optimizers[1], models[1], comm, COMPRESSIONS[name])
        for step in range(12):
            for which in (0, 1):
                model, optimizer = models[which], optimizers[which]
                model.zero_grad()
                model[0].requires_grad_(step not in (2, 3))
                model[2].requires_grad_()
                if step == 5:
                    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.05})
                x, y = batch(step, 0, comm if which else None)
                if step == 11:
                    with optimizer.no_sync() if which else nullcontext():
                        (model[2].weight.square().sum() + model[2](model[0](x)).mean()).backward()
                    model[2].requires_grad_(False)
                if step in (7, 8):  # the first layer is used by nobody
                    x = torch.cat([x, x, x], dim=1)[:, :17]
                    mse_loss(model[2:](x), y).backward()
                elif step == 9:  # the bias of the last layer by rank 0 only
                    bias = model[4].bias if which == 0 or comm.rank == 0 else model[4].bias.detach()
                    hidden = model[:4](x) @ model[4].weight.T
                    if which == 0:
                        mask = torch.zeros(len(x), 1, dtype=x.dtype)
                        mask[:: comm.size] = 1
                        bias = bias * mask + bias.detach() * (1 - mask)
                    mse_loss(hidden + bias, y).backward()
                else:
                    mse_loss(model(x), y).backward()
                if step == 10:
                    model[2].requires_grad_(False)
            yield
            for optimizer in optimizers:
                optimizer.step()
            yield
            for ours, whole in zip(models[1].parameters(), models[0].parameters(), strict=True):
                unused = whole.grad is None and step >= 5
                assert not unused or ours.grad is None, "a parameter that nobody used has got a gradient"
        assert_close(list(models[1].parameters()), list(models[0].parameters()), 1e-9, f"come and go, {name}")


def what_nobody_used_is_left_alone(comm: Comm) -> Loop:
    """Also what is remembered of it: residual and momentum."""
    pair = Pair(comm, SGD, DGC(0.1, overlap=True))
    for step in range(4):
        if step == 3:
            before = memory_of(pair.ours)
        pair.ours.zero_grad()
        x, y = batch(step, 0, comm)
        output = pair.models[1](x) if step < 3 else pair.models[1][2:](torch.cat([x, x, x], dim=1)[:, :17])
        mse_loss(output, y).backward()
        yield
        weights = [param.detach().clone() for param in pair.models[1][0].parameters()]
        pair.ours.step()
        yield
    after = memory_of(pair.ours)
    for kind, by_name in after.items():
        for name, tensor in by_name.items():
            assert torch.equal(tensor, before[kind][name]) == name.startswith("0."), f"{kind} of {name}"
    for old, param in zip(weights, pair.models[1][0].parameters(), strict=True):
        assert torch.equal(old, param)


# -- uneven data -----------------------------------------------------------------------------------------------------


def batches_of(rank: int) -> int:
    return 3 + 2 * rank


def uneven_data(comm: Comm) -> Loop:
    """Rank r has 3 + 2r batches: averages divide by the ranks that have one, or by all; then all go on together.

    Gradients are set to zero before each backward pass, or after each step.
    """
    most = batches_of(comm.size - 1)
    for divide_by in ("active", "all"):
        for compression, before in ((None, False), (None, True), (DGC(1.0, overlap=True), False)):
            whole, mine = make_model(), make_model()
            bare = SGD(whole.parameters())
            ours = wrap(SGD(mine.parameters()), mine, comm, compression)
            for step in range(most + 2):
                bare.zero_grad()
                active = [rank for rank in range(comm.size) if step < batches_of(rank) or step >= most]
                for rank in active:
                    x, y = batch(step, 0, None)
                    loss = mse_loss(whole(x[rank :: comm.size]), y[rank :: comm.size])
                    (loss / (len(active) if divide_by == "active" else comm.size)).backward()
                bare.step()

            def train(step: int, mine: nn.Module = mine, ours: Any = ours, before: bool = before) -> Loop:
                if before:
                    ours.zero_grad()
                x, y = batch(step, 0, comm)
                mse_loss(mine(x), y).backward()
                yield
                ours.step()
                if not before:
                    ours.zero_grad()
                yield

            with dgcopt.join(ours, divide_by=divide_by):
                for step in range(batches_of(comm.rank)):
                    yield from train(step)
            for _ in range(2 * (most - batches_of(comm.rank)) + 1):
                yield
            for step in (most, most + 1):
                yield from train(step)
            assert_close(list(mine.parameters()), list(whole.parameters()), 1e-9, f"divided by {divide_by}")


@only(wires=WIRES)
def uneven_data_of_two(comm: Comm) -> Loop:
    """Two optimizers that step in turn, and residuals that are still sent after their rank has run out of data.

    Of gradients for SGD, of updates for Adam.
    """
    models = [make_model(torch.float32, seed=place) for place in (1, 2)]
    made = [SGD(models[0].parameters()), torch.optim.AdamW(models[1].parameters(), lr=0.01)]
    optimizers = [
        wrap(optimizer, model, comm, DGC(0.3, overlap=True)) for optimizer, model in zip(made, models, strict=True)
    ]
    with dgcopt.join(*optimizers):
        for step in range(batches_of(comm.rank)):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                x, y = batch(step, 0, comm, torch.float32)
                mse_loss(model(x), y).backward()
                optimizer.step()
            held = [optimizer.residual_norm() for optimizer in optimizers]
    if comm.rank == 0:
        for optimizer, norm in zip(optimizers, held, strict=True):
            assert optimizer.telemetry.steps == batches_of(comm.size - 1) and norm > 0
    dgcopt.check_replicas([(f"{i}.{n}", p) for i, m in enumerate(models) for n, p in m.named_parameters()], comm=comm)
    yield


# -- buffers ---------------------------------------------------------------------------------------------------------


def normalised(seed: int) -> nn.Module:
    """With batch norm's two kinds of statistics, a running mean and a plain one, and an integer that tells them."""
    torch.manual_seed(seed)
    layers = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4)
    return nn.Sequential(*layers).double()


def buffers_are_shared(comm: Comm) -> Loop:
    """Batch norm's statistics as in one process that knows every rank's: those of one rank with data, or their mean."""
    most = batches_of(comm.size - 1)
    for how, every, uneven in (("broadcast", 2, False), ("broadcast", 1, True), ("mean", 1, True)):
        counts = [batches_of(rank) if uneven else most for rank in range(comm.size)]
        replicas = [normalised(3) for _ in range(comm.size)]
        steps = [SGD(replica.parameters()) for replica in replicas]
        mine = normalised(3)
        ours = wrap(SGD(mine.parameters()), mine, comm)
        dgcopt.sync_buffers(mine, ours, every, how)

        def told(step: int, counts: list[int] = counts, replicas: list[nn.Module] = replicas) -> Iterator[int]:
            return (rank for rank in range(comm.size) if step < counts[rank])

        afterwards = []
        for step in range(most):
            active = list(told(step))
            for rank in active:
                x, y = batch(step, 0, None)
                replicas[rank].zero_grad()
                mse_loss(replicas[rank](x[rank :: comm.size]), y[rank :: comm.size]).backward()
            for params in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = sum(params[rank].grad for rank in active) / len(active)
                for param in params:
                    param.grad = mean.clone()
            for optimizer in steps:
                optimizer.step()
            if (step + 1) % every == 0:
                for buffers in zip(*(replica.buffers() for replica in replicas), strict=True):
                    given = [buffers[rank] for rank in active]
                    floats = how == "mean" and given[0].is_floating_point()
                    value = sum(given) / len(given) if floats else given[0].clone()
                    for buffer in buffers:
                        buffer.copy_(value)
            afterwards.append([buffer.clone() for buffer in replicas[comm.rank].buffers()])

        with dgcopt.join(ours):
            for step in range(counts[comm.rank]):
                ours.zero_grad()
                x, y = batch(step, 0, comm)
                mse_loss(mine(x), y).backward()
                yield
                ours.step()
                yield
                what = f"buffers, {how}, every {every}, uneven={uneven}, step {step}"
                assert_close(list(mine.buffers()), afterwards[step], 1e-9, what)
        for _ in range(2 * (most - counts[comm.rank]) + 1):
            yield
        assert_close(list(mine.buffers()), afterwards[-1], 1e-9, f"buffers in the end, {how}, every {every}")
        if not comm.takes_turns:
            found = {name: buffer for name, buffer in mine.named_buffers() if every == 1 or most % every == 0}
            dgcopt.check_replicas(found, comm=comm)
        assert_close(list(mine.parameters()), list(replicas[0].parameters()), 1e-9, "with shared buffers")


@only(wires=WIRES)
def uneven_data_is_an_error(comm: Comm) -> Loop:
    """If asked for: all ranks are told which have none, and can go on; nobody is told where all end alike."""
    model = make_model()
    optimizer = wrap(SGD(model.parameters()), model, comm, DGC(0.3, overlap=True))

    def train(steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            x, y = batch(step, 0, comm)
            mse_loss(model(x), y).backward()
            optimizer.step()

    for _ in range(2):
        with dgcopt.join(optimizer, throw_on_early_termination=True):
            train(2)
        before = optimizer.telemetry.steps
        with (
            refused(comm, dgcopt.OutOfData, f"rank(s) 0 of {comm.size} have run out of data", "as many batches"),
            dgcopt.join(optimizer, throw_on_early_termination=True),
        ):
            train(batches_of(comm.rank))
        assert optimizer.telemetry.steps == before + batches_of(0)
    with dgcopt.join(optimizer, enable=False):
        train(2)
    dgcopt.check_replicas(model.state_dict(), comm=comm)
    yield


@only(wires=["horovod-gloo", "mpi"], sizes=[2])
def join_with_one_of_torchs(comm: Comm) -> Loop:
    """In one loop with what takes part in torch's Join, in a process group beside this wire."""
    import torch.distributed as dist
    from torch.distributed.algorithms import Join, JoinHook
    from torch.distributed.algorithms.join import Joinable

    class Served(JoinHook):
        def __init__(self, counter: Any) -> None:
            self.counter = counter

        def main_hook(self) -> None:
            dist.all_reduce(torch.zeros(1))

        def post_hook(self, is_last_joiner: bool) -> None:
            self.counter.was_last = is_last_joiner

    class Counter(Joinable):
        """Counts the batches of all ranks, as torch's documentation shows."""

        def __init__(self) -> None:
            super().__init__()
            self.count = 0.0

        @property
        def join_device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def join_process_group(self) -> Any:
            return dist.group.WORLD

        def join_hook(self, **kwargs: Any) -> JoinHook:
            assert kwargs == {"divide_by_initial_world_size": False}
            return Served(self)

        def one_more(self) -> None:
            Join.notify_join_context(self)
            total = torch.ones(1)
            dist.all_reduce(total)
            self.count += float(total)

    with shared_folder(comm) as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
        counter, models = Counter(), []
        for together in (True, False):
            models.append(make_model())
            optimizer = wrap(SGD(models[-1].parameters()), models[-1], comm, DGC(0.3, values="fp64"))
            with dgcopt.join(counter, optimizer) if together else dgcopt.join(optimizer):
                for step in range(batches_of(comm.rank)):
                    if together:
                        counter.one_more()
                    optimizer.zero_grad()
                    x, y = batch(step, 0, comm)
                    mse_loss(models[-1](x), y).backward()
                    optimizer.step()
        assert counter.count == sum(min(batches_of(comm.rank), batches_of(rank)) for rank in range(comm.size))
        assert counter.was_last == (comm.rank == comm.size - 1)
        assert_close(list(models[0].parameters()), list(models[1].parameters()), 1e-9, "with one of torch's")
        with refused(comm, dgcopt.ConfigError, "(Counter) first"), dgcopt.join(optimizer, counter):
            raise AssertionError("entered")
        dist.destroy_process_group()
    yield


@only(wires=["torch"])
def torch_join(comm: Comm) -> Loop:
    """torch's own Join takes our optimizer; averages divide by all ranks unless it is told otherwise, as in DDP.

    So does ours, and either may be given one that shares out its state: by itself, torch's ZeroRedundancyOptimizer goes
    on with the last gradient of a rank that has run out of data.
    """
    from torch.distributed.algorithms import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    sharded = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, **SGD.keywords)
    told = {"divide_by_initial_world_size": True}, {"divide_by_initial_world_size": False}
    for kind, join, by_all in (
        (SGD, lambda ours: Join([ours]), True),
        (SGD, lambda ours: Join([ours], **told[0]), True),
        (SGD, lambda ours: Join([ours], **told[1]), False),
        (sharded, lambda ours: Join([ours]), True),
        (sharded, dgcopt.join, False),
    ):
        whole, mine = make_model(), make_model()
        bare = SGD(whole.parameters())
        ours = wrap(kind(mine.parameters()), mine, comm)
        for step in range(batches_of(comm.size - 1)):
            bare.zero_grad()
            active = [rank for rank in range(comm.size) if step < batches_of(rank)]
            for rank in active:
                x, y = batch(step, 0, None)
                loss = mse_loss(whole(x[rank :: comm.size]), y[rank :: comm.size])
                (loss / (comm.size if by_all else len(active))).backward()
            bare.step()
        with join(ours):
            for step in range(batches_of(comm.rank)):
                ours.zero_grad()
                x, y = batch(step, 0, comm)
                mse_loss(mine(x), y).backward()
                ours.step()
        assert_close(list(mine.parameters()), list(whole.parameters()), 1e-9, f"{kind}, divided by all: {by_all}")
    alone = sharded(make_model().parameters())
    with refused(comm, dgcopt.ConfigError, "last batch", "DistributedOptimizer"), dgcopt.join(ours, alone):
        raise AssertionError("entered")
    yield


@only(wires=[*HOROVOD, "mpi", "simulated"], sizes=range(2, 2**10))
def torch_join_elsewhere(comm: Comm) -> Loop:
    """Refused before the first batch, with what to use."""
    from torch.distributed.algorithms import Join

    model = make_model()
    optimizer = wrap(SGD(model.parameters()), model, comm)
    with refused(comm, dgcopt.ConfigError, "dgcopt.join"):
        Join([optimizer])
    yield


# -- divergence ------------------------------------------------------------------------------------------------------


@only(wires=WIRES)
def samples_of_like_cost(comm: Comm) -> Loop:
    """No sample comes twice or is left out, though they cannot be shared out evenly: some ranks have one step less."""
    costs = [(37 * sample) % 101 for sample in range(4 * comm.size + 1)]
    whole, mine = make_model(), make_model()
    bare, ours = SGD(whole.parameters()), wrap(SGD(mine.parameters()), mine, comm)
    samplers = [
        LoadBalancingDistributedSampler(costs, costs, comm.size, rank, uneven=True) for rank in range(comm.size)
    ]
    assert sorted(itertools.chain(*samplers)) == [*range(len(costs))], "a sample is left out or comes twice"
    for samples in itertools.zip_longest(*samplers):
        bare.zero_grad()
        active = [sample for sample in samples if sample is not None]
        for sample in active:
            x, y = batch(sample, 0, None)
            (mse_loss(whole(x), y) / len(active)).backward()
        bare.step()
    with dgcopt.join(ours):
        for sample in LoadBalancingDistributedSampler(costs, costs, uneven=True):
            ours.zero_grad()
            x, y = batch(sample, 0, None)
            mse_loss(mine(x), y).backward()
            ours.step()
    assert_close(list(mine.parameters()), list(whole.parameters()), 1e-9, "samples of like cost")
    yield


@contextmanager
def refused(comm: Comm, kind: type[Exception], *words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        for part in words:
            assert part in str(error), f"does not say {part!r}: {error}"
    else:
        raise AssertionError(f"rank {comm.rank}: no {kind.__name__}")


def replicas_come_apart(comm: Comm) -> Loop:
    """One bit on the last rank: named on every rank, or mended from rank 0."""
    last = comm.size - 1
    for on_divergence in ("raise", "resync"):
        pair = Pair(comm, SGD, DGC(0.1, overlap=True), check_replicas_every=2, on_divergence=on_divergence)
        for step in range(4):
            pair.ours.zero_grad()
            pair.loss(1, step).backward()
            if step == 2 and comm.rank == last:
                with torch.no_grad():
                    pair.models[1][2].bias[3] += 1e-12
            yield
            if step == 3 and on_divergence == "raise":
                with refused(comm, dgcopt.DivergenceError, f"rank {comm.rank}", "'2.bias'", f"rank(s) [{last}]"):
                    pair.ours.step()
                return_ = True
            else:
                pair.ours.step()
                return_ = False
            yield
            if return_:
                break
        if on_divergence == "resync" and not comm.takes_turns:
            dgcopt.check_replicas(pair.models[1].state_dict(), comm=comm)


LOOPS: dict[str, Callable[[Comm], Loop]] = {
    function.__name__: function
    for function in (
        passes_vary,
        backward_in_evaluation,
        a_count_that_is_wrong,
        a_hook_written_for_ddp,
        two_players,
        two_optimizers_of_one_model,
        what_the_script_reduces_itself,
        fused_steps,
        clipped,
        clipped_locally,
        a_step_without_finite_gradients,
        loss_scaling,
        parameters_come_and_go,
        what_nobody_used_is_left_alone,
        uneven_data,
        uneven_data_of_two,
        uneven_data_is_an_error,
        join_with_one_of_torchs,
        buffers_are_shared,
        samples_of_like_cost,
        torch_join,
        torch_join_elsewhere,
        replicas_come_apart,
    )
}


def straight_through(loop: Callable[[Comm], Loop]) -> Callable[[Comm], None]:
    @functools.wraps(loop)
    def scenario(comm: Comm) -> None:
        for _ in loop(comm):
            pass

    return scenario


SCENARIOS: dict[str, Callable[[Comm], Any]] = {f"loop: {name}": straight_through(loop) for name, loop in LOOPS.items()}
