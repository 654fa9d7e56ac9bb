"""What Python does first in every process that tests start: leave out what none of them uses, for they start hundreds.

torch loads its compiler with the first optimizer, for more than a second of each process; DGCOPT_TEST_COMPILER=1 lets
it, where something compiles, or asks for the compiler's settings as DistributedDataParallel does.
"""

import faulthandler
import gc
import os
import sys
from types import SimpleNamespace

if not os.environ.get("DGCOPT_TEST_COMPILER"):
    sys.modules["torch._dynamo"] = SimpleNamespace(  # type: ignore[assignment]
        disable=lambda function, *_, **__: function,
        graph_break=lambda: None,
        trace_rules=SimpleNamespace(clear_lru_cache=lambda: None),
    )
gc.set_threshold(10_000)  # looking for garbage among what is being imported takes a tenth of the start

if os.environ.get("DGCOPT_TEST_LIMIT"):  # who hangs says where, before he is killed
    faulthandler.dump_traceback_later(0.9 * float(os.environ["DGCOPT_TEST_LIMIT"]))
