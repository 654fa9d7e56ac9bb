"""Muon for the hidden matrices of a model and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from ..errors import ConfigError

__all__ = ["MuonAdamW"]

MUON = "muon"
"""Key of a parameter group: True where Muon steps."""


class MuonAdamW(Optimizer):
    """torch.optim.Muon for matrices and torch.optim.AdamW for all other parameters, as one optimizer.

    Muon's update is an orthogonalised momentum: meant for the hidden matrices of a model, not for embeddings, output
    layers, vectors and scalars. It is scaled to the root mean square of AdamW's, so that both share lr and weight decay
    (Moonshot's rule, `adjust_lr_fn="match_rms_adamw"`). Both parts are torch's own code.

    `DistributedOptimizer` sends its gradients. With `DiLoCo` over it, the outer gradient is the sum of orthogonalised
    local updates: MuLoCo.

    Args:
        named_parameters: `model.named_parameters()`, of which the names choose the part.
        lr: learning rate of both parts.
        betas, eps: AdamW's.
        momentum, nesterov, ns_steps: Muon's, with the number of Newton-Schulz iterations.
        weight_decay: decoupled weight decay of both parts.
        adamw: patterns of names of matrices that AdamW steps, such as embeddings and the output layer. A pattern that
            matches no matrix has no effect.

    Costs per step and matrix of n by m elements, n <= m, about 2 ns_steps (2 n^2 m + n^3) multiplications. Raises
    ConfigError without names, for a text as `adamw`, if no matrix is left for Muon, and if torch has no Muon (before
    2.9).
    Sources: Jordan et al., "Muon", 2024, https://kellerjordan.github.io/posts/muon/; Liu et al., "Muon is Scalable for
    LLM Training", arXiv:2502.16982; Therien et al., "MuLoCo", arXiv:2505.23725.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.1,
        adamw: Sequence[str] = ("*token*", "*embed*", "*position*", "*head*"),
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(
                f"MuonAdamW needs torch.optim.Muon, which torch {torch.__version__} lacks: use 2.9 or later"
            )
        if isinstance(adamw, str):
            raise ConfigError(f"adamw must be a sequence of patterns, such as ({adamw!r},), not one text")
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for entry in named_parameters:
            if not isinstance(entry, tuple) or not isinstance(entry[0], str):
                raise ConfigError("MuonAdamW chooses by names: give it model.named_parameters()")
            name, param = entry
            excluded = param.dim() != 2 or any(fnmatchcase(name, pattern) for pattern in adamw)
            (others if excluded else matrices).append(param)
        if not matrices:
            raise ConfigError(f"Muon has no matrix: all parameters are vectors or match adamw={adamw!r}. Use AdamW")
        muon = torch.optim.Muon(
            matrices,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        # made even if it has nothing to step yet: groups may be added later
        adam = AdamW(others or matrices, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        groups = [{**group, MUON: True} for group in muon.param_groups]
        if others:
            groups += [{**group, MUON: False} for group in adam.param_groups]
        self._parts: dict[bool, Optimizer] = {True: muon, False: adam}
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the part that the key "muon" names; that part's settings are the defaults of the group's.

        Raises ConfigError without that key, and for parameters of Muon that are no matrices.
        """
        if not isinstance(param_group.get(MUON), bool):
            raise ConfigError('a group of MuonAdamW needs "muon": True for Muon, or False for AdamW')
        super().add_param_group({**self._parts[param_group[MUON]].defaults, **param_group})
        added = self.param_groups[-1]
        shapes = [tuple(param.shape) for param in added["params"] if param.dim() != 2]
        if added[MUON] and shapes:
            self.param_groups.pop()  # the step would raise after it has moved other parameters
            raise ConfigError(f'Muon steps matrices only: add the parameter of shape {shapes[0]} with "muon": False')

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both parts."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for is_muon, part in self._parts.items():
            # set each time, because load_state_dict replaces both
            part.param_groups = [group for group in self.param_groups if group[MUON] is is_muon]
            part.state = self.state
            kind: Any = type(part)
            kind.step.__wrapped__(part)  # hooks of all optimizers run around this one
        return loss
