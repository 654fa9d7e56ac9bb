"""Writes dgcopt/tuning/models.json: the real shapes and backward times of the models of docs/tuning.md.

    python scripts/tuning_models.py            # takes some minutes; needs torchvision and transformers

Shapes are those of torchvision's and Hugging Face's own definitions. Seconds of a step come from a published table
(timm's training benchmark on one RTX 3090 with automatic mixed precision); for the language models, which are not in
it, from the arithmetic of their step and the rate that ViT-B/16 reaches in that table. The share of a step that is
forward, and each parameter's share of backward, are measured here, on one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dgcopt.tuning.models import MODELS, tensors_of

TABLE = (
    "https://github.com/huggingface/pytorch-image-models/blob/main/results/"
    "benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv"
)
DEVICE = "RTX 3090"
MEMORY = 936e9
"""Bytes per second of that device's memory (NVIDIA's data sheet)."""
VIT_B = 392.99
"""Samples per second of vit_base_patch16_224 in the table."""


def resnet50() -> nn.Module:
    """ResNet-50 (He et al., 2015)."""
    import torchvision

    return torchvision.models.resnet50()


def vgg16() -> nn.Module:
    """VGG-16 (Simonyan and Zisserman, 2014)."""
    import torchvision

    return torchvision.models.vgg16()


def vit_s() -> nn.Module:
    """ViT-S/16 (Touvron et al., 2020)."""
    import torchvision

    return torchvision.models.VisionTransformer(224, 16, num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536)


def resnet18() -> nn.Module:
    """ResNet-18 (He et al., 2015)."""
    import torchvision

    return torchvision.models.resnet18()


def mobilenet_v2() -> nn.Module:
    """MobileNetV2 (Sandler et al., 2018)."""
    import torchvision

    return torchvision.models.mobilenet_v2()


def vit_b() -> nn.Module:
    """ViT-B/16, whose rate the language models take."""
    import torchvision

    return torchvision.models.vit_b_16()


def bert_base() -> nn.Module:
    """BERT-base with its masked language model's head (Devlin et al., 2018)."""
    import transformers

    return transformers.BertForMaskedLM(transformers.BertConfig())


def gpt2_small() -> nn.Module:
    """GPT-2 small (Radford et al., 2019)."""
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))


def images(batch: int) -> Tensor:
    return torch.zeros(batch, 3, 224, 224)


def tokens(length: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.zeros(batch, length, dtype=torch.int64)


@dataclass
class Source:
    """A model's definition, one rank's batch, samples per second of the table (None if it is not in it), and an input
    for shares of backward."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    batch: int
    of: str
    rate: float | None
    sample: Tensor


SOURCES = {
    "mobilenet_v2": Source(mobilenet_v2, images, 64, "images of 224 x 224", 2313.1, images(1)),
    "resnet18": Source(resnet18, images, 64, "images of 224 x 224", 3481.78, images(1)),
    "resnet50": Source(resnet50, images, 64, "images of 224 x 224", 1218.01, images(1)),
    "vgg16": Source(vgg16, images, 32, "images of 224 x 224", 546.06, images(1)),
    "bert_base": Source(bert_base, tokens(128), 32, "sequences of 128 tokens", None, tokens(128)(1)),
    "gpt2_small": Source(gpt2_small, tokens(1024), 8, "sequences of 1,024 tokens", None, tokens(128)(1)),
    "vit_s": Source(vit_s, images, 64, "images of 224 x 224", 1057.92, images(1)),
}


def flops(build: Callable[[], nn.Module], inputs: Tensor) -> float:
    """Return the floating-point operations of forward and backward."""
    model = build()
    with FlopCounterMode(display=False) as counter:
        loss_of(model, inputs).backward()
    return float(counter.get_total_flops())


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return torch.stack([tensor.float().square().mean() for tensor in tensors_of(model(inputs))]).sum()


def shares(build: Callable[[], nn.Module], inputs: Tensor, repeats: int) -> tuple[float, dict[str, float]]:
    """Return the share of a step that is forward, and each parameter's share of backward, in the order of the model.

    Medians over repetitions of the CPU time of this process.
    """
    torch.set_num_threads(1)
    model = build()
    marks: dict[str, float] = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: marks.__setitem__(name, time.process_time()))
    forwards, backwards = [], []
    for _ in range(1 + repeats):
        model.zero_grad()
        marks.clear()
        start = time.process_time()
        loss = loss_of(model, inputs)
        middle = time.process_time()
        loss.backward()
        end = time.process_time()
        before, own = middle, {}
        for name, at in sorted(marks.items(), key=lambda pair: pair[1]):
            own[name], before = (at - before) / (end - middle), at
        forwards.append((middle - start) / (end - start))
        backwards.append(own)
    found = {name: statistics.median(one[name] for one in backwards[1:]) for name, _ in model.named_parameters()}
    total = sum(found.values())
    return statistics.median(forwards[1:]), {name: share / total for name, share in found.items()}


def describe(source: Source, repeats: int) -> dict[str, Any]:
    """Return the entry of one model."""
    if source.rate is not None:
        seconds, about = source.batch / source.rate, f"timm's training benchmark, {source.rate} samples/s: {TABLE}"
    else:
        reached = VIT_B * flops(vit_b, images(1))
        seconds = source.batch * flops(source.build, source.inputs(1)) / reached
        about = (
            f"arithmetic of the step at {reached / 1e12:.1f} TFLOP/s, which vit_base_patch16_224 reaches in timm's "
            f"training benchmark ({VIT_B} samples/s): {TABLE}"
        )
    forward, backward = shares(source.build, source.sample, repeats)
    model = source.build()
    return {
        "batch": f"{source.batch} {source.of}",
        "device": DEVICE,
        "memory": MEMORY,
        "seconds": round(seconds, 5),
        "source": about,
        "forward": round(forward, 3),
        "parameters": [[name, list(param.shape), round(backward[name], 6)] for name, param in model.named_parameters()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--repeats", type=int, default=3, help="backward passes that are measured")
    arguments = parser.parse_args()
    known = json.loads(MODELS.read_text()) if MODELS.exists() else {}
    for name in arguments.models:
        known[name] = describe(SOURCES[name], arguments.repeats)
        write(known, MODELS)
        print(f"{name}: {known[name]['seconds']} s, forward {known[name]['forward']:.0%}; {known[name]['source']}")


def write(known: dict[str, Any], path: Path) -> None:
    """Write entries as JSON with a line for each parameter."""
    entries = []
    for name, entry in sorted(known.items()):
        rows = ",\n   ".join(json.dumps(row) for row in entry["parameters"])
        head = ", ".join(
            f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items() if key != "parameters"
        )
        entries.append(f' {json.dumps(name)}: {{{head},\n  "parameters": [\n   {rows}]}}')
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n")


if __name__ == "__main__":
    main()
