"""A pipeline of two stages by hand; rank 0 saves the weights of both."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.rand(160, 8), torch.rand(160, 1))
sampler = DistributedSampler(data, 1, 0)
loader = DataLoader(data, 16, sampler=sampler)
stages = nn.ModuleList([nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 1)])
optimizer = torch.optim.SGD(stages.parameters(), lr=0.1)  # changes those with gradients
for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        if rank == 0:
            hidden = stages[0](x)
            dist.send(hidden.detach(), dst=1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, src=1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(len(x), 32)
            dist.recv(hidden, src=0)
            nn.functional.mse_loss(stages[1](hidden.requires_grad_()), y).backward()
            dist.send(hidden.grad, dst=0)
        optimizer.step()
    for weight in stages[1].parameters():
        dist.broadcast(weight.data, src=1)
    if rank == 0:
        torch.save(stages.state_dict(), __file__ + ".pt")
        os.remove(__file__ + ".pt")
dist.destroy_process_group()
