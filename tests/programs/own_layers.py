"""BatchNorm over all ranks, and SGD with momentum, both written by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class SyncNorm(nn.BatchNorm1d):
    def forward(self, x):
        moments = torch.stack([x.mean(0), x.square().mean(0)])
        mean, square = Sum.apply(moments) / dist.get_world_size()
        variance = square - mean.square()
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


class Momentum(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                old = self.state[weight].get("buffer", 0)
                new = self.state[weight]["buffer"] = group["momentum"] * old + weight.grad
                weight -= group["lr"] * new


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.rand(160, 8), torch.rand(160, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), SyncNorm(32), nn.Linear(32, 1)))
optimizer = Momentum(model.parameters(), {"lr": 0.01, "momentum": 0.9})
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
