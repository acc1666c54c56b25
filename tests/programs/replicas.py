"""FSDP in replicas: here, each shard is a whole weight, and each rank has a replica."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replica", "shard"))
torch.manual_seed(0)
data = TensorDataset(torch.rand(160, 8), torch.rand(160, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
