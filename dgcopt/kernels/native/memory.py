"""Adding a gradient to what has not been sent, in C."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import increment_version

from ...flat.segments import BLOCK
from ..torch import Momentum
from .library import FLOATS, Float, Int, Length, Pointer, at, check_flat, function, is_flat, shared

__all__ = ["accumulate", "advance"]

_MOMENTUM, _DAMPENED, _NESTEROV, _COMMIT = 1, 2, 4, 8


def accumulate(
    old: Tensor,
    new: Tensor,
    u: Tensor | None,
    g: Tensor | None,
    maxima: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
    commit: bool = False,
) -> None:
    """See `dgcopt.kernels.torch.accumulate`."""
    moves = rule is not None and rule.momentum != 0
    assert not moves or u is not None
    momentum = u if u is not None and moves else old
    check_flat(len(new), old, new, momentum, dtype=new.dtype)
    if g is not None:
        check_flat(len(new), g)
    if maxima.dtype != new.dtype or len(maxima) != -(-len(new) // BLOCK) or not is_flat(maxima):
        raise ValueError(f"{len(new)} elements have {-(-len(new) // BLOCK)} block maxima, not {len(maxima)}")
    mode = _COMMIT if commit else 0
    if rule is not None and moves:
        mode |= _MOMENTUM | (_DAMPENED if rule.dampening else 0) | (_NESTEROV if rule.nesterov else 0)
    m, keep = (rule.momentum, 1 - rule.dampening) if rule is not None else (0.0, 1.0)
    gradient = "f32" if g is None else FLOATS[g.dtype]
    name = f"accumulate_{gradient}_{FLOATS[new.dtype]}"
    loop = function(name, *[Pointer] * 5, Length, Float, Float, Float, Int)

    def span(start: int, stop: int) -> None:
        loop(
            *(at(tensor, start) for tensor in (old, new, momentum, g)),
            *(at(maxima, start // BLOCK), stop - start, m, keep, scale, mode),
        )

    shared(span, len(new))
    for changed in (new, u if commit and moves else None, g if commit else None):
        if changed is not None:
            increment_version(changed)  # as torch's own operations do: autograd looks for it


def advance(u: Tensor, g: Tensor | None, rule: Momentum, scale: float = 1.0) -> None:
    """See `dgcopt.kernels.torch.advance`."""
    check_flat(len(u), u, *(() if g is None else (g,)))
    gradient = "f32" if g is None else FLOATS[g.dtype]
    loop = function(f"advance_{gradient}_{FLOATS[u.dtype]}", Pointer, Pointer, Length, *[Float] * 3, Int)

    def span(start: int, stop: int) -> None:
        settings = (rule.momentum, 1 - rule.dampening, scale, int(rule.dampening != 0))
        loop(at(u, start), at(g, start), stop - start, *settings)

    shared(span, len(u))
    for changed in (u, g):
        if changed is not None:
            increment_version(changed)
