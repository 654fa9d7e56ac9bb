"""Lightning's DDP with DGC: torchrun --nproc-per-node 2 lightning_ddp.py

Lightning registers `DDPStrategy(ddp_comm_hook=...)` on CUDA only, and before there is an optimizer. A callback works
everywhere and gives the hook the optimizer whose momentum DGC takes over.
"""

import json
import logging

import lightning
import torch
from digits_ddp import classifier, digits, replicas_digest
from lightning.pytorch.strategies import DDPStrategy

import dgcopt

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Compress(lightning.Callback):
    def __init__(self, compressor: dgcopt.Compressor) -> None:
        self.compressor = compressor

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        # with precision="16-mixed" also: scaler=trainer.precision_plugin.scaler
        self.state, hook = dgcopt.ddp_hook(self.compressor, trainer.optimizers[0], module.named_parameters())
        trainer.strategy.model.register_comm_hook(self.state, hook)


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
compress = Compress(dgcopt.DGC(ratio=0.01, warmup=dgcopt.Warmup(steps=20)))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend="gloo"),
    callbacks=[compress],
    max_epochs=10,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(train, batch_size=32, shuffle=True))

right = (module.network(images).argmax(1) == targets).float().mean().item()
told = {"accuracy": right, "steps": compress.state.step, "ratio": compress.state.telemetry.ratio}
print(json.dumps({"example": "lightning", **told, "parameters": replicas_digest(module)}), flush=True)
