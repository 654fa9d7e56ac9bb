"""The commands `dgcopt probe`, `advise` and `doctor`: their arguments and their tables."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..collectives import Link
from ..comm import Comm, init, shutdown
from ..errors import ConfigError
from ..errors.checks import check_positive
from .advise import (
    ACCURACY,
    BASELINES,
    CANDIDATES,
    HIERARCHICAL,
    Prediction,
    Setting,
    check_allowed,
    check_candidates,
    local_steps,
    predict,
    recipes_of,
    recommend,
    table,
)
from .costs import Recipe, conditions_of, load_recipes, save_recipes
from .doctor import Diagnosis, diagnose, profile_model
from .models import Model, load_model, model_on_paper
from .plot import plot_regions, pyplot
from .probe import probe, save_probe
from .profile import Profile
from .report import write_report
from .script import STEPS, run_script
from .wire import Fitted, Network

__all__ = ["COMMANDS", "add_commands", "run"]

PROBE = """\
Measures every kind of collective in every group of ranks, by size of a rank's message, and fits seconds = alpha + beta
bytes. Start it on all ranks, as a training script:

  torchrun --nproc-per-node 4 -m dgcopt probe --json link.json
"""
ADVISE = """\
Predicts a step of a model with each exchange on a network that need not exist, and says whether compression pays. Every
exchange runs on the model's shapes on this machine's processor, or GPU if it has one: bytes are exact, seconds are
divided by --speed.

  dgcopt advise --ranks 16 --link 1gbit --latency 100us --model resnet50
  dgcopt advise --ranks 16 --link 1gbit --model torchvision.models:resnet101 --step 0.12 --speed 60
"""
REPORT = """\
Writes one HTML file without any link to other files: loss over steps, seconds and bytes, where a step's time goes,
bytes by bucket, ratio, norm of the residual, skipped steps, and choices of compression="auto".

  dgcopt report runs/digits runs/digits-2 --output report.html
"""
DOCTOR = """\
Measures a model's step, the link, and the cost of every exchange on running ranks, predicts a step with each, and
recommends one. Start it on all ranks, as a training script. With --script, after all other options, your own script
runs unchanged for some steps and is then ended.

  torchrun --nproc-per-node 4 -m dgcopt doctor --model torchvision.models:resnet50 --batch 32 --input 3,224,224
  torchrun --nproc-per-node 4 -m dgcopt doctor --script train.py --config configs/tasks/digits.yaml
"""
BATCH, SAMPLE = 32, (3, 224, 224)
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def bytes_per_second(text: str) -> float:
    """Return the bandwidth of a rate such as 100mbit or 2.5gbit. Raises ArgumentTypeError for others."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(kbit|mbit|gbit)", text.lower())
    if match is None or not float(match[1]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate: write 100mbit or 2.5gbit")
    return float(match[1]) * UNITS[match[2]] / 8


def seconds_of(text: str) -> float:
    """Return the seconds of a time such as 100us or 2ms. Raises ArgumentTypeError for others."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write 100us, 2ms or 0.5s")
    return float(match[1]) * TIMES[match[2]]


def add_commands(commands: Any) -> None:
    """Add the commands to those of `dgcopt`."""
    form = argparse.RawDescriptionHelpFormatter
    probing = commands.add_parser(
        "probe", help="measure latency and bandwidth of every collective", description=PROBE, formatter_class=form
    )
    probing.add_argument("--seconds", type=float, default=8.0, help="time for all measurements (default: 8)")
    probing.add_argument("--deadline", type=float, default=60.0, help="seconds to wait for the other ranks")
    probing.add_argument(
        "--json", type=Path, help="save the measurements to this file (dgcopt.tuning.probe.load_probe)"
    )

    advising = commands.add_parser(
        "advise", help="predict whether compression pays, without a cluster", description=ADVISE, formatter_class=form
    )
    advising.add_argument("--ranks", type=int, required=True, help="number of ranks")
    advising.add_argument(
        "--link", type=bytes_per_second, required=True, help="bandwidth of a machine's link, such as 1gbit"
    )
    advising.add_argument("--latency", type=seconds_of, default=1e-4, help="latency of a message (default: 100us)")
    advising.add_argument("--model", required=True, help="resnet50, vgg16, bert_base, gpt2_small, vit_s, or "
                          "module:callable that returns the model")  # fmt: skip
    advising.add_argument("--step", type=float, help="seconds of forward and backward on your device; default for a "
                          "named model: those of one RTX 3090")  # fmt: skip
    advising.add_argument("--local-ranks", type=int, default=1, help="ranks per machine (default: 1)")
    advising.add_argument("--speed", type=float, help="your device's memory bandwidth over this machine's; "
                          "default: 1; for a named model an RTX 3090's over that of a core here")  # fmt: skip
    advising.add_argument("--tree", action="store_true", help="predict the faster of ring and tree, as NCCL chooses")
    advising.add_argument("--allow", nargs="+", choices=ACCURACY, default=ACCURACY, help="accuracy classes")
    advising.add_argument("--candidates", nargs="+", help="some of the exchanges only")
    advising.add_argument("--costs", type=Path, help="load costs from this file instead of recording them")
    advising.add_argument("--save-costs", type=Path, help="save the recorded costs to this file")
    advising.add_argument("--json", type=Path, help="save the predictions to this file")
    advising.add_argument(
        "--plot", type=Path, help="draw the recommended exchange over bandwidth and ranks to this file"
    )

    reporting = commands.add_parser(
        "report", help="write one HTML page about runs of train.py", description=REPORT, formatter_class=form
    )
    reporting.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    reporting.add_argument("--output", type=Path, default=Path("report.html"), help="file (default: report.html)")

    healing = commands.add_parser(
        "doctor", help="measure on running ranks, and recommend an exchange", description=DOCTOR, formatter_class=form
    )
    measured = healing.add_mutually_exclusive_group(required=True)
    measured.add_argument("--model", help="module:callable that returns the model")
    measured.add_argument("--script", nargs=argparse.REMAINDER, metavar="train.py ...", help="training script with its "
                          "arguments, in place of a model; the last option")  # fmt: skip
    healing.add_argument("--steps", type=int, default=STEPS, help=f"steps of the script to run (default: {STEPS})")
    healing.add_argument("--batch", type=int, default=BATCH, help=f"samples per rank and step (default: {BATCH})")
    healing.add_argument("--input", type=shape_of, default=SAMPLE, help="shape of a sample (default: 3,224,224)")
    healing.add_argument("--vocab", type=int, help="samples are token ids below this number, not floats")
    healing.add_argument("--seconds", type=float, default=8.0, help="time to measure the link (default: 8)")
    healing.add_argument("--deadline", type=float, default=300.0, help="seconds to wait for the other ranks")
    healing.add_argument("--allow", nargs="+", choices=ACCURACY, default=ACCURACY, help="accuracy classes")
    healing.add_argument("--candidates", nargs="+", help="some of the exchanges only")
    healing.add_argument("--json", type=Path, help="save measurements and predictions to this file")


def shape_of(text: str) -> tuple[int, ...]:
    """Return the shape that 3,224,224 means. Raises ArgumentTypeError for others."""
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: write 3,224,224")
    return tuple(map(int, text.split(",")))


def run(arguments: argparse.Namespace) -> int:
    """Run the command that was given; return the exit status."""
    return COMMANDS[arguments.command](arguments)


def _probe(arguments: argparse.Namespace) -> int:
    """Measure, and print on rank 0."""
    comm = init(deadline=arguments.deadline)
    try:
        found = probe(comm, seconds=arguments.seconds, deadline=arguments.deadline)
        if comm.rank == 0:
            print(probe_table(found))
            if arguments.json is not None:
                save_probe(found, arguments.json)
    finally:
        shutdown()
    return 0


def probe_table(found: Fitted) -> str:
    """Return a line for each collective: its fit, and the bandwidth that this amounts to."""
    lines = [f"{'collective':18} {'group':7} {'ranks':>5} {'alpha, ms':>10} {'ms per MB':>10} {'measured up to':>15}"]
    for (kind, group), one in found.fits.items():
        most = f"{one.sizes[-1] / 1e6:.3g} MB"
        lines.append(f"{kind:18} {group:7} {one.size:5} {1e3 * one.alpha:10.3f} {1e9 * one.beta:10.2f} {most:>15}")
    return "\n".join(lines)


def _advise(arguments: argparse.Namespace) -> int:
    """Predict, and print."""
    if arguments.ranks < 2:
        raise ConfigError(f"--ranks must be two or more, not {arguments.ranks}: a single rank exchanges nothing")
    for name in ("step", "speed"):
        given = getattr(arguments, name)
        if given is not None and not 0 < given < math.inf:
            raise ConfigError(f"--{name} must be positive and finite, not {given:g}")
    if arguments.local_ranks < 1 or arguments.ranks % arguments.local_ranks:
        raise ConfigError(
            f"--ranks {arguments.ranks} cannot be on machines of --local-ranks {arguments.local_ranks} each: give a "
            f"divisor of --ranks"
        )
    if arguments.costs is not None and arguments.save_costs is not None:
        raise ConfigError("--costs takes costs that --save-costs has written before: give one of them")
    check_candidates(arguments.candidates)
    check_allowed(arguments.allow)
    for path in (arguments.json, arguments.plot):  # before minutes are spent on recording
        if path is not None:
            _check_can_write(path)
    if arguments.plot is not None:
        pyplot()
    sys.path.insert(0, "")  # the user's modules here, as for `python -m`
    model = model_on_paper(arguments.model, arguments.step)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speed, why = _speed(arguments.speed, model, device)
    network = Network(
        *(arguments.latency, arguments.link, arguments.local_ranks), algorithm="tree" if arguments.tree else "ring"
    )
    recipes = _recipes(arguments, model, device)
    setting = Setting(model, arguments.ranks, network, arguments.local_ranks, speed)
    predictions = predict(setting, recipes, arguments.latency, allow=arguments.allow)
    print(
        f"{model.name}: {model.numel:,} parameters in {len(model.shapes)} tensors; {arguments.ranks} ranks\n"
        f"forward and backward {model.seconds:.4g} s: {model.source or 'by --step'}\n"
        f"{why}\n\n{table(predictions, arguments.allow)}\n\n{local_steps(setting, recipes)}\n"
        f"{recommend(predictions, arguments.allow)[1]}"
    )
    if arguments.json is not None:
        _write(arguments.json, json.dumps([asdict(one) for one in predictions], indent=1) + "\n")
    if arguments.plot is not None:
        title = f"{model.name}, {model.seconds:.3g} s, {1e3 * arguments.latency:g} ms"
        names = [*CANDIDATES, *(recipe.name for recipe in recipes if recipe.name not in CANDIDATES)]
        plot_regions([(title, choice_of(setting, recipes, arguments.allow))], names, 1, arguments.plot)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    """Measure, and print on rank 0."""
    check_allowed(arguments.allow)
    for name in ("seconds", "deadline"):
        check_positive(getattr(arguments, name), f"--{name}")
    check_candidates(arguments.candidates)
    others = {"steps": STEPS} if arguments.script is None else {"batch": BATCH, "input": SAMPLE, "vocab": None}
    if ignored := [f"--{name}" for name, default in others.items() if getattr(arguments, name) != default]:
        raise ConfigError(
            f"{', '.join(ignored)} would have no effect {'without' if 'steps' in others else 'with'} --script"
        )
    try:
        if arguments.script is not None:
            if not arguments.script:
                raise ConfigError("--script needs the path of a training script")
            path, *words = arguments.script
            then = partial(_diagnosed, arguments, Path(path).name)
            found, comm = run_script(Path(path), words, then, arguments.steps)
        else:
            found, comm = _diagnosed(arguments, arguments.model, *_profile(arguments))
        if comm.rank == 0:
            print(diagnosis(found, comm.size, comm.nodes, arguments.allow))
            if arguments.json is not None:
                fits = [{"kind": kind, "group": group, **asdict(one)} for (kind, group), one in found.wire.fits.items()]
                content = {"seconds": found.model.seconds, "forward": found.model.forward, "fits": fits}
                content["predictions"] = [asdict(one) for one in found.predictions]
                _write(arguments.json, json.dumps(content, indent=1) + "\n")
    finally:
        shutdown()
    return 0


def _profile(arguments: argparse.Namespace) -> tuple[Profile, torch.device]:
    """Return the profile of the model that was given, and its device."""
    for name in ("batch", "vocab"):
        given = getattr(arguments, name)
        if given is not None and given < 1:
            raise ConfigError(f"--{name} must be 1 or more, not {given}")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    sys.path.insert(0, "")  # the user's modules here, as for `python -m`
    model = load_model(arguments.model, str(device))
    shape = (arguments.batch, *arguments.input)
    try:
        if arguments.vocab is not None:
            inputs = torch.randint(arguments.vocab, shape, device=device)
        else:
            dtype = next(param.dtype for param in model.parameters() if param.requires_grad)
            inputs = torch.randn(shape, device=device, dtype=dtype)
    except (RuntimeError, TypeError, ValueError) as error:  # more than memory, or than 64 bits
        said = str(error).splitlines()[0]
        raise ConfigError(
            f"no input of shape {shape} can be made ({said}): lower --batch, --input or --vocab"
        ) from error
    return profile_model(model, [inputs]), device


def _diagnosed(
    arguments: argparse.Namespace, name: str, profile: Profile, device: torch.device
) -> tuple[Diagnosis, Comm]:
    """Return the diagnosis of a profile, and the wire of the ranks that have made it."""
    comm = init(deadline=arguments.deadline)
    found = diagnose(
        comm,
        name,
        profile,
        names=arguments.candidates,
        allow=arguments.allow,
        seconds=arguments.seconds,
        deadline=arguments.deadline,
        device=device,
        before=lambda name: print(f"recording {name}", file=sys.stderr) if comm.rank == 0 else None,
    )
    return found, comm


def diagnosis(found: Diagnosis, size: int, nodes: int, allow: Sequence[str]) -> str:
    """Return the text for a user: compute, exposed communication, a line for each exchange, the recommendation."""
    dense = next(one for one in found.predictions if one.name == BASELINES[0])
    return (
        f"{found.model.name}: {found.model.numel:,} parameters; {size} ranks on {nodes} machine(s)\n"
        f"forward and backward {found.model.seconds:.4f} s; {dense.name} exposes {dense.exposed:.4f} s of "
        f"communication\n\n{table(found.predictions, allow)}\n\n{found.local_steps}\n"
        f"{recommend(found.predictions, allow)[1]}"
    )


def choice_of(
    setting: Setting, recipes: list[Recipe], allow: tuple[str, ...]
) -> Callable[[int, float], tuple[Prediction, float]]:
    """Return the choice in a cell: for ranks and bytes per second, the exchange to use and its gain over the best dense
    one.
    """

    def choose(size: int, bandwidth: float) -> tuple[Prediction, float]:
        assert isinstance(setting.wire, Network)
        there = replace(setting, size=size, wire=replace(setting.wire, bandwidth=bandwidth))
        predictions = predict(there, recipes, limits=False)
        best, _ = recommend(predictions, allow)
        dense = min(one.seconds for one in predictions if one.name in BASELINES and one.accuracy in allow)
        return best, dense / best.seconds

    return choose


def _speed(asked: float | None, model: Model, device: torch.device) -> tuple[float, str]:
    """Return the speed of the device that trains over the one that records, and a line that says where it is from."""
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else "one core here"
    if asked is not None or not model.memory:
        speed = 1.0 if asked is None else asked
        return speed, f"exchange recorded on {here}, divided by {speed:g}"
    own = memory_speed(device)
    return model.memory / own, (
        f"exchange recorded on {here}, divided by {model.memory / own:.3g}: memory of one {model.device}, "
        f"{model.memory / 1e9:.0f} GB/s, over {own / 1e9:.3g} GB/s here; launches not counted"
    )


def memory_speed(device: torch.device, repeats: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the bytes per second that a device reads and writes while it copies 64 MB; `clock` as for `record`."""
    source = torch.zeros(2**24, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(1 + repeats):
        start = clock()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, clock() - start)
    return 2 * source.nbytes / best


def _recipes(arguments: argparse.Namespace, model: Model, device: torch.device) -> list[Recipe]:
    """Return recorded costs from a file, or record them on this machine."""
    local, wanted = arguments.local_ranks, arguments.candidates
    if arguments.ranks <= local and HIERARCHICAL in (wanted or ()):
        raise ConfigError(
            f"candidate {HIERARCHICAL!r} needs several machines, and all --ranks {arguments.ranks} are on one of "
            f"--local-ranks {local}: leave it out, or give fewer --local-ranks"
        )
    if arguments.costs is not None:
        known = load_recipes(arguments.costs)
        if model.name not in known:
            raise ConfigError(
                f"{arguments.costs} has the costs of {', '.join(known) or 'no model'}, not of {model.name}"
            )
        recorded = [one.name for one in known[model.name]]
        if missing := [name for name in wanted or () if name not in recorded]:
            raise ConfigError(f"{arguments.costs} has no costs of {', '.join(missing)}: it has {', '.join(recorded)}")
        _check_conditions(arguments, model, device, known[model.name])
        return [one for one in known[model.name] if wanted is None or one.name in (*BASELINES, *wanted)]
    others: dict[str, list[Recipe]] = {}
    if arguments.save_costs is not None:
        if arguments.save_costs.exists():
            others = load_recipes(arguments.save_costs)
        save_recipes(others, arguments.save_costs)  # fails before minutes are spent on recording
    if wanted is None and arguments.ranks <= local:
        wanted = [*CANDIDATES]
    recipes = recipes_of(
        model.shapes,
        wanted,
        (2 * local, 4 * local) if local > 1 else (2, 4),
        local,
        link=Link(arguments.latency, arguments.link),
        device=device,
        before=lambda name: print(f"recording {name}", file=sys.stderr),
    )
    if arguments.save_costs is not None:
        save_recipes({**others, model.name: recipes}, arguments.save_costs)
    return recipes


def _check_conditions(
    arguments: argparse.Namespace, model: Model, device: torch.device, recipes: Sequence[Recipe]
) -> None:
    """Raise ConfigError for costs of other parameters, machines or devices than those given."""
    here = conditions_of(model.shapes, arguments.local_ranks, device)
    again = "Record them anew, with --save-costs in place of --costs"
    for recipe in recipes:
        if recipe.conditions is None:
            raise ConfigError(
                f"{arguments.costs} does not say with which parameters, --local-ranks and device the costs of "
                f"{model.name} were recorded, as files of earlier versions do not. {again}"
            )
        if recipe.conditions != here:
            differ = here.differences(recipe.conditions)
            raise ConfigError(f"{arguments.costs} has costs of {model.name} under other conditions: {differ}. {again}")


def _check_can_write(path: Path) -> None:
    """Raise ConfigError for a file that cannot be written."""
    is_new = not path.exists()
    with _writing(path):
        path.open("a").close()
        if is_new:
            path.unlink()


def _write(path: Path, text: str) -> None:
    """Write a file. Raises ConfigError if that is not possible."""
    with _writing(path):
        path.write_text(text)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Context in which an OSError is a ConfigError that names the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _report(arguments: argparse.Namespace) -> int:
    """Write the page."""
    write_report(arguments.runs, arguments.output)
    print(arguments.output)
    return 0


COMMANDS = {"probe": _probe, "advise": _advise, "doctor": _doctor, "report": _report}
"""Commands by name: each takes its arguments and returns the exit status."""
