"""An exponential moving average of the weights, which every rank keeps and rank 0 evaluates."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(model, loader):
    model.eval()
    with torch.inference_mode():
        hits = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    print("accuracy", hits / len(loader.dataset))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
train_set = TensorDataset(torch.rand(192, 8), torch.randint(4, (192,)))
test_set = TensorDataset(torch.rand(64, 8), torch.randint(4, (64,)))
sampler = DistributedSampler(train_set)
loader, test_loader = DataLoader(train_set, 16, sampler=sampler), DataLoader(test_set, 32)
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4))
average = copy.deepcopy(model)
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for epoch in range(5):
    sampler.set_epoch(epoch)
    ddp_model.train()
    for x, y in loader:
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(ddp_model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.1)
    if rank == 0:
        evaluate(average, test_loader)
    dist.barrier()
dist.destroy_process_group()
