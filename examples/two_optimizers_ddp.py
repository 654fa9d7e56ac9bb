"""Two optimizers of one model in DDP: torchrun --nproc-per-node 2 two_optimizers_ddp.py

A hook takes momentum over from one optimizer at most. Where several step the model, leave it out: what is not sent is
kept and added to the next gradient, and every optimizer has its own momentum behind it.
"""

import json

import torch
import torch.distributed as dist
from digits_ddp import classifier, digits, replicas_digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import dgcopt

dist.init_process_group("gloo")
train, images, targets = digits()
model = DistributedDataParallel(classifier())
state, hook = dgcopt.ddp_hook(dgcopt.TopK(ratio=0.05), named_parameters=model.module.named_parameters())
model.register_comm_hook(state, hook)
optimizers = [
    torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1, momentum=0.9),
    torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.001),
]
for _ in range(10):
    for batch, labels in DataLoader(train, 32, sampler=DistributedSampler(train)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), labels).backward()
        for optimizer in optimizers:
            optimizer.step()

right = (model(images).argmax(1) == targets).float().mean().item()
told = {"accuracy": right, "steps": state.step, "ratio": state.telemetry.ratio}
print(json.dumps({"example": "two optimizers", **told, "parameters": replicas_digest(model)}), flush=True)
dist.destroy_process_group()
