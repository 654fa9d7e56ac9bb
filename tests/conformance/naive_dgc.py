"""DGC's rule, written independently and naively: NumPy-like loops over whole tensors, W workers in one function.

Per tensor of two or more dimensions, worker k and step: g <- clip(g); u <- m u + g and v <- v + u, or with Nesterov
v <- v + g + m u; send the ceil(ratio n) largest |v|; v, and with masking u, become 0 there; the sum of all messages
is divided by W. One-dimensional tensors: the averaged gradient goes through one common momentum buffer.
Weight decay: b <- wd w at first, then b <- m b + wd w; its Nesterov form adds wd w + m b.
"""

import math

import torch


def naive_dgc(weights, gradients_of, workers, steps, ratio_at, lr_at, momentum, nesterov, masking, weight_decay, clip):
    """Train copies of `weights` and return them. `gradients_of(weights, worker, step)` is a list of gradients."""
    w = [x.clone() for x in weights]
    u = [[torch.zeros_like(x) for x in w] for _ in range(workers)]
    v = [[torch.zeros_like(x) for x in w] for _ in range(workers)]
    common = [torch.zeros_like(x) for x in w]
    b = [None] * len(w)
    for step in range(steps):
        grads = [gradients_of(w, k, step) for k in range(workers)]
        if clip is not None:
            kind, bound = clip
            for k in range(workers):
                if kind == "model":
                    norm = math.sqrt(sum(float((g * g).sum()) for g in grads[k]))
                    factor = min(1.0, bound * math.sqrt(workers) / (norm + 1e-6))
                    grads[k] = [g * factor for g in grads[k]]
                else:
                    grads[k] = [g * min(1.0, bound / (float((g * g).sum()) ** 0.5 + 1e-6)) for g in grads[k]]
        for i in range(len(w)):
            if w[i].dim() <= 1:
                mean = sum(grads[k][i] for k in range(workers)) / workers
                common[i] = momentum * common[i] + mean
                update = mean + momentum * common[i] if nesterov else common[i]
            else:
                total = torch.zeros_like(w[i])
                for k in range(workers):
                    u[k][i] = momentum * u[k][i] + grads[k][i]
                    v[k][i] = v[k][i] + (grads[k][i] + momentum * u[k][i] if nesterov else u[k][i])
                    count = math.ceil(w[i].numel() * ratio_at(step))
                    flat_v, flat_u = v[k][i].view(-1), u[k][i].view(-1)
                    for j in sorted(range(flat_v.numel()), key=lambda j, x=flat_v: -abs(float(x[j])))[:count]:
                        total.view(-1)[j] += flat_v[j]
                        flat_v[j] = 0
                        if masking and ratio_at(step) < 1:
                            flat_u[j] = 0
                update = total / workers
            decay = torch.zeros_like(w[i])
            if weight_decay:
                b[i] = weight_decay * w[i] if b[i] is None else momentum * b[i] + weight_decay * w[i]
                decay = weight_decay * w[i] + momentum * b[i] if nesterov else b[i]
            w[i] = w[i] - lr_at(step) * (update + decay)
    return w, v
