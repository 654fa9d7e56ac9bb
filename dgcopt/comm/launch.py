"""Join the ranks that horovodrun, torchrun, mpirun or srun has started; without a launcher, a single process."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from ..collectives import AllGather
from ..errors import CommError, ConfigError, MismatchError
from ..errors.checks import check_flag, check_positive, check_whole
from .base import DEADLINE, Comm, LocalComm
from .membership import STORE, Rules

__all__ = ["check_alike", "current_comm", "has_joined", "init", "shutdown", "wire_in_use"]

log = logging.getLogger("dgcopt")

WIRES = ("torch", "horovod", "mpi", "local")

SIZES = {
    "WORLD_SIZE": "torch",
    "SLURM_STEP_NUM_TASKS": "torch",
    "HOROVOD_SIZE": "horovod",
    "OMPI_COMM_WORLD_SIZE": "mpi",
    "PMI_SIZE": "mpi",
    "MV2_COMM_WORLD_SIZE": "mpi",
}
"""Variables by which launchers announce the number of ranks, and the wire that joins them.

SLURM_NTASKS is not one: it is set in batch scripts and shells of an allocation too, without an srun.
"""

ASKED, SCRIPT = "asked for", "the script has initialised"

_current: Comm | None = None


def init(
    wire: str | None = None,
    *,
    deadline: float = DEADLINE,
    checksums: bool = False,
    streams: int = 1,
    survive: bool = False,
    min_ranks: int = 1,
    residuals: Literal["local", "buddy"] = "local",
    copy_every: int = 10,
) -> Comm:
    """Join the other ranks and return this rank's `Comm`; a second call returns the same one.

    Args:
        wire: "torch", "horovod", "mpi" or "local". None takes the library that the script has initialised (Horovod or
            torch.distributed), else the environment variable DGCOPT_WIRE, else the wire by the launcher's environment
            variables: horovodrun -> horovod, torchrun -> torch, mpirun -> mpi, srun -> torch, none -> local.
        deadline: seconds after which a rank that waits for another gives up with an error.
        checksums: verify every message of an exchange: a damaged one raises PayloadError. Equal on all ranks. Costs 4
            bytes per message, a CRC-32 of every byte on the CPU of sender and receiver (CUDA tensors are copied there),
            and another small round after each allreduce.
        streams: number of connections to each other rank among which exchanges are divided, for links of high latency,
            which one TCP connection does not fill. The wire "torch" only; equal on all ranks. Large messages are cut,
            so sums of three or more ranks can have other last bits than over one connection. For CUDA tensors it sets
            NCCL_SOCKET_NTHREADS, unless the variable is set already.
        survive: continue after ranks are lost, in the same processes, and admit restarted ranks; for scripts that
            `dgcopt run --survive` starts (docs/survive.md). The wire "torch" over Gloo only. In a process without a
            launcher it has no effect.
        min_ranks: with `survive`, fewer ranks do not continue: they wait for others until the deadline, then raise
            QuorumLost.
        residuals: with `survive`, "local" loses the residual of a lost rank. "buddy" keeps a copy of each rank's
            residual on the next rank, which adds it to its own if that rank is lost.
        copy_every: with "buddy", steps between two copies. A copy costs 2 bytes per parameter on the wire and in
            memory. With a higher number, more unsent gradients of a lost rank are lost, and more coordinates that it
            has sent since the copy count twice.

    The logger "dgcopt" logs the choice and its reason. Raises ConfigError if variables of the environment contradict
    each other, or if a launcher announces more ranks than have joined, unless `wire` is "local"; CommError if the ranks
    do not meet; MismatchError if they differ in `checksums` or `streams`.
    """
    global _current
    _renew()
    if _current is not None:
        if wire is not None and wire != _current.wire:
            raise ConfigError(f"dgcopt.init({wire!r}): this process has already joined over {_current.wire!r}")
        if checksums and not _current.checksums:
            raise ConfigError(
                "dgcopt.init(checksums=True): this process has already joined without them. Pass it in the first call"
            )
        if streams not in (1, _current.streams):
            raise ConfigError(
                f"dgcopt.init(streams={streams}): this process has already joined with {_current.streams}; say so the "
                f"first time"
            )
        if survive and not _current.survives and (STORE in os.environ or _current.wire != "local"):
            raise ConfigError(
                "dgcopt.init(survive=True): this process has already joined without it. Pass it in the first call"
            )
        return _current
    check_positive(deadline, "deadline")
    check_flag(checksums, "checksums")
    check_whole(streams, "streams", 1)
    check_flag(survive, "survive")
    check_whole(min_ranks, "min_ranks", 1)
    check_whole(copy_every, "copy_every", 1)
    if residuals not in ("local", "buddy"):
        raise ConfigError(f'residuals must be "local" or "buddy", not {residuals!r:.200}')
    if residuals == "buddy" and not survive:
        raise ConfigError('residuals="buddy" copies residuals for ranks that survive others: set survive=True too')
    if survive and (STORE in os.environ or wire is not None or _detect(os.environ)[0] != "local"):
        _current = _surviving(wire, Rules(min_ranks, deadline=deadline), streams)
        _current.verify(checksums)
        _current.copy_residuals(copy_every if residuals == "buddy" else 0)
        return _current
    chosen, reason = (wire, ASKED) if wire is not None else _detect(os.environ)
    if chosen not in WIRES:
        raise ConfigError(f"unknown wire {chosen!r} ({reason}); the wires are {', '.join(WIRES)}")
    announced = {} if chosen == "local" and reason in (ASKED, "DGCOPT_WIRE") else _announced(os.environ)
    comm = _makers[chosen](deadline)
    # an elastic rank keeps the variables of its start; a script may itself have joined some of the ranks
    if not (comm.elastic or (comm.size > 1 and reason.startswith(SCRIPT))):
        _check_all_joined(comm, announced, f"{chosen} ({reason})")
    check_alike(comm, checksums, streams)
    comm.verify(checksums)
    comm.spread(streams)
    _current = comm
    log.info(
        "dgcopt: wire %s (%s): rank %d of %d, local rank %d of %d, node %d of %d",
        *(chosen, reason, _current.rank, _current.size, _current.local_rank, _current.local_size),
        *(_current.node, _current.nodes),
    )
    return _current


def _surviving(wire: str | None, rules: Rules, streams: int) -> Comm:
    """Join ranks of which some may be lost. Raises ConfigError if that is impossible."""
    if wire not in (None, "torch") or streams != 1:
        raise ConfigError(
            "dgcopt.init(survive=True) has the wire 'torch' and one connection: leave wire and streams out"
        )
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "dgcopt.init(survive=True) makes process groups of its own, one set per membership: leave "
            "torch.distributed.init_process_group out of the script"
        )
    from .surviving import SurvivingComm

    comm = SurvivingComm.from_environment(os.environ, rules)
    atexit.register(comm.close)  # so that the other ranks need not wait for this one
    log.info("dgcopt: wire torch, with survivors: %s", comm)
    return comm


def _announced(env: Mapping[str, str]) -> dict[str, int]:
    """Return the number of ranks by the variable that announces it. Raises ConfigError if it is not a number."""
    present = {name for name in SIZES if name in env}
    # ranks of mpirun may be children of daemons, one on each machine, that srun has started
    if "SLURM_PROCID" not in env or any(SIZES[name] == "mpi" for name in present):
        present.discard("SLURM_STEP_NUM_TASKS")
    return {name: _number(env, name, 1) for name in sorted(present)}


def _check_all_joined(comm: Comm, announced: Mapping[str, int], how: str) -> None:
    """Raise ConfigError if a launcher announces more ranks than have joined."""
    for name, size in announced.items():
        if size > comm.size:
            comm.close()
            wire = SIZES[name]
            remedy = f"Choose the wire {wire!r} (DGCOPT_WIRE={wire})"
            if comm.wire == wire:
                remedy = "Let dgcopt.init() join the ranks, or all of them in the script"
                remedy = "Install mpi4py for the MPI of this launcher, or use torchrun" if wire == "mpi" else remedy
            raise ConfigError(
                f"over {how} only {comm.size} of {size} ranks joined ({name}={size}): each part would train by itself. "
                f"{remedy}; unset {name} if it is left over from elsewhere, or set DGCOPT_WIRE=local to train alone"
            )


def _number(env: Mapping[str, str], name: str, least: int = 0, most: int = 2**63 - 1) -> int:
    """Return a variable's value as a whole number. Raises ConfigError for anything else."""
    text = env[name]
    if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
        numbers = f"of at least {least}" if most == 2**63 - 1 else f"from {least} to {most}"
        raise ConfigError(
            f"the environment variable {name} is {text!r:.200}, and must be a whole number {numbers}: start with a "
            f"launcher, which sets it, or correct or unset it"
        )
    return int(text)


def check_alike(comm: Comm, checksums: bool, streams: int) -> None:
    """Raise MismatchError unless all ranks have the same settings; others would misread each other's messages."""
    if comm.elastic:
        return
    mine = torch.tensor([checksums, streams], device="cpu")
    said = comm.run(AllGather(mine, group="agreement", label="settings of the wire"))
    if bool((said != said[0]).any()):
        comm.close()
        if len(said[:, 0].unique()) > 1:
            ranks = said[:, 0].nonzero().flatten().tolist()
            raise MismatchError(
                f"rank {comm.rank}: only rank(s) {ranks} of {comm.size} called dgcopt.init(checksums=True)"
            )
        raise MismatchError(
            f"rank {comm.rank}: ranks called dgcopt.init(streams=...) with {said[:, 1].tolist()}, by rank"
        )


def current_comm(given: Comm | None = None) -> Comm:
    """Return `comm` if given, else that of `init`.

    Joins if `init` has not been called, and again if the library was restarted.

    Raises ConfigError for any other object.
    """
    if isinstance(given, Comm):
        return given
    if given is not None:
        raise ConfigError(
            f"comm must be the result of dgcopt.init(), or None, not {given!r:.200}. For some of the ranks: "
            f"DistributedOptimizer(process_set=[...]), or comm=dgcopt.init().among([...])"
        )
    _renew()
    return _current if _current is not None else init()


def _renew() -> None:
    """Join again after something else, such as `hvd.elastic.run`, has restarted or ended the library."""
    global _current
    if _current is not None and (_current.is_void() or _current.has_ended()):
        left = _current
        shutdown()
        try:
            init(left.wire, deadline=left.deadline, checksums=left.checksums, streams=left.streams)
        except CommError:  # the next attempt needs the settings, too
            _current = left
            raise


def has_joined() -> bool:
    """Return True if `init` has been called, and `shutdown` not since."""
    return _current is not None


def wire_in_use() -> str:
    """Return the name of the wire that this process has joined by, or that `init` would choose."""
    return _current.wire if _current is not None else _detect(os.environ)[0]


def shutdown() -> None:
    """Clear the current comm, so that `init` joins again; end torch.distributed if `init` started it."""
    global _current
    if _current is not None:
        _current.close()
    _current = None


def _detect(env: Mapping[str, str]) -> tuple[str, str]:
    """Return the wire and the reason. A library that the script has started comes before the launcher's."""
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        return "horovod", f"{SCRIPT} Horovod"
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return "torch", f"{SCRIPT} torch.distributed"
    if "DGCOPT_WIRE" in env:
        return env["DGCOPT_WIRE"], "DGCOPT_WIRE"
    if "HOROVOD_RANK" in env:
        return "horovod", "started by horovodrun with Gloo"
    if "TORCHELASTIC_RUN_ID" in env:  # also where mpirun or srun has started one torchrun on each machine
        _check_torchrun(env)
        return "torch", "started by torchrun"
    if "OMPI_COMM_WORLD_SIZE" in env:
        # horovodrun's MPI controller leaves no variable of its own, but these two options of its mpirun command.
        if env.get("OMPI_MCA_pml") == "ob1" and env.get("OMPI_MCA_btl") == "^openib":
            return "horovod", "started by horovodrun with MPI; DGCOPT_WIRE=mpi to use plain MPI"
        return "mpi", "started by mpirun; DGCOPT_WIRE=horovod to use Horovod"
    if "MV2_COMM_WORLD_SIZE" in env:
        return "mpi", "started by MVAPICH"
    if "RANK" in env or "WORLD_SIZE" in env:
        _check_torchrun(env)
        return "torch", "started by torchrun"
    # MPICH's and Intel MPI's daemons, and shells, are tasks of srun too, with another number of ranks
    is_of_srun = "PMI_SIZE" not in env or env["PMI_SIZE"] == env.get("SLURM_STEP_NUM_TASKS")
    if "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env and is_of_srun:
        return "torch", "started by srun"
    if "PMI_SIZE" in env or "PMIX_RANK" in env:
        return "mpi", "started by an MPI launcher"
    return "local", "no launcher"


def _check_torchrun(env: Mapping[str, str]) -> None:
    """Raise ConfigError unless all variables of torchrun are set."""
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]:
        raise ConfigError(
            f"the wire 'torch' needs torchrun's variables, and {', '.join(missing)} is missing: start with torchrun, "
            f"or choose another wire by dgcopt.init(wire=...) or DGCOPT_WIRE: 'local' for a single process"
        )


def _torch(deadline: float) -> Comm:
    from .torch import TorchComm

    env = os.environ
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return TorchComm(deadline=deadline)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if name in env:
            _number(env, name)
    if "RANK" not in env and "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
        size = _number(env, "SLURM_STEP_NUM_TASKS", 1)
        rank = _number(env, "SLURM_PROCID", most=size - 1)
        return TorchComm(init_method=slurm_meeting_place(env), rank=rank, size=size, deadline=deadline)
    _check_torchrun(env)
    _number(env, "RANK", most=_number(env, "WORLD_SIZE", 1) - 1)
    _number(env, "MASTER_PORT", most=65535)
    return TorchComm(deadline=deadline)


def _horovod(deadline: float) -> Comm:
    from .horovod import HorovodComm

    if "HOROVOD_RANK" in os.environ:
        if "HOROVOD_SIZE" not in os.environ:  # Horovod would train alone
            raise ConfigError(
                "the wire 'horovod' needs horovodrun's variables, and HOROVOD_SIZE is missing beside HOROVOD_RANK: "
                "start with horovodrun, unset HOROVOD_RANK if it is left over from elsewhere, or set DGCOPT_WIRE=local "
                "to train alone"
            )
        _number(os.environ, "HOROVOD_RANK", most=_number(os.environ, "HOROVOD_SIZE", 1) - 1)
    return HorovodComm(deadline)


def _mpi(deadline: float) -> Comm:
    from .mpi import MPIComm

    return MPIComm(deadline=deadline)


_makers: dict[str, Callable[[float], Comm]] = {
    "torch": _torch,
    "horovod": _horovod,
    "mpi": _mpi,
    "local": LocalComm,
}


def slurm_meeting_place(env: Mapping[str, str]) -> str:
    """Return the rendezvous of an srun step: its first host, and a port derived from the job and step.

    MASTER_ADDR and MASTER_PORT override. Raises ConfigError if the node list cannot be read.
    """
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
    first = re.match(r"(?:[^,\[\]]|\[[^\]]+\])+", nodes)  # rack[1-2]n[01,03] is one word of the list
    if "MASTER_ADDR" not in env and first is None:
        raise ConfigError("srun did not say on which nodes the step runs (SLURM_STEP_NODELIST): set MASTER_ADDR")
    host = env.get("MASTER_ADDR") or (re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else "")
    host = f"[{host}]" if ":" in host else host  # an address of IPv6
    job, step = (_number(env, name) if name in env else 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = _number(env, "MASTER_PORT", most=65535) if "MASTER_PORT" in env else 20000 + (job * 31 + step) % 20000
    return f"tcp://{host}:{port}"
