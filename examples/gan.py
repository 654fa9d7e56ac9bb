"""Two optimizers on the two parts of one model. The generator's backward pass also adds to the critic's gradients."""

import torch
from digits_hvd import report
from torch import nn

import dgcopt.hvd as hvd

CENTRE, WIDTH = 3.0, 0.5

hvd.init()
torch.manual_seed(10 + hvd.rank())
model = nn.ModuleDict(
    {"generator": nn.Linear(1, 1), "critic": nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))}
)


def optimizer_of(part: str) -> torch.optim.Optimizer:
    named = [(name, param) for name, param in model.named_parameters() if name.startswith(part)]
    optimizer = torch.optim.Adam([param for _, param in named], lr=0.01, betas=(0.5, 0.99))
    return hvd.DistributedOptimizer(optimizer, named_parameters=named)


def loss_of(samples: torch.Tensor, real: bool) -> torch.Tensor:
    verdict = model["critic"](samples)
    return nn.functional.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(real)))


critic, generator = optimizer_of("critic"), optimizer_of("generator")
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for _ in range(300):
    drawn = CENTRE + WIDTH * torch.randn(32, 1)
    made = model["generator"](torch.randn(32, 1))

    critic.zero_grad()
    (loss_of(drawn, True) + loss_of(made.detach(), False)).backward()
    critic.step()

    generator.zero_grad()
    loss_of(made, True).backward()
    generator.step()

centre = float(hvd.allreduce(model["generator"](torch.randn(200, 1)).mean().detach(), name="centre"))
report(model, loss=abs(centre - CENTRE))
