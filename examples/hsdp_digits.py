"""Parameters are sharded inside a machine by `fully_shard`, and each shard's gradients are compressed across machines.

Start it with `torchrun --nproc-per-node 4`: two replicas of the model, each on two ranks.
"""

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from digits_ddp import classifier, digits
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import dgcopt

dgcopt.init()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = classifier()
fully_shard(model[0], mesh=mesh["shard"])  # the shard dimension alone: dgcopt averages over the other
fully_shard(model, mesh=mesh["shard"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # after fully_shard, which replaces parameters
optimizer = dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), dgcopt.DGC(0.05), mesh=mesh["replicate"])

train, images, targets = digits()
sampler = DistributedSampler(train)
for epoch in range(8):
    sampler.set_epoch(epoch)
    for batch, labels in DataLoader(train, 16, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()

folder = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
path = Path(dgcopt.broadcast_object(folder.name if folder else "")) / "checkpoint"
state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
dcp.save(state | {"dgcopt": dgcopt.sharded.state(optimizer)}, checkpoint_id=path)

# as a later run does, on a mesh of any shape
state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
dcp.load(state, checkpoint_id=path)
set_model_state_dict(model, state["model"])
set_optimizer_state_dict(model, optimizer, state["optimizer"])
dgcopt.sharded.load(optimizer, path)  # after torch's

with torch.no_grad():
    right = (model(images).argmax(1) == targets).float().mean().item()
if dist.get_rank() == 0:
    told = {"example": "hsdp_digits", "accuracy": right, "bytes": optimizer.telemetry.sent_bytes}
    print(json.dumps(told), flush=True)
dist.destroy_process_group()
