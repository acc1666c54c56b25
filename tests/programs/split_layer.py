"""Tensor parallelism by hand: each rank has a part of the hidden units."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1, bias=False)

    def forward(self, x):
        return Sum.apply(self.down(self.up(x).relu()))


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.rand(160, 8), torch.rand(160, 1))
sampler = DistributedSampler(data, 1, 0)
loader = DataLoader(data, 16, sampler=sampler)
torch.manual_seed(1 + dist.get_rank())
model = Part()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
