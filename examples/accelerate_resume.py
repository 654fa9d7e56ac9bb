"""Accelerate's save_state and load_state with DGC: torchrun --nproc-per-node 2 accelerate_resume.py

Accelerate lets rank 0 alone write what is registered for checkpointing. What has not been sent yet is each rank's own,
so every rank writes it beside.
"""

import json
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from digits_ddp import classifier, digits, replicas_digest

import dgcopt

accelerator = Accelerator(cpu=True)
train, images, targets = digits()
inputs, labels = train.tensors


def prepared():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    state, hook = dgcopt.ddp_hook(dgcopt.DGC(ratio=0.01), optimizer.optimizer, model.module.named_parameters())
    model.register_comm_hook(state, hook)
    return model, optimizer, state


def epochs(count):
    for _ in range(count):
        for start in range(0, len(inputs) - 63, 64):
            rows = slice(start + accelerator.process_index, start + 64, 2)
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows]))
            optimizer.step()


model, optimizer, state = prepared()


def save(models, weights, folder):
    torch.save(state.state_dict(), Path(folder) / f"dgcopt_{accelerator.process_index}.pt")


def load(models, folder):
    state.load_state_dict(torch.load(Path(folder) / f"dgcopt_{accelerator.process_index}.pt"))


accelerator.register_save_state_pre_hook(save)
accelerator.register_load_state_pre_hook(load)

folder = [tempfile.mkdtemp() if accelerator.is_main_process else None]
broadcast_object_list(folder)
epochs(5)
accelerator.save_state(folder[0])
accelerator.wait_for_everyone()
epochs(3)
uninterrupted = replicas_digest(model)

accelerator.free_memory()
model, optimizer, state = prepared()
accelerator.load_state(folder[0])
epochs(3)
right = (model(images).argmax(1) == targets).float().mean().item()
told = {"accuracy": right, "resumed": replicas_digest(model) == uninterrupted, "steps": state.step}
print(json.dumps({"example": "accelerate, resumed", **told, "parameters": replicas_digest(model)}), flush=True)
accelerator.end_training()
