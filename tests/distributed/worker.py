"""One rank: joins the others, runs the named scenarios one after another, and records what came of each.

worker.py NAME...          record errors and go on; exit code 1 if there were any
worker.py --bare NAME...   let errors end the process, as they would end a user's script
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

import dgcopt
from dgcopt.collectives import AllGather


def main() -> int:
    bare, names = sys.argv[1] == "--bare", [name for name in sys.argv[1:] if name != "--bare"]
    if "DGCOPT_TEST_JOIN_FIRST" in os.environ:
        join(os.environ["DGCOPT_TEST_JOIN_FIRST"])
    comm = dgcopt.init(deadline=float(os.environ.get("DGCOPT_TEST_DEADLINE", "30")))
    if bare:
        import failures

        for name in names:
            getattr(failures, name)(comm)
        return 0
    from scenarios import SCENARIOS

    failed = False
    path = Path(os.environ["DGCOPT_TEST_RECORDS"]) / f"rank-{comm.rank}.jsonl"
    for name in names:
        start, cpu, record = time.monotonic(), time.process_time(), {"scenario": name, "rank": comm.rank, "wire": comm.wire}
        try:
            record["result"] = SCENARIOS[name](comm)
        except Exception as error:
            failed = True
            record["error"] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        record["seconds"] = round(time.monotonic() - start, 3)
        record["cpu"] = round(time.process_time() - cpu, 3)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        # if a rank left the scenario half-way, this cannot succeed, and what follows is not tried
        failed = bool(comm.run(AllGather(torch.tensor([failed]), label=f"end of {name}")).any())
    return int(failed)


def join(wire: str) -> None:
    """Start the library as a script would that was written before dgcopt."""
    if wire == "torch":
        torch.distributed.init_process_group("gloo")
    elif wire.startswith("horovod"):
        import horovod.torch as hvd

        hvd.init()
    else:
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
