"""Train a model with data-parallel workers and compressed gradients; everything is chosen in configs/.

    python train.py --config configs/tasks/digits.yaml
    torchrun --nproc-per-node 2 train.py --config configs/tasks/digits.yaml --config configs/compressors/dgc.yaml
    horovodrun -np 2 python train.py --config configs/tasks/digits.yaml --optimizer.lr 0.1
    mpirun -n 2 python train.py --config configs/tasks/digits.yaml --compressor dgcopt.DGC --compressor.ratio 0.01
    horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts \\
        python train.py --config configs/tasks/digits.yaml --output /shared/run1 --resume

Config files are composed from left to right and the command line overrides them; --print_config shows the outcome.
"""

import contextlib
import copy
import dataclasses
import hashlib
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, Literal, cast

try:
    import torch
    import torch.nn.functional as F
    from jsonargparse import set_parsing_settings
    from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
    from torch.utils.data import DataLoader, Dataset, Subset

    import dgcopt
    from dgcopt import elastic
    from dgcopt.collectives import AllReduce, Broadcast
    from dgcopt.comm import DEADLINE, Comm
    from dgcopt.flat.optimizer_state import STATE_KEY
    from dgcopt.tasks.checkpointed import RandomNumbers, Scaler
    from dgcopt.tasks.checks import (
        COUNTED,
        GivenSettings,
        building,
        check_optimizer,
        check_run,
        check_settings,
        fitting,
        print_changed,
        scheduling,
        writing,
    )
    from dgcopt.tasks.config import Parser
    from dgcopt.tasks.record import Record, per_step
    from dgcopt.tasks.shard import Shard
except ModuleNotFoundError as error:
    sys.exit(f'train.py: {error.name} is not installed: pip install ".[train]"')


@dataclasses.dataclass
class Settings:
    """What is trained, how and for how long. Objects are chosen by class_path, with their own settings in init_args."""

    train_data: Dataset
    """(input, target) pairs to learn from; random augmentation has to draw from torch's global generator"""
    test_data: Dataset
    """(input, target) pairs to measure loss and accuracy on after each epoch"""
    model: nn.Module
    """the network: a class, or a function that returns one"""
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    """any torch.optim optimizer; lr is that of one worker and one batch per step"""
    compressor: dgcopt.Compressor = dataclasses.field(default_factory=dgcopt.NoCompression)
    """what is sent of the gradients; dgcopt.Auto chooses it from the first steps, see configs/compressors/auto.yaml"""
    op: Literal["average", "sum", "adasum"] = "average"
    """how gradients of workers are combined; sum with an lr of its own, adasum instead of scale_lr"""
    bucket_mb: PositiveFloat | None = None
    """megabytes of gradients that travel together; more if messages cost more than bytes; null leaves it to dgcopt"""
    first_bucket_mb: PositiveFloat | None = None
    """megabytes of the first bucket; fewer to start sending earlier"""
    clip_norm: PositiveFloat | None = None
    """largest norm of the averaged gradients; local clipping before compression is the compressor's setting"""
    check_replicas_every: NonNegativeInt = 0
    """steps between comparisons of all workers' weights, bit for bit; 0 compares before the first step only"""
    amp: Literal["bf16", "fp16"] | None = None
    """automatic mixed precision of forward and loss; fp16 scales the loss, and skips steps that overflow"""
    averaging: dgcopt.Averaging | None = None
    """how weights are averaged now and then, in place of gradients at every step; then it says what is sent"""
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """any torch.optim.lr_scheduler; it sees the lr of one worker"""
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    """when the scheduler moves on; how many steps an epoch has depends on the number of workers"""
    scale_lr: bool = True
    """multiply lr by workers x batches_per_step: the rule for SGD, too much for Adam"""
    warmup_epochs: NonNegativeFloat = 5.0
    """epochs over which lr grows from one worker's to the scaled one; more if many workers diverge at first"""
    epochs: NonNegativeInt = 10
    """passes over the training data"""
    batch_size: PositiveInt = 32
    """samples per worker and batch; fewer if memory runs out"""
    batches_per_step: PositiveInt = 1
    """batches whose gradients are averaged locally before they are exchanged; more to exchange less often"""
    loader_workers: NonNegativeInt = 0
    """processes per worker that prepare batches; more if the device waits for data"""
    seed: int = 0
    """of initial parameters, order of the data, augmentation and dropout"""
    wire: Literal["torch", "horovod", "mpi", "local"] | None = None
    """what carries the collectives; null follows the launcher"""
    deadline: PositiveFloat = DEADLINE
    """seconds after which a worker that waits for another gives up; fewer if some may be lost, under Horovod Elastic"""
    output: str = "runs/train"
    """folder for checkpoints, history.jsonl, the TensorBoard log and result.json; numbered unless --output names it"""
    log_steps: PositiveInt = 10
    """steps between two entries in the history"""
    trace_steps: NonNegativeInt = 0
    """first steps of which each worker writes a trace, trace-RANK.json, for chrome://tracing and `dgcopt report`"""
    checkpoint_steps: NonNegativeInt = 0
    """steps between checkpoints within an epoch; 0 saves at the end of each epoch only"""


def cross_entropy(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Of logits (N, C) with targets (N,), or logits (N, T, C) with targets (N, T)."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction=reduction)


class Trainer:
    """One rank's part in a run: what its settings describe, and how far it has come."""

    def __init__(self, settings: Settings, comm: Comm) -> None:
        check_settings(settings)
        self.settings, self.output, self.joined = settings, Path(settings.output), comm
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", comm.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.samples = len(cast(Sized, settings.train_data))
        self.model = settings.model.to(self.device)
        optimizer = settings.optimizer(self.model.parameters())
        check_optimizer(optimizer)
        self.scheduler = settings.scheduler(optimizer) if settings.scheduler else None
        self.given = GivenSettings(optimizer, self.scheduler)
        if isinstance(self.scheduler, ReduceLROnPlateau) and settings.scheduler_interval == "step":
            raise dgcopt.ConfigError("ReduceLROnPlateau follows the test loss, so scheduler_interval must be epoch")
        self.optimizer = self.distribute(optimizer, comm)
        self.scaler = Scaler(self.device.type, enabled=settings.amp == "fp16")
        self.counted = {name: getattr(settings, name) for name in COUNTED} | {"samples": self.samples}
        self.state = elastic.State(
            self.output / "checkpoints",
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            random=RandomNumbers(self.device),
            step=0,
            epoch=0,
            seen=0,  # samples of this epoch
            best=0.0,
            workers=comm.size,
            seconds=0.0,
            skipped=0,
            counted=self.counted,
        )
        self.traced, self.began, self.first_step, self.reason = contextlib.ExitStack(), time.perf_counter(), 0, ""
        self.skipped_elsewhere = 0  # by an earlier part of the run, or by the scaler of a single worker
        torch.manual_seed(settings.seed + comm.rank)  # from here on ranks differ, in dropout for one

    def distribute(self, optimizer: Optimizer, comm: Comm) -> Any:
        """Wrap the optimizer: gradients are averaged, or weights are."""
        settings, named = self.settings, self.model.named_parameters()
        if settings.averaging is not None:
            return settings.averaging.attach(optimizer, named, comm)
        return dgcopt.DistributedOptimizer(
            optimizer,
            named_parameters=named,
            compression=settings.compressor,
            backward_passes_per_step=settings.batches_per_step,
            op=settings.op,
            comm=comm,
            bucket_mb=settings.bucket_mb,
            first_bucket_mb=settings.first_bucket_mb,
            check_replicas_every=settings.check_replicas_every,
        )

    @property
    def exchange(self) -> Any:
        """What knows of traffic: the optimizer that averages gradients, or the averaging of weights."""
        return self.optimizer if self.settings.averaging is None else self.optimizer.averaging

    @property
    def seconds(self) -> float:
        """Of training, up to the newest checkpoint and since it was resumed."""
        return time.perf_counter() - self.began

    @property
    def skipped(self) -> int:
        """Steps that no worker took, as some gradients were not finite; counted as `seconds`."""
        return int(self.exchange.telemetry.skipped) + self.skipped_elsewhere

    def commit(self) -> None:
        """Write a checkpoint."""
        self.state.seconds, self.state.skipped = self.seconds, self.skipped
        self.state.commit()

    def note_choice(self, record: Record | None) -> None:
        """Write a new choice of compression="auto" to the history."""
        reason = getattr(getattr(self.optimizer, "compressor", None), "reason", "")
        if record and reason != self.reason:
            record.note(self.state.step, reason)
        self.reason = reason

    @property
    def comm(self) -> Comm:
        """The workers that there are now; under Horovod Elastic those of the newest round."""
        return dgcopt.init() if self.joined.elastic else self.joined

    @property
    def position(self) -> float:
        """Epochs so far. Warm-ups go by it, as the steps of an epoch depend on the number of workers."""
        return self.state.epoch + min(1.0, self.state.seen / (self.steps_per_epoch * self.samples_per_step))

    def fit_workers(self) -> None:
        """Fit all that depends on workers and batches to those there are, whatever has trained so far."""
        settings, state, size = self.settings, self.state, self.comm.size
        self.samples_per_step = settings.batch_size * settings.batches_per_step * size
        self.steps_per_epoch = self.samples // self.samples_per_step
        if not self.steps_per_epoch:
            per_worker = self.samples // size
            raise dgcopt.ConfigError(f"{per_worker} samples per worker are no full step: lower batch_size")
        self.lr_scale = size * settings.batches_per_step if settings.scale_lr else 1
        schedules = self.optimizer.compressor if settings.averaging is None else self.optimizer.averaging
        schedules.set_steps_per_epoch(self.steps_per_epoch)
        before, state.workers = state.workers, size
        earlier, state.counted = state.counted, self.counted
        if state.step and self.comm.rank == 0:
            print_changed(earlier, self.counted, state.seen)
        paces = {(each["batch_size"], each["batches_per_step"], each["samples"]) for each in (earlier, self.counted)}
        if before == size and len(paces) == 1:
            return
        kept = self.optimizer.state_dict()
        if settings.averaging is None and STATE_KEY in kept:
            kept[STATE_KEY]["step"] = round(self.position * self.steps_per_epoch)  # of the ratio's warm-up
            self.optimizer.load_state_dict(kept)
        if before == size:
            return
        torch.manual_seed(
            hash((settings.seed, state.step, self.comm.rank))
        )  # there may be more ranks than saved states
        if self.comm.rank == 0:
            print(
                f"step {state.step} was saved by {before} worker(s), and now there are {size}: what they held back is "
                f"shared out anew, weights become their mean, lr and the rest of the epoch follow"
            )

    @contextlib.contextmanager
    def lr_of_step(self) -> Iterator[float]:
        """Context in which the optimizer has the lr of this step, which it gives: scaled to the workers, warmed up."""
        warm = min(1.0, self.position / self.settings.warmup_epochs) if self.settings.warmup_epochs else 1.0
        # Schedulers and checkpoints see the lr of one worker, which holds for any number of them.
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * (1 + (self.lr_scale - 1) * warm)
        yield float(self.optimizer.param_groups[0]["lr"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def precision(self) -> torch.autocast:
        """Context of forward and loss: mixed precision, or as the model is."""
        dtype = torch.float16 if self.settings.amp == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=self.settings.amp is not None)

    def train_step(self) -> float:
        """One step of the optimizer, at the lr that is returned."""
        with self.lr_of_step() as lr:
            if self.settings.clip_norm is not None:
                self.scaler.unscale_(self.optimizer)
                self.optimizer.clip_grad_norm_(self.settings.clip_norm)
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.skipped_elsewhere += self.comm.size == 1 and self.scaler.get_scale() < scale
        self.count_step()
        return lr

    def move_schedule(self, *metrics: float) -> None:
        """Move the schedule on."""
        with scheduling(self.scheduler, self.state.step):
            self.scheduler.step(*metrics)  # type: ignore[union-attr, arg-type]

    def count_step(self) -> None:
        """After a step: clear gradients, and move the schedule and the position on."""
        self.optimizer.zero_grad()
        if self.scheduler and self.settings.scheduler_interval == "step":
            self.move_schedule()
        self.state.step, self.state.seen = self.state.step + 1, self.state.seen + self.samples_per_step

    def train_epoch(self, record: Record | None) -> None:
        """Train for what is left of the epoch."""
        settings, state = self.settings, self.state
        # One order for all: a step takes the next samples of it, however many workers share them.
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(settings.seed + state.epoch))
        steps = (self.samples - state.seen) // self.samples_per_step
        left = order[state.seen : state.seen + steps * self.samples_per_step]
        loader = DataLoader(
            Shard(settings.train_data, left[self.comm.rank :: self.comm.size].tolist(), settings.seed, state.epoch),
            settings.batch_size,
            num_workers=settings.loader_workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # its own, so that entering an epoch again draws nothing from the global one
        )
        before, losses = copy.copy(self.exchange.telemetry), []
        self.model.train()
        for batch, (inputs, targets) in enumerate(loader, start=1):
            with fitting(inputs, targets), self.precision():
                output = self.model(inputs.to(self.device, non_blocking=True))
                loss = cross_entropy(output, targets.to(self.device, non_blocking=True))
            self.scaler.scale(loss / settings.batches_per_step).backward()
            losses.append(loss.detach())
            if batch % settings.batches_per_step:
                continue
            lr = self.train_step()
            if state.step >= self.first_step + settings.trace_steps:
                self.traced.close()
            self.note_choice(record)
            if state.step % settings.log_steps == 0:
                mean_loss = self.comm.run(AllReduce(torch.stack(losses).mean())).item()
                if record:
                    values = {"epoch": self.position, "loss": mean_loss, "lr": lr}
                    values["residual_norm"] = self.exchange.residual_norm()
                    values |= {"seconds": self.seconds, "skipped": self.skipped}
                    record.write(state.step, values | per_step(self.exchange.telemetry, before))
                before, losses = copy.copy(self.exchange.telemetry), []
            in_between = settings.checkpoint_steps and self.samples - state.seen >= self.samples_per_step
            if in_between and state.step % settings.checkpoint_steps == 0:
                self.commit()

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy over the test data, of the mean of all ranks' weights where they differ."""
        if self.settings.averaging is None:
            return self.measure()
        with self.optimizer.averaging.averaged():
            return self.measure()

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Loss and accuracy over the test data, every sample counted once: rank r reads samples r, r + size, ..."""
        # The running statistics of batch normalisation are each rank's own: everyone measures the model of rank 0.
        dgcopt.broadcast_parameters(dict(self.model.named_buffers()), root_rank=0, comm=self.comm)
        data = self.settings.test_data
        shard = Subset(data, range(self.comm.rank, len(cast(Sized, data)), self.comm.size))
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # of losses, of correct answers, of targets
        self.model.eval()
        for inputs, targets in DataLoader(shard, self.settings.batch_size, num_workers=self.settings.loader_workers):
            with fitting(inputs, targets):
                with self.precision():
                    output = self.model(inputs.to(self.device)).float()
                targets = targets.to(self.device)
                sums[0] += cross_entropy(output, targets, reduction="sum")
            sums[1] += (output.argmax(-1) == targets).sum()
            sums[2] += targets.numel()
        loss, correct, count = self.comm.run(AllReduce(sums, op="sum")).tolist()
        return {"test_loss": loss / count, "accuracy": correct / count}

    def train(self) -> dict[str, Any]:
        """Train to the last epoch and return what came of it, from the newest checkpoint, if there is one.

        Whenever workers were lost or have come, those there are go on: under Horovod Elastic here, elsewhere the
        launcher starts the script anew.
        """
        return elastic.run(self.train_on)(self.state)

    def train_on(self, state: Any) -> dict[str, Any]:
        """Train to the last epoch with the workers that there are; rank 0 keeps the record."""
        if state.step and self.comm.rank == 0:
            self.given.print_overruled()
        self.fit_workers()
        steps = state.step + (self.settings.epochs - state.epoch - 1) * self.steps_per_epoch
        steps += (self.samples - state.seen) // self.samples_per_step
        before, metrics = copy.copy(self.exchange.telemetry), {}
        self.began, self.first_step = time.perf_counter() - state.seconds, state.step
        self.skipped_elsewhere = state.skipped - int(self.exchange.telemetry.skipped)
        if self.settings.trace_steps and state.epoch < self.settings.epochs:
            self.output.mkdir(parents=True, exist_ok=True)
            self.traced.enter_context(dgcopt.trace(self.optimizer, self.output / f"trace-{self.comm.rank}.json"))
        keep = contextlib.closing(Record(self.output, state.step, steps)) if self.comm.rank == 0 else None
        with keep or contextlib.nullcontext() as record:
            while state.epoch < self.settings.epochs:
                self.train_epoch(record)
                if self.settings.averaging is not None and state.epoch == self.settings.epochs - 1:
                    self.optimizer.averaging.average()  # the outcome is one model
                metrics = self.evaluate()
                if isinstance(self.scheduler, ReduceLROnPlateau):
                    self.move_schedule(metrics["test_loss"])
                elif self.scheduler and self.settings.scheduler_interval == "epoch":
                    self.move_schedule()
                state.epoch, state.seen, state.best = state.epoch + 1, 0, max(state.best, metrics["accuracy"])
                if record:
                    record.write(state.step, {"epoch": state.epoch, **metrics})
                    record.bar.write(
                        f"epoch {state.epoch}: accuracy {metrics['accuracy']:.2%}, loss {metrics['test_loss']:.4f}"
                    )
                self.commit()
        result: dict[str, Any] = metrics or self.evaluate()
        parameters = nn.utils.parameters_to_vector(self.model.parameters()).detach().cpu()
        result |= {"best_accuracy": state.best, "steps": state.step, "seconds": state.seconds, "skipped": state.skipped}
        result |= {"workers": self.comm.size, "wire": self.comm.wire} | per_step(self.exchange.telemetry, before)
        return result | {
            "parameters_sha256": hashlib.sha256(parameters.view(torch.uint8).numpy().tobytes()).hexdigest()
        }


def numbered(output: Path, number: int) -> Path:
    """The first output has no number."""
    return output if number == 1 else output.with_name(f"{output.name}-{number}")


def choose_output(output: Path, fresh: bool, comm: Comm) -> Path:
    """Where a run goes without --output: the newest of output, output-2, ..., or a `fresh` one, which rank 0 makes."""
    name = re.compile(re.escape(output.name) + r"(?:-(\d+))?")
    numbers = [int(found[1] or 1) for path in output.parent.glob("*") if (found := name.fullmatch(path.name))]
    number = max(1, max(numbers, default=0) + fresh)
    while fresh and comm.rank == 0 and output.name:  # "." has none
        try:
            numbered(output, number).mkdir(parents=True)  # not exist_ok: of runs that start together one has it
            break
        except FileExistsError:
            number += 1
    told = comm.run(Broadcast(comm.to_wire(torch.tensor([number])), label="where the run goes"))
    chosen = numbered(output, int(told))
    if comm.rank == 0 and chosen != output:
        print(f"{output} exists: this run goes to {chosen}" if fresh else f"{chosen} is the newest run")
    return chosen


def steps_of(path: Path) -> int | None:
    """The steps in a result.json; None if there is none, or a damaged one."""
    try:
        return int(json.loads(path.read_text())["steps"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def run(trainer: Trainer, resume: bool, evaluate: bool) -> None:
    """Train or evaluate; rank 0 writes what came of it to result.json or evaluation.json in the output."""
    checkpoints = trainer.output / "checkpoints"
    if not (resume or evaluate) and any(checkpoints.glob("step-*")):
        raise dgcopt.ConfigError(f"{checkpoints} is of an earlier run: --resume it, or choose another --output")
    if evaluate and not trainer.state.sync():
        raise dgcopt.ConfigError(f"nothing to evaluate: no checkpoint in {checkpoints}")
    result = trainer.evaluate() if evaluate else trainer.train()
    if trainer.comm.rank == 0:
        path = trainer.output / ("evaluation.json" if evaluate else "result.json")
        if resume and trainer.first_step == trainer.state.step == steps_of(path):
            print(f"the run is finished, with {trainer.state.epoch} epoch(s): {path} stays as it is")
            return
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"accuracy {result['accuracy']:.2%}, loss {result['test_loss']:.4f}: {path}")


def make_parser() -> Parser:
    """What the command line and the config files may say."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = Parser(prog="train.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="a YAML file of settings; may be given more than once")
    parser.add_class_arguments(Settings)
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in output, if any")
    parser.add_argument("--evaluate", action="store_true", help="only measure the newest checkpoint in output")
    return parser


def main() -> None:
    """Read the settings, join the other workers and train; what the user can put right ends in one line."""
    parser = make_parser()
    config = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("dgcopt").setLevel(logging.INFO)  # says which wire was joined, and why
    comm: Comm | None = None
    made: Path | None = None
    try:
        comm = dgcopt.init(config.wire, deadline=config.deadline)
        named = any(argument.split("=")[0] == "--output" for argument in sys.argv[1:])
        check_run(config, named, comm.elastic)
        if not named:
            fresh = not (config.resume or config.evaluate)
            with writing():
                output = choose_output(Path(config.output), fresh, comm)
            config.output, made = str(output), output if fresh else None
        torch.manual_seed(config.seed)
        with building():
            objects = parser.instantiate(config)
            settings = Settings(**{field.name: objects[field.name] for field in dataclasses.fields(Settings)})
            trainer = Trainer(settings, comm)
        with writing():
            run(trainer, config.resume, config.evaluate)
    except dgcopt.DGCError as error:
        rank = comm.rank if comm else 0
        reason = " ".join(str(error).removeprefix(f"rank {rank}:").split())
        if made:  # if it is empty still, a later --resume shall not take it for the newest run
            with contextlib.suppress(OSError):
                made.rmdir()
        sys.stderr.write(f"{parser.prog}: rank {rank}: {reason}\n")  # in one write: all ranks may say it at once
        sys.exit(1) if comm is None else comm.abort(1)  # which takes the other ranks along where exiting would not


if __name__ == "__main__":
    main()
