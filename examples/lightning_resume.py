"""Lightning's checkpoints with DGC: torchrun --nproc-per-node 2 lightning_resume.py

Lightning writes rank 0's callbacks only. What has not been sent yet is each rank's own, so the callback gathers it.
"""

import json
import logging
import tempfile
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from digits_ddp import classifier, digits, replicas_digest
from lightning.pytorch.strategies import DDPStrategy

import dgcopt

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Compress(lightning.Callback):
    def __init__(self, compressor):
        self.compressor, self.saved = compressor, None

    def on_train_start(self, trainer, module):
        self.state, hook = dgcopt.ddp_hook(self.compressor, trainer.optimizers[0], module.named_parameters())
        if self.saved is not None:
            self.state.load_state_dict(self.saved)
        trainer.strategy.model.register_comm_hook(self.state, hook)

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["dgcopt"] = [None] * trainer.world_size
        dist.all_gather_object(checkpoint["dgcopt"], self.state.state_dict())

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.saved = checkpoint["dgcopt"][trainer.global_rank]


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = classifier()

    def training_step(self, batch, index):
        images, targets = batch
        return torch.nn.functional.cross_entropy(self.network(images), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(epochs, checkpoint=None):
    compress, module = Compress(dgcopt.DGC(ratio=0.01)), Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[compress],
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(train, batch_size=32, shuffle=False), ckpt_path=checkpoint)
    return trainer, module, compress


train, images, targets = digits()
trainer, _, _ = fit(5)
folder = [tempfile.mkdtemp() if trainer.is_global_zero else None]
dist.broadcast_object_list(folder)
checkpoint = str(Path(folder[0]) / "last.ckpt")
trainer.save_checkpoint(checkpoint)
_, uninterrupted, _ = fit(8)
_, module, compress = fit(8, checkpoint)

right = (module.network(images).argmax(1) == targets).float().mean().item()
resumed = replicas_digest(module) == replicas_digest(uninterrupted)
told = {"accuracy": right, "resumed": resumed, "steps": compress.state.step}
print(json.dumps({"example": "lightning, resumed", **told, "parameters": replicas_digest(module)}), flush=True)
