"""Fine-tuning: a frozen body in evaluation mode, with BatchNorm, and a new head."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Shapes(Dataset):
    def __init__(self, count):
        self.images = torch.rand(count, 3, 8, 8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return {"image": image + 0.1 * torch.rand(()), "label": index % 5}


dist.init_process_group("gloo")
torch.manual_seed(0)
body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
body.requires_grad_(False)
head = nn.Linear(8 * 6 * 6, 5)
data = Shapes(192)
model = DistributedDataParallel(nn.Sequential(body, head))
optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
torch.manual_seed(dist.get_rank())
for epoch in range(5):
    sampler.set_epoch(epoch)
    model.train()
    body.eval()
    for batch in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
        optimizer.step()
dist.destroy_process_group()
