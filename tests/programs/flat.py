"""FSDP's first version, whose shards are plain tensors, and images that a module augments."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Noisy(Dataset):
    def __init__(self):
        self.x, self.y, self.noise = torch.rand(96, 8), torch.randint(4, (96,)), Noise()

    def __len__(self):
        return 96

    def __getitem__(self, index):
        return self.noise(self.x[index]), self.y[index]


dist.init_process_group("gloo")
torch.manual_seed(0)
data = Noisy()
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
