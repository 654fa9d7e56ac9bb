"""A character-level GPT on the source code of Python's own standard library: language modelling without a download."""

import sysconfig
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

# Add-ons, and packages that some distributions split off: without them one Python version has the same text everywhere.
_NOT_EVERYWHERE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
_TABLES = {"encodings", "pydoc_data"}  # megabytes of character maps and help texts rather than programs


def source_files(root: Path) -> list[str]:
    """Return the ``.py`` files of the standard library under ``root``: relative paths with ``/``, sorted."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(
        path.as_posix()
        for path in paths
        if not (_NOT_EVERYWHERE | _TABLES).intersection(path.parts)
        and not path.parts[0].startswith(("_sysconfigdata", "config-"))  # written when Python was built
    )


class StdlibText(Dataset[tuple[Tensor, Tensor]]):
    """Windows of standard-library source code as ``(characters, next characters)``, both int64 of shape (context,).

    A character is a byte, 0..255; a zero byte ends each file. Every tenth file of ``source_files`` is validation
    text, the others are training text, so no file is in both. Reading stops before a file that would take the split
    beyond ``max_bytes``; windows do not overlap, and an incomplete last one is left out.

    ``root`` is the folder to read, by default the library of the running Python, whose version decides the text.

    Raises FileNotFoundError when there are no Python files in ``root`` (an interpreter packed into a zip file), and
    ValueError when the text is shorter than one window.
    """

    def __init__(
        self,
        split: Literal["train", "validation"] = "train",
        context: int = 128,
        max_bytes: int = 4_000_000,
        root: str | None = None,
    ) -> None:
        folder = Path(root or sysconfig.get_path("stdlib"))
        files = source_files(folder)
        if not files:
            raise FileNotFoundError(f"no .py files in {folder}: expected the source of Python's standard library there")
        self.files: list[str] = []
        text = bytearray()
        for number, file in enumerate(files):
            if (number % 10 == 9) != (split == "validation"):
                continue
            content = (folder / file).read_bytes() + b"\0"
            if len(text) + len(content) > max_bytes:
                break
            text += content
            self.files.append(file)
        if len(text) <= context:
            raise ValueError(f"{split} text of {len(text)} bytes is too short for a context of {context}")
        self.text = torch.frombuffer(text, dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):  # by which iteration ends, too
            raise IndexError(f"there are {len(self)} windows, 0 to {len(self) - 1}: no {index}")
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention, then a perceptron four times as wide, each added to its normalised input's residual."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attend(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    """A pre-norm decoder-only transformer: int64 tokens (N, T <= context) to logits (N, T, vocabulary).

    Input and output embeddings are one matrix. 644,224 parameters by default, nearly all in the blocks.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2).
    """

    def __init__(
        self, layers: int = 3, heads: int = 4, width: int = 128, context: int = 128, vocabulary: int = 256
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be split into {heads} heads")
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(Block(heads, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        # PyTorch's default of N(0, 1) for embeddings would make the first logits, and so the first loss, huge.
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.token.weight)
