"""Training loops in the manner of the two ancestors, written anew: what ours is timed against.

torchrun --standalone --nproc-per-node 2 bench/ancestors.py --manner distribuuuu

distribuuuu  BIGBALLON/distribuuuu, tutorial/mnmc_ddp_launch.py (2021): images one by one through
             PIL in 4 workers a process, blocking copies, .item() twice a step (loss, hits).
tczhangzhi   tczhangzhi/pytorch-distributed, distributed.py (2021): the same, with 2 workers, top-1
             and top-5, a barrier, three all-reduces and three .item() a step, before backward.
bare         no ancestor: forward, backward and step on one batch that stays on the device, with
             our optimizer; one process has no DDP. What any loop on these devices has to do.

The model, data, global batch, learning rate, momentum and decay are those of mnmc_ddp_launch.py,
and so are the fields that are logged. Small images are made larger after they are augmented, as in
ours, but one by one by PIL. `--without` takes parts of a manner away:

loader       one batch stays on the device
sync         the sums of loss and hits stay on the device until they are logged, as in ours
optimizer    fused SGD, as in ours
"""

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate
from torchvision import datasets, models, transforms

WORKERS = {"distribuuuu": 4, "tczhangzhi": 2, "bare": 0}  # a process


def parse_args():
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("--manner", choices=WORKERS, required=True)
    add("--without", nargs="*", choices=["loader", "sync", "optimizer"], default=[])
    add("--dataset", choices=["cifar10", "fashion-mnist", "imagenet"], default="cifar10")
    add("--data", type=Path, default="data")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--arch", default="resnet18")
    add("--image-size", type=int)
    add("--workers", help="not used: a manner has its own")
    for flag, value in {"epochs": 5, "batch-size": 256, "seed": 0, "log-every": 50}.items():
        add(f"--{flag}", type=int, default=value)
    args = parser.parse_args()
    args.image_size = args.image_size or (224 if args.dataset == "imagenet" else 32)
    return args


class Items(Dataset):
    """Images (N, H, W, 3) in memory, one at a time by way of PIL, as torchvision's CIFAR10 does."""

    def __init__(self, images, labels, transform):
        self.images, self.labels, self.transform = images, labels.tolist(), transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, k):
        return self.transform(Image.fromarray(self.images[k])), self.labels[k]


def load_data(args):
    """The training set, with the same images as ours."""
    side = args.image_size if args.dataset == "imagenet" else 32
    steps = [transforms.RandomCrop(side, padding=side // 8), transforms.RandomHorizontalFlip()]
    if side != args.image_size:
        steps.append(transforms.Resize(args.image_size))
    steps += [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)]
    if args.dataset == "imagenet":
        steps = [transforms.Resize(args.image_size), transforms.CenterCrop(args.image_size), *steps]
        return datasets.ImageFolder(args.data / "train", transforms.Compose(steps))
    if args.dataset == "cifar10":
        data = datasets.CIFAR10(args.data, train=True)
        images, labels = data.data, np.array(data.targets)
    else:
        data = datasets.FashionMNIST(args.data, train=True)
        images, labels = np.pad(data.data.numpy(), [(0, 0), (2, 2), (2, 2)]), data.targets.numpy()
        images = images[..., None].repeat(3, axis=3)
    return Items(images, labels, transforms.Compose(steps))


def mean_over_processes(values, world_size):
    """Three all-reduces and three .item(), one after the other."""
    means = []
    for value in values:
        value = value.detach().clone()
        dist.all_reduce(value)
        means.append((value / world_size).item())
    return means


def log(event, **fields):
    """Prints one line, on rank 0 only; the probe records it."""
    if dist.get_rank() == 0:
        print(event, fields, flush=True)


def main(args):
    # processes and devices
    rank, local_rank, world_size = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    cuda = args.device == "cuda"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl" if cuda else "gloo")
    # model
    torch.manual_seed(args.seed)
    train_set = load_data(args)
    classes = len(getattr(train_set, "classes", range(10)))
    net = models.get_model(args.arch, num_classes=classes).to(device)
    bare = args.manner == "bare"
    model = net  # DDP would copy gradients and buffers on one device, too
    if world_size > 1 or not bare:
        model = DistributedDataParallel(net, gradient_as_bucket_view=bare)
    # data
    local_batch = args.batch_size // world_size
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    loader = DataLoader(
        train_set,
        local_batch,
        sampler=sampler,
        num_workers=WORKERS[args.manner],
        pin_memory=cuda,
        drop_last=True,
    )
    if bare or "loader" in args.without:
        some = torch.randperm(len(train_set))[:local_batch].tolist()
        kept = [x.to(device) for x in default_collate([train_set[k] for k in some])]
        loader = DataLoader([kept] * len(loader), batch_size=None)
    # optimizer
    own = {"fused": True} if bare or "optimizer" in args.without else {}
    optimizer = torch.optim.SGD(
        net.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=1e-4, **own
    )
    # train
    log("start", world_size=world_size, **vars(args))
    sync = not bare and "sync" not in args.without
    late = args.manner == "tczhangzhi"  # its copies do not block
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        if sys.version_info < (3, 11, 10):  # a worker may hang if it is forked just as a thread of
            time.sleep(0.1)  # gloo's begins: https://github.com/python/cpython/issues/112275
        logged, losses, hits, begin = 0, 0.0, 0.0, time.perf_counter()
        for step, (images, labels) in enumerate(loader, start=1):
            images = images.to(device, non_blocking=late)
            labels = labels.to(device, non_blocking=late)
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            if sync and args.manner == "tczhangzhi":
                right = logits.topk(5).indices.eq(labels[:, None]).float()
                top1, top5 = right[:, :1].sum() / len(labels), right.sum() / len(labels)
                dist.barrier()
                shown, hit, _ = mean_over_processes([loss, top1, top5], world_size)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if sync and args.manner == "distribuuuu":
                shown = loss.item()
                hit = logits.argmax(1).eq(labels).sum().item() / len(labels)
            elif not sync:
                shown = loss.detach()
                hit = 0.0 if bare else logits.argmax(1).eq(labels).float().mean()
            losses, hits = losses + shown, hits + hit
            if step % args.log_every == 0 or step == len(loader):
                count = step - logged
                sums = torch.stack([torch.as_tensor(x, device=device) for x in (losses, hits)])
                dist.all_reduce(sums)
                loss, accuracy = (sums / count / world_size).tolist()
                fields = {"loss": loss, "accuracy": accuracy, "images": count * args.batch_size}
                fields["seconds"] = time.perf_counter() - begin
                log("train", epoch=epoch, step=step, **fields)
                logged, losses, hits, begin = step, 0.0, 0.0, time.perf_counter()
    log("end", peak_gpu_memory_mib=torch.cuda.max_memory_allocated() / 2**20)


if __name__ == "__main__":
    main(parse_args())
    dist.destroy_process_group()
