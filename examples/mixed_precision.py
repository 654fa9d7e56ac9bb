"""torch.amp as its documentation has it, with gradients of one rank that overflow once."""

import torch
from digits_hvd import accuracy, classifier, digits, report

import dgcopt.hvd as hvd

OVERFLOW = 5

hvd.init()
loader, sampler, tests = digits(batch_size=32)
model = classifier()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(images), targets)
        if step == OVERFLOW and hvd.rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        step += 1

loss, right = accuracy(model, tests)
scales = hvd.allgather(torch.tensor([scaler.get_scale()]), name="scales")
report(model, loss=loss, accuracy=right, scales=scales.tolist())
