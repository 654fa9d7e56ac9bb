"""Accelerate with DGC: torchrun --nproc-per-node 2 accelerate_ddp.py (or accelerate launch)

One line after `prepare`; `accelerator.save_state` and `load_state` then keep what each rank has not sent.
"""

import json

import torch
from accelerate import Accelerator
from digits_ddp import classifier, digits, replicas_digest

import dgcopt.integrations

accelerator = Accelerator(cpu=True)
train, images, targets = digits()
model = classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(train, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

compressor = dgcopt.DGC(ratio=0.01, warmup=dgcopt.Warmup(steps=20))
dgcopt.integrations.accelerate.attach(accelerator, model, optimizer, compressor)

for _ in range(10):
    for batch, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(batch), labels))
        optimizer.step()

right = (model(images).argmax(1) == targets).float().mean().item()
telemetry = optimizer.optimizer.telemetry
told = {"accuracy": right, "steps": telemetry.steps, "ratio": telemetry.ratio}
print(json.dumps({"example": "accelerate", **told, "parameters": replicas_digest(model)}), flush=True)
accelerator.end_training()
