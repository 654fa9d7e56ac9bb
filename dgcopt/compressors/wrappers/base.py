"""The base class of compressors around another one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from ...errors import ConfigError
from ..base import Compressor, GradientExchange, Source
from ..context import Context
from ..dense import NoCompression

__all__ = ["Wrapper"]


class Wrapper(Compressor):
    """A compressor around another one: forwards everything to `inner` that a subclass does not override.

    Args:
        inner: the compressor inside; None is NoCompression.

    Raises ConfigError if it is no compressor.
    """

    def __init__(self, inner: Compressor | None = None) -> None:
        self.inner = NoCompression() if inner is None else inner
        if not isinstance(self.inner, Compressor):
            raise ConfigError(f"{type(self).__name__} goes around a compressor, such as PowerSGD(), not {inner!r}")
        self._follow()

    def _follow(self) -> None:
        inner = self.inner
        self.overlap, self.whole_model, self.in_turn = inner.overlap, inner.whole_model, inner.in_turn
        self.first_moment = inner.first_moment

    @property
    def source(self) -> Source:
        """See `inner`."""
        return self.inner.source

    @source.setter
    def source(self, source: Source) -> None:
        self.inner.source = source

    @property
    def sends(self) -> Literal["gradient", "update"]:
        return self.inner.sends

    @property
    def clips_model(self) -> bool:
        return self.inner.clips_model

    def sends_of(self, kind: Hashable) -> Literal["gradient", "update"]:
        return self.inner.sends_of(kind)

    def residual_content(self, kind: Hashable) -> str:
        return self.inner.residual_content(kind)

    def replaces_first_moment(self, step: int) -> bool:
        return self.inner.replaces_first_moment(step)

    def as_gradient(self, unsent: Tensor, ctx: Context) -> Tensor:
        return self.inner.as_gradient(unsent, ctx)

    def __repr__(self) -> str:
        inner = "" if isinstance(self.inner, NoCompression) else repr(self.inner)
        return f"{type(self).__name__}({inner})"

    @property
    def conserves(self) -> bool:
        return False  # unless a subclass overrides it

    @property
    def asks_link(self) -> bool:
        return self.inner.asks_link

    def parts(self) -> Iterator[Compressor]:
        yield self
        yield from self.inner.parts()

    def see_parameters(self, names: Mapping[Tensor, str], others: Iterable[str] = ()) -> None:
        self.inner.see_parameters(names, others)

    def kind(self, name: str, param: Tensor) -> Hashable:
        return self.inner.kind(name, param)

    def attach(self, optimizer: Optimizer) -> None:
        self.inner.attach(optimizer)
        self._follow()

    def set_steps_per_epoch(self, steps: int) -> None:
        self.inner.set_steps_per_epoch(steps)

    def in_place(self, kind: Hashable) -> bool:
        return self.inner.in_place(kind)

    def prepare(self, grads: Sequence[Tensor], contexts: Sequence[Context]) -> None:
        self.inner.prepare(grads, contexts)

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        return (yield from self.inner.exchange(grad, ctx))

    def payload_bytes(self, ctx: Context) -> int | None:
        return self.inner.payload_bytes(ctx)

    def before_step(self, optimizer: Optimizer) -> Iterable[Tensor] | None:
        return self.inner.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        self.inner.after_step(optimizer)

    def return_momentum(self, momenta: Mapping[Tensor, Tensor]) -> None:
        self.inner.return_momentum(momenta)
