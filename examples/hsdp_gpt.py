"""A small GPT on Python's own source code: blocks sharded inside a machine, their updates compressed across machines.

Start it with `torchrun --nproc-per-node 4`: two replicas of the model, each on two ranks. With `--checkpoint FOLDER` it
resumes from the folder, if it holds a checkpoint, and saves there at the end; the new run may have any mesh.
"""

import argparse
import functools
import json
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import dgcopt
from dgcopt.tasks.stdlib_gpt import CharGPT, StdlibText

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=40, help="optimizer steps until the end of the cosine")
parser.add_argument("--warmup", type=int, default=8, help="steps until the learning rate is at its highest")
parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step")
parser.add_argument("--ratio", type=float, default=0.05, help="fraction of the update to send to other replicas")
parser.add_argument("--checkpoint", type=Path, help="folder to resume from and to save to")
parser.add_argument("--compile", action="store_true", help="compile each block")
args = parser.parse_args()

dgcopt.init()
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))

# Model: compile each block, recompute its activations in backward, shard it.
torch.manual_seed(0)
model = CharGPT(layers=2, heads=4, width=64, context=64)
in_half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    forward = torch.compile(block.forward) if args.compile else block.forward
    block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
    fully_shard(block, mesh=mesh["shard"], mp_policy=in_half)
fully_shard(model, mesh=mesh["shard"], mp_policy=in_half)

# Optimizer: no weight decay of vectors; momentum 0, since unsent updates act as momentum.
matrices = [param for param in model.parameters() if param.dim() > 1]
vectors = [param for param in model.parameters() if param.dim() <= 1]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.0, 0.95))
optimizer = dgcopt.DistributedOptimizer(
    optimizer, model.named_parameters(), dgcopt.DGC(args.ratio), mesh=mesh["replicate"]
)


def learning_rate(step: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if step < args.warmup:
        return 3e-3 * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return 3e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress))))


def state(step: int) -> dict[str, object]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": torch.tensor(step),
    }


start = 0
if args.checkpoint and (args.checkpoint / ".metadata").exists():
    loaded = state(0)
    dcp.load(loaded, checkpoint_id=args.checkpoint)
    set_model_state_dict(model, loaded["model"])
    set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    dgcopt.sharded.load(optimizer, args.checkpoint)
    start = int(loaded["step"])

train = StdlibText(context=64, max_bytes=400_000)
sampler = DistributedSampler(train, seed=start)
batches = iter(DataLoader(train, batch_size=8, sampler=sampler, drop_last=True))
losses = []
for step in range(start, args.steps):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    optimizer.zero_grad()
    total = torch.zeros(())
    for micro in range(args.accumulate):
        model.set_requires_gradient_sync(micro == args.accumulate - 1)  # FSDP2 reduces the sum of all passes
        tokens, targets = next(batches)
        logits = model(tokens).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / args.accumulate
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of this replica's gradient, over all its shards
    optimizer.step()
    dist.all_reduce(total)
    losses.append(float(total) / dist.get_world_size())
    if dist.get_rank() == 0 and step % 10 == 0:
        print(f"step {step}: loss {losses[-1]:.3f}, norm {float(norm.full_tensor()):.2f}", flush=True)

if args.checkpoint:
    dcp.save(state(args.steps) | {"dgcopt": dgcopt.sharded.state(optimizer)}, checkpoint_id=args.checkpoint)

if dist.get_rank() == 0:
    told = {"example": "hsdp_gpt", "first_step": start, "losses": losses, "bytes": optimizer.telemetry.sent_bytes}
    print(json.dumps(told), flush=True)
dist.destroy_process_group()
