"""Compressors as hooks of torch's DistributedDataParallel, on two real ranks."""

from ..collectives import diagnosed_in_script
from . import buckets, disagreement, equivalence, models, optimizers, state, uneven_data

SCENARIOS = {
    "ddp: script is diagnosed": lambda comm: diagnosed_in_script(comm, "DDP"),
    **equivalence.SCENARIOS,
    **buckets.SCENARIOS,
    **models.SCENARIOS,
    **state.SCENARIOS,
    **optimizers.SCENARIOS,
    **uneven_data.SCENARIOS,
    **disagreement.SCENARIOS,  # its last one breaks the wire
}
