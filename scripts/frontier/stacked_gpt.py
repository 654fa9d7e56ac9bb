"""CharGPT of several ranks in one forward and backward pass: each weight is a stack of the ranks' weights.

So N ranks cost no more than one with N times the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["backward", "loss_of"]


def logits(weights: dict[str, Tensor], tokens: Tensor, heads: int) -> Tensor:
    """The logits of N replicas of CharGPT: stacked weights `[N, ...]`, tokens `[N, B, T]`, result `[N, B * T, V]`."""
    (replicas, count, length), table = tokens.shape, weights["token.weight"]
    vocabulary, width = table.shape[1:]

    def norm(x: Tensor, name: str) -> Tensor:
        gain, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return torch.addcmul(bias[:, None], F.layer_norm(x, (width,)), gain[:, None])

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.baddbmm(weights[f"{name}.bias"][:, None], x, weights[f"{name}.weight"].transpose(1, 2))

    rows = tokens + torch.arange(replicas).view(-1, 1, 1) * vocabulary
    x = F.embedding(rows, table.flatten(0, 1)) + weights["position"][:, None, :length]
    x = x.flatten(1, 2)
    for block in sorted({name.split(".")[1] for name in weights if name.startswith("blocks.")}, key=int):
        at = f"blocks.{block}."
        parts = linear(norm(x, at + "norm1"), at + "attend").view(replicas * count, length, 3, heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).reshape(x.shape), at + "project")
        x = x + linear(F.gelu(linear(norm(x, at + "norm2"), at + "mlp.0")), at + "mlp.2")
    return torch.bmm(norm(x, "norm"), table.transpose(1, 2))


def loss_of(weights: dict[str, Tensor], windows: Tensor, heads: int) -> Tensor:
    """The sum over replicas of the mean loss of each, so that gradients are those of every replica alone."""
    found = logits(weights, windows[..., :-1], heads)
    return F.cross_entropy(found.flatten(0, 1), windows[..., 1:].flatten()) * len(windows)


def backward(replicas: list[dict[str, nn.Parameter]], windows: Tensor, heads: int, clip: float) -> float:
    """Give each replica the gradient of its own windows `[N, B, T + 1]`, clipped to the norm; return the mean loss."""
    stacks = {name: torch.stack([replica[name] for replica in replicas]) for name in replicas[0]}
    leaves = {name: stack.detach().requires_grad_() for name, stack in stacks.items()}
    loss = loss_of(leaves, windows, heads)
    loss.backward()
    grads = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
    norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)
    scale = (clip / (norms + 1e-6)).clamp(max=1.0)
    # only now do gradients arrive at the parameters, whose hooks may launch exchanges
    torch.autograd.backward(list(stacks.values()), [g * scale.view(-1, *[1] * (g.dim() - 1)) for g in grads])
    return float(loss.detach()) / len(replicas)
