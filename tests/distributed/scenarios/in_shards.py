"""The scenarios of FSDP2, whose import costs each rank as much time as the rest of torch: other ranks leave it out."""

from __future__ import annotations

from . import sharded, sharded_averaging, sharded_compiled, sharded_state
from .catalogue import Scenarios, of

IN_SHARDS: Scenarios = of(sharded, sharded_compiled)
"""Gradients of four ranks in torch's FSDP2."""

KEPT_IN_SHARDS: Scenarios = of(sharded_state, sharded_averaging)
"""Checkpoints and averaged weights of four ranks in torch's FSDP2."""

IN_SHARDS_OF_SIX: Scenarios = sharded.OF_SIX | sharded_state.OF_SIX | sharded_averaging.OF_SIX
"""Run by six ranks in torch's FSDP2."""

SCENARIOS: Scenarios = IN_SHARDS | KEPT_IN_SHARDS | IN_SHARDS_OF_SIX
