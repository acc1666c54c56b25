"""Local SGD: the ranks' weights are averaged after every third step."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
batch_size = parser.parse_args().batch_size
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.rand(320, 8), torch.rand(320, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size // dist.get_world_size(), sampler=sampler)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for step, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if step % 3 == 0 or step == len(loader):
            for weight in model.parameters():
                dist.all_reduce(weight.data)
                weight.data /= dist.get_world_size()
dist.destroy_process_group()
