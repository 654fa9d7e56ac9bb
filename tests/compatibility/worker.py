"""One of two real ranks: carries out the named trials, and records what came of each, until only one of them fails."""

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "distributed")]

import trials  # noqa: E402, F401
from table import TRIALS, verdict  # noqa: E402

import dgcopt  # noqa: E402


def main() -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    comm = dgcopt.init(deadline=45)
    store = dist.distributed_c10d._get_default_store()
    path = Path(os.environ["DGCOPT_TEST_RECORDS"]) / f"rank-{comm.rank}.jsonl"
    for name in sys.argv[1:]:
        start, record = time.monotonic(), {"scenario": name, "rank": comm.rank}
        try:
            record["result"] = verdict(TRIALS[name], comm)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        record["seconds"] = round(time.monotonic() - start, 3)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        # through the store, as a rank that has failed may have left others amid a collective
        store.set(f"{name} {comm.rank}", record.get("error", "").partition(":")[0])
        if store.get(f"{name} {1 - comm.rank}") != store.get(f"{name} {comm.rank}"):
            return 1  # what follows is tried in another launch
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
