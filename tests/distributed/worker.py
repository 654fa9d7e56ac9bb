"""One rank: joins the others, runs the named scenarios one after another, and records what came of each.

worker.py NAME...          record errors and go on; exit code 1 if there were any
worker.py --bare NAME...   let errors end the process, as they would end a user's script
"""

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

import dgcopt
from dgcopt.collectives import AllGather
from dgcopt.comm import current_comm
from tests.support.meeting import together

JOIN_FIRST = os.environ.get("DGCOPT_TEST_JOIN_FIRST", "")
SHARING = ("2 x 2 machines", "contract", "asynchronous")
"""Scenarios that share groups with later ones, or leave a thread that uses them."""


def main() -> int:
    bare, names = sys.argv[1] == "--bare", [name for name in sys.argv[1:] if name != "--bare"]
    if bare:  # the deadline is short, and none of them waits for another that is still loading torch
        together("here")
    join(JOIN_FIRST)
    comm = dgcopt.init(deadline=float(os.environ.get("DGCOPT_TEST_DEADLINE", "30")))
    if bare:
        from tests.distributed import failures

        if not failures.is_last(comm):  # launchers would often end them before they can say whom they have lost
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for name in names:
            getattr(failures, name)(comm)
        return 0
    from tests.distributed.scenarios import asynchronous
    from tests.distributed.scenarios.asynchronous.replica import leave_while_others_exchange, threads
    from tests.distributed.scenarios.catalogue import SCENARIOS as scenarios

    if any(name.startswith("sharded") for name in names):
        from tests.distributed.scenarios.in_shards import SCENARIOS as scenarios

    torch.optim.SGD([torch.zeros(1)], lr=0.1)

    used, kept = comm, set(groups())

    def agree(name: str, error: str) -> bool:
        """Whether a rank has failed; if one left the scenario half-way this raises, and nothing more is tried."""
        nonlocal used
        flag = AllGather(torch.tensor([error != ""]), label=f"end of {name}")
        any_failed = name != names[-1] and bool(current_comm().run(flag).any())
        new = set(groups()) - kept
        if current_comm() is not used or name.startswith(SHARING):
            used = current_comm()
            kept.update(new)
        else:
            for group in new:
                torch.distributed.destroy_process_group(group)
        return any_failed

    # some scenarios leave the wire and join it again
    failed = run(names, lambda name: scenarios[name](current_comm()), agree, rank=comm.rank, wire=comm.wire)
    left = leave_while_others_exchange(current_comm()) if names[-1] in asynchronous.SCENARIOS else None
    if JOIN_FIRST:
        dgcopt.shutdown()
        failed |= threads() > 0
        del left
    if JOIN_FIRST == "torch":
        torch.distributed.destroy_process_group()
    return int(failed)


def groups() -> list[Any]:
    """Return torch's process groups but those of meshes, which scenarios share.

    Gloo's threads wake up a hundred times a second for each of them, also where nothing uses it any more.
    """
    if not torch.distributed.is_initialized():
        return []
    return [group for group in distributed_c10d._world.pg_map if not group.group_desc.startswith("mesh")]


def run(
    names: Sequence[str], scenario: Callable[[str], Any], failed: Callable[[str, str], bool], *, rank: int, **facts: Any
) -> bool:
    """Append a record of each scenario to this rank's file, and return whether one of them failed.

    `failed` is told of the scenario's name and error, and says whether it failed on any rank.
    """
    path, any_failed = Path(os.environ["DGCOPT_TEST_RECORDS"]) / f"rank-{rank}.jsonl", False
    for name in names:
        # what is loaded, and what is left of other scenarios, need not be looked through ever again
        gc.collect()
        gc.freeze()
        start, record = time.monotonic(), {"scenario": name, "rank": rank, **facts}
        try:
            record["result"] = scenario(name)
        except BaseException as error:
            record["error"] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        record["seconds"] = round(time.monotonic() - start, 3)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        any_failed |= failed(name, record.get("error", "")) or "error" in record
    return any_failed


def join(library: str) -> None:
    """Start a library as a script would that was written before dgcopt."""
    if library == "torch":
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    elif library.startswith("horovod"):
        import horovod.torch as hvd

        hvd.init()
    elif library == "mpi":
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
