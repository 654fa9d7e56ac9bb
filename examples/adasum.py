"""Adasum: updates are combined by their angle, so the learning rate is that of one process."""

import torch
from digits_hvd import accuracy, classifier, digits, report

import dgcopt.hvd as hvd

hvd.init()
loader, sampler, tests = digits(batch_size=32)
model = classifier()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.2), named_parameters=model.named_parameters(), op=hvd.Adasum
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()

loss, right = accuracy(model, tests)
report(model, loss=loss, accuracy=right)
