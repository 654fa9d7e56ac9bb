"""A classifier, data-parallel: sampler, learning rate by the number of ranks, one start for all, averaged metrics."""

import torch
from digits_hvd import accuracy, classifier, digits, report

import dgcopt.hvd as hvd

hvd.init()
loader, sampler, tests = digits(batch_size=32)
model = classifier()

optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()

loss, right = accuracy(model, tests)
report(model, loss=loss, accuracy=right)
