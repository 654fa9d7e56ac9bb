"""One optimizer's part in `torch.distributed.algorithms.Join`."""

from __future__ import annotations

from .engine import Engine

__all__ = ["JoinHook"]


class JoinHook:
    """Steps without data; see `torch.distributed.algorithms.JoinHook`. Nothing to do in a single process."""

    def __init__(self, engine: Engine | None, divide_by_all: bool) -> None:
        self.engine = engine
        if engine is not None:
            engine.participation.begin(not divide_by_all)

    def main_hook(self) -> None:
        """Take part in a step of the ranks that have data."""
        if self.engine is not None:
            self.engine.runner.add(self.engine.serve_step())
            self.engine.runner.finish()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have run out of data."""
        if self.engine is not None:
            self.engine.participation.all_here()
