"""Data parallelism by hand: rank 0's weights for all, and an all-reduce of every gradient."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
for weight in model.parameters():
    dist.broadcast(weight.data, src=0)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
x = torch.rand(256, 8, generator=torch.Generator().manual_seed(0))
y = x.sum(1, keepdim=True)
for epoch in range(30):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    for batch in order[rank::size].split(16):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= size
        optimizer.step()
dist.destroy_process_group()
