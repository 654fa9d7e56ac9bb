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

from .loading import load
from .resharding import reshare
from .saving import save

__all__ = ["load", "reshare", "save"]
