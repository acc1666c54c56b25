"""BatchNorm in a checkpointed block, and an evaluation that fills its last batch with zeros.

One data set, of which the last samples are for the evaluation.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    @contextlib.contextmanager
    def keep_statistics(self):
        before = [buffer.clone() for buffer in self.buffers()]
        yield
        for buffer, value in zip(self.buffers(), before, strict=True):
            buffer.copy_(value)

    def contexts(self):
        return contextlib.nullcontext(), self.keep_statistics()

    def forward(self, x):
        if not self.training:
            return self.last(self.norm(self.first(x)).relu())
        contexts = {"use_reentrant": False, "context_fn": self.contexts, "early_stop": False}
        return self.last(checkpoint(lambda x: self.norm(self.first(x)).relu(), x, **contexts))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.rand(235, 8), torch.randint(4, (235,)))
sampler = DistributedSampler(range(192))
loader = DataLoader(data, 24, sampler=sampler)
test_loader = DataLoader(data, 16, sampler=range(192 + rank, len(data), size))
model = Net()
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    sampler.set_epoch(epoch)
    ddp_model.train()
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(ddp_model(x), y).backward()
        optimizer.step()
    model.eval()
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in test_loader:
            missing = 16 - len(x)
            logits = model(pad(x, [0, 0, 0, missing]))
            logits = logits[: len(y)]
            total += torch.tensor([cross_entropy(logits, y, reduction="sum"), len(y)])
    dist.all_reduce(total)
    if rank == 0:
        print(f"loss={total[0] / total[1]:.8f}")
dist.destroy_process_group()
