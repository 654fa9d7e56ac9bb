"""The scenarios of FSDP2, whose import costs each rank as much time as the rest of torch: other ranks leave it out."""

from __future__ import annotations

from . import sharded, sharded_averaging, sharded_compiled, sharded_state
from .catalogue import Scenarios, of

IN_SHARDS: Scenarios = of(sharded, sharded_state, sharded_averaging, sharded_compiled)
"""Run by four ranks in torch's FSDP2."""

IN_SHARDS_OF_SIX: Scenarios = sharded.OF_SIX | sharded_state.OF_SIX | sharded_averaging.OF_SIX
"""Run by six ranks in torch's FSDP2."""

SCENARIOS: Scenarios = IN_SHARDS | IN_SHARDS_OF_SIX
