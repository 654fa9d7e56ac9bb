"""The norm of the averaged gradient is clipped between `synchronize` and a step that does not average again."""

import torch
from digits_hvd import accuracy, classifier, digits, report

import dgcopt.hvd as hvd

LARGEST = 0.5

hvd.init()
loader, sampler, tests = digits(batch_size=32)
model = classifier()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

clipped = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.synchronize()
        clipped += int(torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST) > LARGEST)
        with optimizer.skip_synchronize():
            optimizer.step()

loss, right = accuracy(model, tests)
report(model, loss=loss, accuracy=right, clipped=clipped)
