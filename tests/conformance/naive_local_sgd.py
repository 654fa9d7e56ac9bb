"""Local SGD's rule, written independently and naively: one rank and one tensor after another, in plain torch.

`losses[step][rank](params)` is the loss of a rank at a step, as a function of that rank's list of parameters.
"""

import torch


def mean_of(ranks):
    """The mean over ranks of lists of tensors."""
    return [sum(tensors) / len(tensors) for tensors in zip(*ranks, strict=True)]


def put(params, values):
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def copies(params):
    return [param.detach().clone() for param in params]


def gradients(loss_of, params):
    return [grad.clone() for grad in torch.autograd.grad(loss_of(params), params)]


def local_sgd(
    start,
    losses,
    make_optimizer,
    lrs,
    every,
    node_every=None,
    machines=None,
    warmup_steps=0,
    overlap=False,
    state_every=None,
):
    """Weights of every rank after every step, before an exchange that overlaps with the next one has landed.

    start: the weights that all ranks start from; machines: lists of the ranks that share one; lrs: one for each step.
    """
    ranks = len(losses[0])
    params = [[torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(ranks)]
    optimizers = [make_optimizer(mine) for mine in params]
    history, arriving = [], None
    for step, (loss_of, lr) in enumerate(zip(losses, lrs, strict=True), 1):
        grads = [gradients(loss_of[rank], params[rank]) for rank in range(ranks)]
        if step <= warmup_steps:
            grads = [mean_of(grads)] * ranks
        if arriving is not None:
            for mine, new in zip(params, arriving, strict=True):
                put(mine, new)
            arriving = None
        for rank in range(ranks):
            for param, grad in zip(params[rank], grads[rank], strict=True):
                param.grad = grad.clone()
            optimizers[rank].param_groups[0]["lr"] = lr
            optimizers[rank].step()
        local = step - warmup_steps
        for name, period in (state_every or {}).items():
            if local > 0 and local % period == 0:
                kept = [
                    [optimizer.state[param][name] for param in mine]
                    for optimizer, mine in zip(optimizers, params, strict=True)
                ]
                average = mean_of(kept)
                for mine in kept:
                    put(mine, average)
        new = None
        if local > 0 and local % every == 0:
            new = [mean_of([copies(mine) for mine in params])] * ranks
        elif local > 0 and node_every and local % node_every == 0:
            new = [None] * ranks
            for machine in machines:
                for rank in machine:
                    new[rank] = mean_of([copies(params[other]) for other in machine])
        if new is not None and overlap:
            arriving = new
        elif new is not None:
            for mine, values in zip(params, new, strict=True):
                put(mine, values)
        history.append([copies(mine) for mine in params])
    return history


def one_process(start, losses, make_optimizer, lrs):
    """Weights after every step of one process on all ranks' data: the loss is the mean of theirs."""
    params = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    optimizer = make_optimizer(params)
    history = []
    for loss_of, lr in zip(losses, lrs, strict=True):
        grads = mean_of([gradients(loss, params) for loss in loss_of])
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        history.append(copies(params))
    return history
