"""Seven small batches per step; the last window of every epoch is shorter."""

import torch
from digits_hvd import accuracy, classifier, digits, report

import dgcopt.hvd as hvd

PASSES = 7

hvd.init()
loader, sampler, tests = digits(batch_size=8)
model = classifier()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9),
    named_parameters=model.named_parameters(),
    backward_passes_per_step=PASSES,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

steps = 0
for epoch in range(4):
    sampler.set_epoch(epoch)
    for number, (images, targets) in enumerate(loader, start=1):
        (torch.nn.functional.cross_entropy(model(images), targets) / PASSES).backward()
        if number % PASSES == 0 or number == len(loader):
            optimizer.step()
            optimizer.zero_grad()
            steps += 1

assert len(loader) % PASSES, "no window is shorter"
loss, right = accuracy(model, tests)
report(model, loss=loss, accuracy=right, steps=steps)
