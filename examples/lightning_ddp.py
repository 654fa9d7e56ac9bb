"""Lightning with DGC: torchrun --nproc-per-node 2 lightning_ddp.py

The strategy is Lightning's DDPStrategy, with gradients exchanged by a compressor, or weights by an averaging algorithm.
"""

import json
import logging

import lightning
import torch
from digits_ddp import classifier, digits, replicas_digest

import dgcopt
from dgcopt.integrations.lightning import DGCStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = classifier()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, targets = batch
        return torch.nn.functional.cross_entropy(self.network(images), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


module, (train, images, targets) = Classifier(), digits()
compressor = dgcopt.DGC(ratio=0.01, warmup=dgcopt.Warmup(steps=20))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DGCStrategy(compressor, process_group_backend="gloo"),
    max_epochs=10,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(train, batch_size=32, shuffle=True))

right = (module.network(images).argmax(1) == targets).float().mean().item()
telemetry = trainer.optimizers[0].telemetry
told = {"accuracy": right, "steps": telemetry.steps, "ratio": telemetry.ratio}
print(json.dumps({"example": "lightning", **told, "parameters": replicas_digest(module)}), flush=True)
