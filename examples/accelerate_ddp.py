"""Accelerate's DDP with DGC: torchrun --nproc-per-node 2 accelerate_ddp.py (or accelerate launch)

Accelerate's own `DistributedDataParallelKwargs(comm_hook=...)` knows torch's hooks only; any other is registered on the
model that `prepare` returns.
"""

import json

import torch
from accelerate import Accelerator
from digits_ddp import classifier, digits, replicas_digest

import dgcopt

accelerator = Accelerator(cpu=True)
train, images, targets = digits()
model = classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(train, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

compressor = dgcopt.DGC(ratio=0.01, warmup=dgcopt.Warmup(steps=20))
# with mixed_precision="fp16" also: scaler=accelerator.scaler
state, hook = dgcopt.ddp_hook(compressor, optimizer.optimizer, model.module.named_parameters())
model.register_comm_hook(state, hook)

for _ in range(10):
    for batch, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(batch), labels))
        optimizer.step()

right = (model(images).argmax(1) == targets).float().mean().item()
told = {"accuracy": right, "steps": state.step, "ratio": state.telemetry.ratio}
print(json.dumps({"example": "accelerate", **told, "parameters": replicas_digest(model)}), flush=True)
accelerator.end_training()
