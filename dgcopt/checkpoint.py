"""Checkpoints that hold every rank's memory, appear all at once or not at all, and are verified before they are used.

    directory/
      step-00000100/
        rank-0.pt  rank-1.pt ...     each rank's state, by `torch.save`, read with `weights_only=True`
        manifest.json                step, number of ranks, SHA-256 of every file, versions, writer; written last

The directory must be shared by all machines. A checkpoint can be loaded by more or fewer ranks than wrote it: their
memory is resharded (`reshare`). Only folders with a manifest of dgcopt are ever replaced or deleted.

One run at a time may write to a directory. Every process remembers the identities of the checkpoints that it found when
it first used the directory or last loaded from it, and of those that its ranks have saved since. Any other checkpoint
is another running job's, and `save` refuses. A killed process leaves no such record, so a new process can continue
from any directory.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import os
import pickle
import re
import secrets
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checks import check_whole
from .collectives import AllGather, AllReduce, Broadcast, Collective
from .comm import Comm, current_comm
from .errors import CheckpointError, ConfigError
from .flat.store import Store
from .version import FORMAT, __version__

__all__ = [
    "SHARD",
    "STATE_KEY",
    "check_owner",
    "check_shard",
    "kept_by",
    "load",
    "own_part",
    "put_mark",
    "reshare",
    "save",
    "take_mark",
    "unmarked",
]

log = logging.getLogger("dgcopt")

STATE_KEY = "dgcopt"
"""Key of dgcopt's entry in an optimizer's `state_dict()`: rank, world_size, step, order and memory."""

MARKS = {
    STATE_KEY: ("dgcopt_step", "dgcopt_held", "the unsent gradients of all ranks"),
    "averaging": ("dgcopt_averaging_step", "dgcopt_averaging_kept", "the memory of averaging"),
}
"""For each entry in an optimizer's state: the marks for step and number of tensors, and the tensors' description. Marks
are kept in the first parameter group, since torch passes unknown keys on."""

SHARD = "shard"
"""Key for a rank's shard of sharded parameters: "rank" of "size" within the replica, "place"."""

THROUGH_TORCH = (
    "Save dgcopt.sharded.state(optimizer) through torch.distributed.checkpoint, and load it by dgcopt.sharded.load: "
    "any mesh can load that."
)

HOW_TO_KEEP = (
    "To keep them, save with dgcopt.checkpoint.save, which writes every rank's, and load with dgcopt.checkpoint.load."
)

MANIFEST = "manifest.json"
FINISHED, REPLACED, UNFINISHED = "step-", ".replaced-step-", ".unfinished-step-"
LARGEST_STEP = 2**63 - 1
"""Ranks exchange steps as int64."""

_known: dict[str, set[str]] = {}
"""Identities of known checkpoints by directory: found by this process, or saved with its ranks."""


def save(directory: str | Path, state: dict[str, Any], step: int, comm: Comm | None = None, keep: int = 2) -> Path:
    """Write one checkpoint of all ranks; collective. Returns its folder.

    Args:
        directory: the folder for checkpoints, shared by all machines; made if missing.
        state: this rank's state: tensors, numbers, text, and lists or dicts of them, such as
            `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`.
        step: names the checkpoint; a later one must be larger, and the same one again replaces it.
        comm: the wire; None is that of `dgcopt.init()`.
        keep: number of checkpoints to keep, this one included. Only those with intact checksums count; each rank
            verifies its share. Older ones are deleted. Folders without a manifest of dgcopt, and other files in a
            checkpoint's folder, are not.

    An interrupted save leaves the previous checkpoint valid; the next save deletes its leftovers. Raises
    CheckpointError on every rank if any could not write (disk full, no permission, directory not shared); if the
    directory has a valid checkpoint of a later step, such as an earlier run's, which would be loaded in place of this
    one (damaged ones do not count); if the folder of this step is not a checkpoint of dgcopt; and if another run has
    written to the directory since this one first used it or last loaded from it.
    """
    _check_directory(directory)
    if not isinstance(state, dict):
        raise ConfigError(f"state must be a dict, such as {{'model': model.state_dict()}}, not {state!r:.200}")
    check_whole(keep, "keep", 1)
    if check_whole(step, "step", 0) > LARGEST_STEP:
        raise ConfigError(f"step must be at most {LARGEST_STEP}, not {step}: number steps from 0")
    comm = current_comm(comm)
    return comm.drive(_save(Path(directory), state, step, comm, keep))


def load(directory: str | Path, comm: Comm | None = None) -> tuple[int, dict[str, Any]] | None:
    """Return the newest checkpoint that is valid on every rank as `(step, this rank's state)`; collective.

    None if the `directory` holds no checkpoint, or is missing. Damaged and half-written ones are skipped in favour of
    older ones, with a log warning. At the same world size every rank gets its own state, bit for bit; at another, see
    `reshare`. `comm` is the wire; None is that of `dgcopt.init()`. Raises CheckpointError, with the newest one's fault,
    if all are damaged, and ConfigError for a file, or the folder of one checkpoint.
    """
    _check_directory(directory)
    comm = current_comm(comm)
    return comm.drive(_load(Path(directory), comm))


def _check_directory(directory: Any) -> None:
    if not isinstance(directory, str | os.PathLike):
        raise ConfigError(f"directory must be a path of checkpoints, not {directory!r:.200}")
    if "\0" in str(directory):
        raise ConfigError(f"directory {str(directory)!r:.200} contains a NUL character: give a path without it")
    path = Path(directory)
    if path.is_file() or (path / MANIFEST).exists():
        found = "a file" if path.is_file() else "one checkpoint"
        raise ConfigError(f"{directory} is {found}: give the directory of checkpoints, here maybe {path.parent}")


def reshare(states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Return the state for rank `rank` of `size`, from the `states` of all ranks that saved.

    The state is that of old rank `rank % len(states)`, with its random-number states: with more ranks than before, seed
    them anew. The optimizers' memory in it is resharded with its sum over ranks preserved: rank r gets the sum of old
    ranks r, r + size, ..., or zeros if there are none. Unsent memory moves parameters by lr * sum / size, so with lr
    proportional to the number of ranks (the linear scaling rule) its effect is unchanged. The lr in the state is the
    saved one: scale it.

    Of sharded parameters, ranks must be numbered replica by replica, as in a mesh ("replicate", "shard"), and shard
    groups must keep their size: memory is shared out among the ranks of one shard.

    Nothing in `states` is changed. They are used one at a time and only if needed, so they may be read on demand.
    Raises ConfigError for a rank that does not exist, CheckpointError for states that are not of one run, or whose
    shards these ranks cannot hold.
    """
    before = len(states)
    if not before or not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size} ranks cannot start from the states of {before}")
    first = states[rank % before]
    shards = _shards_in(first)
    if shards == 1:
        return _reshared(first, states, rank, size)
    if before % shards or size % shards:
        raise CheckpointError(
            f"the states are of parameters in {shards} shards, on {before} ranks, and {size} ranks are no multiple of "
            f"{shards}. {THROUGH_TORCH}"
        )
    of_shard = _OfOneShard(states, rank % shards, shards)
    return _reshared(of_shard[rank // shards % len(of_shard)], of_shard, rank // shards, size // shards)


class _OfOneShard(Sequence[dict[str, Any]]):
    """The states of the ranks that hold one shard, by replica."""

    def __init__(self, states: Sequence[dict[str, Any]], shard: int, shards: int) -> None:
        self._states, self._shard, self._shards = states, shard, shards

    def __len__(self) -> int:
        return len(self._states) // self._shards

    def __getitem__(self, replica: Any) -> Any:
        state = self._states[replica * self._shards + self._shard]
        for place, held in _held_in(state):
            found = (held.get(SHARD) or {}).get("rank", self._shard)
            if found != self._shard:
                raise CheckpointError(
                    f"{place} of rank {replica * self._shards + self._shard} is that of shard {found}, so ranks are "
                    f"not numbered replica by replica. {THROUGH_TORCH}"
                )
        return state


def _shards_in(state: dict[str, Any]) -> int:
    """Number of shards of the optimizers' parameters in a rank's state; 1 if they are whole."""
    return max(((held.get(SHARD) or {}).get("size", 1) for _, held in _held_in(state)), default=1)


def _reshared(first: dict[str, Any], states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Return the result of `reshare`; `first` is the state of old rank `rank % len(states)`."""
    before = len(states)
    mine = copy.deepcopy(first)
    kept = dict(_kept_in(mine, rank % before, before))
    if rank % before and kept:
        # some compressors keep shared state on the first rank of each machine only, and rank 0 is always one
        for place, held in _kept_in(states[0], 0, before):
            if place in kept and "shared" in held:
                kept[place]["shared"] = copy.deepcopy(held["shared"])
    for held in kept.values():
        held |= {"rank": rank, "world_size": size}
        for by_name in held["memory"].values() if rank >= before else ():
            by_name |= {name: torch.zeros_like(tensor) for name, tensor in by_name.items()}
    for other in range(rank + size, before, size):
        theirs = dict(_kept_in(states[other], other, before))
        if theirs.keys() != kept.keys():
            raise CheckpointError(f"ranks {rank} and {other} gave the memory of other optimizers: {[*kept], [*theirs]}")
        for place, held in theirs.items():
            for kind, by_name in held["memory"].items():
                sums = kept[place]["memory"].setdefault(kind, {})
                for name, tensor in by_name.items():
                    if name in sums and sums[name].shape != tensor.shape:
                        raise CheckpointError(f"{place}: {kind} of {name!r} has other shapes on ranks {rank}, {other}")
                    sums[name] = sums[name] + tensor if name in sums else tensor.clone()
    return mine


# -- state that one rank has saved for all ----------------------------------------------------------------------------


def kept_by(
    rank: int,
    size: int,
    step: int = 0,
    order: Sequence[str] = (),
    memory: dict[str, dict[str, Tensor]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the `STATE_KEY` entry of rank `rank` of `size`, for a checkpoint; by default without memory.

    `order` is the order of the gradients, `memory` the tensors by kind and parameter name.
    """
    kept = {"rank": int(rank), "world_size": size, "step": step, "order": list(order)}
    return {**Store().state(), **kept, "memory": memory or {}, **more}


def check_owner(state: dict[str, Any], rank: int, size: int, owner: str, why: str) -> None:
    """Raise ConfigError if a state is another rank's; `owner` and `why` complete its text."""
    if (state["rank"], state["world_size"]) != (rank, size):
        raise ConfigError(
            f"this state{owner} belongs to rank {state['rank']} of {state['world_size']} and cannot be loaded on rank "
            f"{rank} of {size}: {why}"
        )


def check_shard(state: dict[str, Any], mine: dict[str, Any] | None) -> None:
    """Raise ConfigError if a state with memory is of other shards than `mine`; None is whole parameters."""
    theirs = state.get(SHARD)
    if theirs == mine or not (theirs or any(state["memory"].values())):
        return
    if not theirs or not mine:
        raise ConfigError(
            f"this state is of {_shard_in_words(theirs)}, and this rank has {_shard_in_words(mine)}. {THROUGH_TORCH}"
        )
    apart = [name for name in {**theirs["place"], **mine["place"]} if _place(theirs, name) != _place(mine, name)]
    more = f": parameter {apart[0]!r} lies elsewhere" if apart else ""
    raise ConfigError(
        f"this state is of {_shard_in_words(theirs)}, replica {state['rank']} of {state['world_size']}, and this rank "
        f"has {_shard_in_words(mine)}{more}. Load the file that this rank has saved (dgcopt.checkpoint.load). "
        f"Shards of another mesh: {THROUGH_TORCH[0].lower()}{THROUGH_TORCH[1:]}"
    )


def _shard_in_words(shard: dict[str, Any] | None) -> str:
    return f"shard {shard['rank']} of {shard['size']}" if shard else "whole parameters"


def _place(shard: dict[str, Any], name: str) -> Any:
    return shard["place"].get(name)


def own_part(state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return the part of `state` that rank `rank` of `size` may load: without memory if another rank has saved it.

    Logs a warning for lost memory. In training scripts rank 0 often saves one state for all ranks.
    """
    if (state["rank"], state["world_size"]) == (rank, size):
        return state
    lost = sorted(kind for kind, by_name in state["memory"].items() if by_name)
    if lost:
        log.warning(
            "dgcopt: rank %d of %d loads the state of rank %d of %d: step and shared state continue, but the unsent "
            "gradients of rank %d (%s) are not in it and start from zero. %s",
            *(rank, size, state["rank"], state["world_size"], rank, ", ".join(lost), HOW_TO_KEEP),
        )
    return {**state, "rank": int(rank), "world_size": size, "memory": {}}


def put_mark(state_dict: dict[str, Any], entry: str, step: int, *kept: dict[str, dict[str, Tensor]]) -> None:
    """Note the step and the number of `kept` tensors in a parameter group, so that the loss of `entry` is noticed."""
    step_mark, count_mark, _ = MARKS[entry]
    count = sum(len(by_name) for memory in kept for by_name in memory.values())
    state_dict["param_groups"][0] |= {step_mark: step, count_mark: count}


def unmarked(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter group without marks."""
    marks = {mark for step, count, _ in MARKS.values() for mark in (step, count)}
    return {key: value for key, value in group.items() if key not in marks}


def take_mark(groups: list[dict[str, Any]], entry: str, rank: int, tell: Callable[..., object] = log.warning) -> int:
    """Remove an entry's mark from parameter groups, and return the step, or 0. Log by `tell` if memory is lost."""
    step_mark, count_mark, lost = MARKS[entry]
    step, count = groups[0].pop(step_mark, 0), groups[0].pop(count_mark, 0)
    if step and count:
        tell(
            "dgcopt: rank %d: the optimizer's state is of step %d, and training continues from it, but %s (%d tensors) "
            "did not come along and starts anew: it was loaded before the optimizer was wrapped, or lost its "
            "entry %r on the way. %s",
            *(rank, step, lost, count, entry, HOW_TO_KEEP),
        )
    return step


# -- saving ----------------------------------------------------------------------------------------------------------


def _save(
    directory: Path, state: dict[str, Any], step: int, comm: Comm, keep: int
) -> Generator[Collective, Tensor, Path]:
    # rank 0's number is the identity; all ranks know it before the first write, as any may be rank 0 after a loss
    mine = torch.tensor([secrets.randbits(63)])
    numbers = yield AllGather(comm.to_wire(mine), label="checkpoint.save, which all ranks call")
    number = int(numbers.flatten()[0])
    _known_in(directory).add(_identity(number))
    final, unfinished, problem = directory / f"{FINISHED}{step:08d}", _unfinished(directory, step, number), ""
    if comm.rank == 0:
        try:
            _check_can_write(directory, step)
            _clear_leftovers(directory)
            _announce(unfinished, step, comm.size, number)
            _check_sole_writer(directory)
        except (OSError, CheckpointError) as error:
            problem = str(error)
    yield from _agree(comm, problem, f"cannot make {final}")
    digest = b""
    try:
        if not unfinished.is_dir():
            problem = (
                f"{unfinished} was made by rank 0 but does not exist here; all ranks must give the same step, and one "
                f"directory, which all machines must share"
            )
        else:
            digest = _write(unfinished / _part(comm.rank), state)
    except Exception as error:  # of any kind: the other ranks wait for this one's answer
        problem = str(error) or type(error).__name__
    yield from _agree(comm, problem, f"cannot write a checkpoint to {directory}")
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = (yield AllGather(comm.to_wire(mine), label="checksums of a checkpoint")).cpu()
    older: list[int] = []
    if comm.rank == 0:
        try:
            sums = [bytes(row.tolist()).hex() for row in digests]
            _check_sole_writer(directory)
            _write_text(unfinished / MANIFEST, _manifest(step, comm.size, number, sums))
            _flush_folder(unfinished)
            _put(unfinished, final, directory / f"{REPLACED}{step:08d}")
            older = [other for other, folder in _checkpoints(directory).items() if other < step and _is_ours(folder)]
        except (OSError, CheckpointError) as error:
            problem = str(error)
    yield from _agree(comm, problem, f"cannot complete the checkpoint {final}")
    yield from _prune(directory, older, keep, comm)
    return final


def _manifest(step: int, size: int, number: int, sums: list[str] | None = None) -> str:
    """Return the text of a manifest; without checksums, that of a save in progress."""
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    writer = f"process {os.getpid()} on {socket.gethostname()}, {written}"
    # first, so that a truncated manifest is still recognised
    fields: dict[str, Any] = {"dgcopt": __version__, "torch": torch.__version__, "format": FORMAT, "step": step}
    fields |= {"world_size": size, "identity": _identity(number), "writer": writer}
    return json.dumps(fields if sums is None else fields | {"sha256": sums}, indent=1)


def _identity(number: int) -> str:
    return f"{number:016x}"


def _unfinished(directory: Path, step: int, number: int) -> Path:
    return directory / f"{UNFINISHED}{step:08d}-{_identity(number)}"


def _check_can_write(directory: Path, step: int) -> None:
    """Raise CheckpointError if another run writes here, a valid checkpoint of a later step exists, which `load` would
    prefer, or the folder of this step is not dgcopt's.
    """
    _check_sole_writer(directory)
    for later, folder in _checkpoints(directory).items():
        if later <= step:
            break
        try:
            parts = _Parts(folder, _checksums(folder, later))
            for rank in range(len(parts)):
                parts.check(rank)
        except CheckpointError:
            continue
        raise CheckpointError(
            f"{folder} is of a later step than {step}, and would be loaded in its place: load it to continue from it, "
            f"delete it, or use another directory"
        )
    for name in (f"{FINISHED}{step:08d}", f"{REPLACED}{step:08d}"):
        if (directory / name).exists() and not _is_ours(directory / name):
            raise CheckpointError(
                f"{directory / name} is there and has no manifest of dgcopt, so it is not replaced: move or delete "
                f"it, or use another directory"
            )


def _check_sole_writer(directory: Path) -> None:
    """Raise CheckpointError if another run has written here, or is about to."""
    known = _known_in(directory)
    for identity, (folder, writer) in _identities(directory).items():
        if identity not in known:
            raise CheckpointError(
                f"{folder} is of another run ({writer}), which writes to {directory} at the same time as this one "
                f"(process {os.getpid()} on {socket.gethostname()}): each would delete and load the other's "
                f"checkpoints. Give each run its own directory, or end the other run and restart this one"
            )


def _announce(unfinished: Path, step: int, size: int, number: int) -> None:
    """Make the folder of a save in progress, with a manifest that names its writer."""
    unfinished.mkdir(parents=True)
    try:
        _write_text(unfinished / MANIFEST, _manifest(step, size, number))
    except BaseException:  # such as a full disk: without a manifest, no later save may delete it
        (unfinished / MANIFEST).unlink(missing_ok=True)
        unfinished.rmdir()
        raise


def _put(unfinished: Path, final: Path, replaced: Path) -> None:
    """Rename the new checkpoint into place. The replaced one can be loaded under its REPLACED name until then."""
    if final.exists():
        _remove(replaced)
        os.replace(final, replaced)
    os.replace(unfinished, final)  # fails if another run has made the same folder since
    _flush_folder(final.parent)
    _remove(replaced)


def _prune(directory: Path, older: list[int], keep: int, comm: Comm) -> Generator[Collective, Tensor, None]:
    """Delete the `older` checkpoints of rank 0's list, newest first, that are older than `keep` valid ones.

    The new checkpoint is one of these. Ranks verify the others together, each its share of files, and only if there
    are more than `keep` in all.
    """
    kept = 1
    while True:
        if comm.rank == 0 and kept >= keep:
            folders = _checkpoints(directory)
            for folder in [folders[step] for step in older if step in folders]:
                _remove(folder)
            older = []
        verify = older.pop(0) if kept + len(older) > keep else -1
        told = yield Broadcast(comm.to_wire(torch.tensor([verify])), label="checkpoint that may be kept")
        if (step := int(told)) < 0:
            return
        valid = torch.tensor([int(_share_is_valid(directory, step, comm))], dtype=torch.int32)
        kept += int((yield AllReduce(comm.to_wire(valid), op="min", label="checkpoint is kept")))


def _share_is_valid(directory: Path, step: int, comm: Comm) -> bool:
    """Return True if this rank's share of a checkpoint's files, `rank`, `rank + size`, ..., is undamaged."""
    try:
        folder = _checkpoints(directory)[step]
        parts = _Parts(folder, _checksums(folder, step))
        for rank in range(comm.rank, len(parts), comm.size):
            parts.check(rank)
    except (CheckpointError, KeyError):
        return False
    return True


def _clear_leftovers(directory: Path) -> None:
    """Delete the folders of interrupted saves, to free their space."""
    leftovers = [*directory.glob(UNFINISHED + "*")]
    leftovers += [path for path in directory.glob(REPLACED + "*") if path not in _checkpoints(directory).values()]
    for path in leftovers:
        if _is_ours(path):
            _remove(path)


def _remove(folder: Path) -> None:
    """Delete the files of a save, the manifest last, and the folder if it is empty then."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if re.fullmatch(r"rank-\d+\.pt", path.name):
                path.unlink()
        (folder / MANIFEST).unlink(missing_ok=True)
        folder.rmdir()


# -- owners of checkpoints --------------------------------------------------------------------------------------------


def _is_ours(folder: Path) -> bool:
    """Return True if a folder has a manifest of dgcopt, even a damaged one."""
    try:
        return b'"dgcopt"' in (folder / MANIFEST).read_bytes()
    except OSError:
        return False


def _identities(directory: Path) -> dict[str, tuple[Path, str]]:
    """Return the folder and the writer of every checkpoint, finished or not, by its identity."""
    found: dict[str, tuple[Path, str]] = {}
    for prefix in (FINISHED, REPLACED, UNFINISHED):
        for path in directory.glob(prefix + "*"):
            with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
                manifest = json.loads((path / MANIFEST).read_text())
                if isinstance(identity := manifest.get("identity"), str):
                    found[identity] = path, str(manifest.get("writer"))
    return found


def _known_in(directory: Path) -> set[str]:
    """Return the identities that this process knows in a directory; at first all."""
    place = os.path.realpath(directory)
    if place not in _known:
        _known[place] = {*_identities(directory)}
    return _known[place]


# -- loading ---------------------------------------------------------------------------------------------------------


def _load(directory: Path, comm: Comm) -> Generator[Collective, Tensor, tuple[int, dict[str, Any]] | None]:
    tried: list[str] = []
    below = LARGEST_STEP + 1
    _known_in(directory).update(_identities(directory))
    while True:
        steps = [step for step in _checkpoints(directory) if step < below] if comm.rank == 0 else []
        newest = torch.tensor([steps[0] if steps else -1], dtype=torch.int64)
        below = int((yield Broadcast(comm.to_wire(newest), label="checkpoint.load, which all ranks call")))
        if below < 0:
            if tried:
                raise CheckpointError(f"no checkpoint in {directory} can be used: {tried[0]}")
            return None
        state, problem = {}, ""
        try:
            state = _read(directory, below, comm)
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:  # of any kind: the other ranks wait for this one's answer
            problem = f"step-{below:08d} cannot be read ({type(error).__name__}: {error})"
        damaged = yield AllGather(comm.to_wire(torch.tensor([int(bool(problem))])), label="checkpoint is damaged")
        ranks = damaged.flatten().nonzero().flatten().tolist()
        if not ranks:
            return below, state
        tried.append(problem or f"{FINISHED}{below:08d} cannot be used by rank(s) {ranks}, which say why")
        if problem or comm.rank == 0:
            log.warning("dgcopt: rank %d passes over %s%08d: %s", comm.rank, FINISHED, below, tried[-1])


def _read(directory: Path, step: int, comm: Comm) -> dict[str, Any]:
    folder = _checkpoints(directory).get(step)
    if folder is None:
        raise CheckpointError(f"{directory / FINISHED}{step:08d} is not seen by rank {comm.rank}")
    parts = _Parts(folder, _checksums(folder, step))
    return parts[comm.rank] if len(parts) == comm.size else reshare(parts, comm.rank, comm.size)


class _Parts(Sequence[dict[str, Any]]):
    """The ranks' states, by rank. Each file is verified and read on access, so one at a time is in memory."""

    def __init__(self, folder: Path, sums: list[str]) -> None:
        self.folder, self.sums = folder, sums

    def __len__(self) -> int:
        return len(self.sums)

    def check(self, rank: int) -> Path:
        """Return a rank's file. Raises CheckpointError if it is damaged."""
        path = self.folder / _part(rank)
        try:
            intact = _sha256(path).hex() == self.sums[rank]
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error
        if not intact:
            raise CheckpointError(f"{path} is damaged: its checksum is not the one in {MANIFEST}")
        return path

    def __getitem__(self, rank: Any) -> Any:
        path = self.check(rank)
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises errors of many kinds
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"{path} cannot be read ({reason})") from error


def _checksums(folder: Path, step: int) -> list[str]:
    """Return the SHA-256 of every rank's file from the manifest. Raises CheckpointError for an invalid manifest."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is missing or damaged ({error})") from error
    fields = manifest if isinstance(manifest, dict) else {}
    numbers = [fields.get(name) for name in ("format", "step", "world_size")]
    sums = fields.get("sha256")
    if not isinstance(sums, list) or not sums or any(type(number) is not int for number in numbers):
        raise CheckpointError(f"{path} is damaged: it lacks format, step, world_size or sha256")
    if numbers[0] != FORMAT:
        raise CheckpointError(
            f"{path} has format {numbers[0]}, written by dgcopt {fields.get('dgcopt')}; dgcopt {__version__} reads "
            f"format {FORMAT}. Load it with the version that wrote it, or save to another directory and start anew"
        )
    if numbers[1:] != [step, len(sums)] or any(not isinstance(digest, str) for digest in sums):
        raise CheckpointError(f"{path} is damaged: it contradicts itself, or the name of its folder")
    return sums


def _kept_in(value: Any, rank: int, size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the STATE_KEY entries in a nested `value` with their places. Raises CheckpointError for another rank's."""
    for place, held in _held_in(value):
        if (held["rank"], held["world_size"]) != (rank, size):
            raise CheckpointError(
                f"{place} was given by rank {rank} of {size}, but is that of rank {held['rank']} of "
                f"{held['world_size']}: save each rank's own state"
            )
        yield place, held


def _held_in(value: Any, place: str = "state") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every STATE_KEY entry in a nested `value` with its place."""
    if isinstance(value, dict):
        held = value.get(STATE_KEY)
        if isinstance(held, dict) and {"rank", "world_size", "memory"} <= held.keys():
            yield place, held
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        if key != STATE_KEY:
            yield from _held_in(item, f"{place}[{key!r}]")


# -- files -----------------------------------------------------------------------------------------------------------


def _checkpoints(directory: Path) -> dict[int, Path]:
    """Return the folders of the finished checkpoints by step, newest first."""
    found: dict[int, Path] = {}
    for prefix in (REPLACED, FINISHED):  # the latter is newer if there are both
        for path in directory.glob(prefix + "*") if directory.is_dir() else ():
            step = path.name[len(prefix) :]
            if step.isdecimal() and int(step) <= LARGEST_STEP:
                found[int(step)] = path
    return dict(sorted(found.items(), reverse=True))


def _part(rank: int) -> str:
    return f"rank-{int(rank)}.pt"


def _agree(comm: Comm, problem: str, task: str) -> Generator[Collective, Tensor, None]:
    """Raise CheckpointError on every rank if any rank has a problem; that rank's error describes it."""
    ranks = yield AllGather(
        comm.to_wire(torch.tensor([int(bool(problem))])), label="checkpoint.save, which all ranks call"
    )
    affected = ranks.flatten().nonzero().flatten().tolist()
    if problem:
        raise CheckpointError(f"rank {comm.rank}: {task}: {problem}")
    if affected:
        raise CheckpointError(f"rank {comm.rank}: {task}: rank(s) {affected} failed, and say why")


def _write(path: Path, state: dict[str, Any]) -> bytes:
    """Write, fsync, and return the SHA-256."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # which reads no tensors
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"the state holds {named[1] if named else 'something'}, which could not be loaded again: it may hold "
            f"tensors, numbers, text, and lists or dicts of them. Give state_dict()s in place of objects, such as "
            f"model.state_dict()"
        ) from error
    except Exception as error:  # torch.load raises errors of many kinds
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read back after it was written ({reason}): check the disk") from error
    return _sha256(path)


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sha256(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.digest()


def _flush_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets a folder be opened
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
