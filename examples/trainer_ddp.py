"""Hugging Face's Trainer with DGC: torchrun --nproc-per-node 2 trainer_ddp.py

A callback has DDP's model and the optimizer once training begins. Trainer clips gradients at norm 1.0 unless told not
to; DGC clips what each rank adds, `clip=`, before it is sent.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from digits_ddp import classifier, digits, replicas_digest

import dgcopt


class Compress(transformers.TrainerCallback):
    def __init__(self, trainer, compressor, resume=None):
        self.trainer, self.compressor, self.resume = trainer, compressor, resume

    def on_train_begin(self, args, state, control, **kwargs):
        model, optimizer = self.trainer.model_wrapped, self.trainer.optimizer
        self.state, hook = dgcopt.ddp_hook(
            self.compressor, getattr(optimizer, "optimizer", optimizer), model.module.named_parameters()
        )
        if self.resume is not None:
            self.state.load_state_dict(torch.load(Path(self.resume) / f"dgcopt_{args.process_index}.pt"))
        model.register_comm_hook(self.state, hook)

    def on_save(self, args, state, control, **kwargs):  # Trainer itself writes on rank 0 only
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.state.state_dict(), folder / f"dgcopt_{args.process_index}.pt")


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = classifier()

    def forward(self, inputs, labels=None):
        scores = self.network(inputs)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


def fit(output, epochs, resume=None):
    model = Classifier()
    settings = {
        "output_dir": output,
        "num_train_epochs": epochs,
        "per_device_train_batch_size": 32,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "steps",
        "save_steps": STEPS,
        "save_safetensors": False,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "remove_unused_columns": False,
    }
    known = transformers.TrainingArguments.__dataclass_fields__
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**{name: value for name, value in settings.items() if name in known}),
        train_dataset=[{"inputs": image, "labels": label} for image, label in train],
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None),
    )
    trainer.add_callback(Compress(trainer, dgcopt.DGC(ratio=0.01), resume))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, model


if __name__ == "__main__":
    train, images, targets = digits()
    STEPS = 5 * -(-len(train) // 64)
    folder = tempfile.gettempdir() + f"/dgcopt-trainer-{Path(sys.argv[1] if len(sys.argv) > 1 else 'run').name}"
    _, uninterrupted = fit(folder, 8)
    trainer, model = fit(folder, 8, resume=f"{folder}/checkpoint-{STEPS}")
    right = (model.network(images).argmax(1) == targets).float().mean().item()
    told = {"accuracy": right, "resumed": replicas_digest(model) == replicas_digest(uninterrupted)}
    print(json.dumps({"example": "trainer", **told, "parameters": replicas_digest(model)}), flush=True)
