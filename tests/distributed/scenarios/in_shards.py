"""The scenarios of FSDP2, whose import costs each rank as much time as the rest of torch: other ranks leave it out."""

from __future__ import annotations

from .catalogue import Scenarios, of
from .sharded import averaging, compiled, equivalence, loops, meshes, payloads, state, tensor_parallel

IN_SHARDS: Scenarios = of(equivalence, tensor_parallel, loops, payloads, meshes, compiled)
"""Gradients of four ranks in torch's FSDP2."""

KEPT_IN_SHARDS: Scenarios = of(state, averaging)
"""Checkpoints and averaged weights of four ranks in torch's FSDP2."""

IN_SHARDS_OF_SIX: Scenarios = equivalence.OF_SIX | state.OF_SIX | averaging.OF_SIX
"""Run by six ranks in torch's FSDP2."""

SCENARIOS: Scenarios = IN_SHARDS | KEPT_IN_SHARDS | IN_SHARDS_OF_SIX
