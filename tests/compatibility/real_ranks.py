"""One of two real ranks: carries out the named trials, and records what came of each, until only one of them fails."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import dgcopt
from tests.compatibility import trials  # noqa: F401
from tests.compatibility.table import TRIALS, verdict
from tests.distributed.worker import run


class FailedAlone(Exception):
    """What follows is tried in another launch."""


def main() -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    comm = dgcopt.init(deadline=45)
    store = dist.distributed_c10d._get_default_store()

    def failed(name: str, error: str) -> bool:
        """Told through the store, as a rank that has failed may have left others amid a collective."""
        store.set(f"{name} {comm.rank}", error.partition(":")[0])
        if store.get(f"{name} {1 - comm.rank}") != store.get(f"{name} {comm.rank}"):
            raise FailedAlone(name)
        return False

    run(sys.argv[1:], lambda name: verdict(TRIALS[name], comm), failed, rank=comm.rank)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
