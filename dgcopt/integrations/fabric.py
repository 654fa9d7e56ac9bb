"""Lightning Fabric: `lightning.Fabric(strategy=DGCStrategy(dgcopt.DGC(0.01)))`."""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .. import DGC, Averaging, Compressor, ConfigError
from .exchange import Exchange, check_method, keep_gradients_local, read

__all__ = ["DGCStrategy"]


class DGCStrategy(DDPStrategy):
    """Fabric's DDPStrategy with gradients exchanged by a compressor, or weights by an averaging algorithm.

    Args:
        method: such as `dgcopt.DGC(0.01)`, `dgcopt.TopK(0.01)` or `dgcopt.LocalSGD(every=8)`; None is `dgcopt.DGC()`.
        settings: of `DDPStrategy`, as keywords.

    Beside each checkpoint `NAME` that holds an optimizer, a folder `NAME.dgcopt` has every rank's part; keep them
    together, on a path that all machines share. `fabric.clip_gradients` clips each rank's gradient before it is
    exchanged, and not the mean.

    Attributes:
        exchanges: one for each optimizer that was set up, with `exchanges[0].optimizers[0].telemetry`.
    """

    def __init__(self, method: Compressor | Averaging | None = None, **settings: Any) -> None:
        if isinstance(method, Averaging):  # buffers stay local, as weights do
            settings.setdefault("broadcast_buffers", False)
        super().__init__(**settings)
        self.method = check_method(DGC() if method is None else method)
        self.exchanges: list[Exchange] = []
        self._models: list[nn.Module] = []

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module in DDP, which leaves gradients as they are."""
        wrapped = super().setup_module(module)
        self._models.append(keep_gradients_local(wrapped))
        return wrapped

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Attach the method to the optimizer of a module that was set up.

        Raises ConfigError if the optimizer steps parameters of no such module, or of several.
        """
        optimizer = super().setup_optimizer(optimizer)
        stepped = {param for group in optimizer.param_groups for param in group["params"]}
        models = [model for model in self._models if not stepped.isdisjoint(model.parameters())]
        if len(models) != 1:
            raise ConfigError(
                f"the optimizer steps parameters of {len(models)} modules that Fabric has set up: set up each module "
                f"with an optimizer of its own, model, optimizer = fabric.setup(model, optimizer)"
            )
        self.exchanges.append(Exchange(models[0], [optimizer], self.method))
        return optimizer

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Write Fabric's checkpoint, and every rank's part beside it for the optimizers in `state`."""
        super().save_checkpoint(path, state, *args, **kwargs)
        for key, exchange in self._of(state):
            exchange.save(_beside(path, key), 0)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load Fabric's checkpoint, and this rank's part of the optimizers in `state`."""
        held = self._of(state)
        for key, exchange in held:
            exchange.use(read(_beside(path, key)))
        try:
            rest = super().load_checkpoint(path, state, *args, **kwargs)
            for _, exchange in held:  # the model may have come after the optimizer
                exchange.load_weights()
        finally:
            for _, exchange in held:
                exchange.use({})
        return rest

    def _of(self, state: Any) -> list[tuple[str, Exchange]]:
        """Return the exchanges of the optimizers in a state, and their keys in it, by which Fabric finds them too."""
        held = {"optimizer": state} if isinstance(state, Optimizer) else state if isinstance(state, dict) else {}
        of = {exchange.optimizers[0]: exchange for exchange in self.exchanges}
        return [(key, of[value]) for key, value in held.items() if isinstance(value, Optimizer) and value in of]


def _beside(path: Any, key: str) -> str:
    return f"{path}.dgcopt/{key}"
