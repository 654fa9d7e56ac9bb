"""Lightning Fabric's DDP with DGC: torchrun --nproc-per-node 2 fabric_ddp.py

The DDP module is `_forward_module` of what `setup` returns.
"""

import json

import torch
from digits_ddp import classifier, digits, replicas_digest
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

import dgcopt

fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
fabric.launch()
train, images, targets = digits()
model = classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(train, batch_size=32, shuffle=True))

state, hook = dgcopt.ddp_hook(dgcopt.DGC(ratio=0.01), optimizer.optimizer, model.module.named_parameters())
model._forward_module.register_comm_hook(state, hook)

for _ in range(10):
    for batch, labels in loader:
        optimizer.zero_grad()
        fabric.backward(torch.nn.functional.cross_entropy(model(batch), labels))
        optimizer.step()

right = (model(images).argmax(1) == targets).float().mean().item()
told = {"accuracy": right, "steps": state.step, "ratio": state.telemetry.ratio}
print(json.dumps({"example": "fabric", **told, "parameters": replicas_digest(model)}), flush=True)
