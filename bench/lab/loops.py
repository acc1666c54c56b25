"""Training loops in the manner of the two ancestors, written anew: what ours is timed against.
torchrun --nproc-per-node 2 bench/lab/loops.py --manner distribuuuu

distribuuuu  BIGBALLON/distribuuuu, tutorial/mnmc_ddp_launch.py (2021): images one by one through
             PIL in 4 workers a process, blocking copies, .item() twice a step (loss, hits).
             Its SyncBatchNorm is left out: ours has none, and on a CPU there is none.
tczhangzhi   tczhangzhi/pytorch-distributed, distributed.py (2021): the same, with 2 workers, top-1
             and top-5, a barrier, three all-reduces and three .item() a step, before backward.
bare         no ancestor: forward, backward and step on one batch that stays on the device, with
             our optimizer. What any loop on this device has to do.

The model, data, global batch, learning rate, momentum and decay are those of mnmc_ddp_launch.py,
and so are the records that --log-json gets. Small images are made larger after they are augmented,
as in ours, but one by one by PIL. `--without` takes parts of a manner away:

loader       one batch stays on the device
sync         the sums of loss and hits stay on the device until they are logged, as in ours
optimizer    fused SGD, as in ours
"""

import argparse
import json
import os
import sys
import time
from itertools import islice, repeat
from pathlib import Path

started = time.perf_counter()
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import datasets, models, transforms

WORKERS = {"distribuuuu": 4, "tczhangzhi": 2, "bare": 0}  # a process

parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)
fail, add = parser.error, parser.add_argument


def parse_args():
    add("--manner", choices=WORKERS, required=True)
    add("--without", nargs="*", choices=["loader", "sync", "optimizer"], default=[])
    sets = ["cifar10", "fashion-mnist", "imagenet"]
    add("--dataset", choices=sets, default="cifar10")
    add("--data", type=Path, default="data")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cpu", "cuda"], default=device)
    add("--lr", type=float, default=0.01)
    add("--log-json", type=Path, default=os.devnull)
    numbers = {"image-size": 32, "epochs": 5, "max-steps": 10**9, "batch-size": 256}
    for flag, value in (numbers | {"seed": 0, "log-every": 50}).items():
        add(f"--{flag}", type=int, default=value)
    args = parser.parse_args()
    if min(args.image_size, args.epochs, args.max_steps, args.batch_size, args.log_every) < 1:
        fail("numbers must be 1 or more")
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
    side = 32 if args.dataset in ("cifar10", "fashion-mnist") else args.image_size
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


def main(args):
    # where this process runs: without torchrun it is one process, and the model is not wrapped
    distributed = "RANK" in os.environ
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    rank, local_rank, world_size = (
        (int(os.environ[name]) for name in names) if distributed else (0, 0, 1)
    )
    cuda = args.device == "cuda"
    device = torch.device("cuda" if cuda else "cpu", local_rank)
    if args.manner == "tczhangzhi" and not distributed:
        fail("--manner tczhangzhi reduces over processes: start it with torchrun")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    if distributed:
        dist.init_process_group("nccl" if cuda else "gloo")
    # model
    torch.manual_seed(args.seed)
    try:
        train_set = load_data(args)
    except (EOFError, OSError, RuntimeError, ValueError) as error:
        fail(f"--data {args.data}: no intact {args.dataset} there: {error}")
    classes = len(getattr(train_set, "classes", range(10)))
    net = model = models.resnet18(num_classes=classes).to(device)
    if distributed:
        model = torch.nn.parallel.DistributedDataParallel(net)
    # data
    local_batch, rest = divmod(args.batch_size, world_size)
    if rest or args.batch_size > len(train_set):
        fail(f"--batch-size {args.batch_size}: must be shared evenly, and be smaller than the data")
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    loader = DataLoader(
        train_set,
        local_batch,
        sampler=sampler,
        num_workers=WORKERS[args.manner],
        pin_memory=cuda,
        drop_last=True,
    )
    bare = args.manner == "bare"
    if resident := bare or "loader" in args.without:
        kept = [x.to(device) for x in next(iter(DataLoader(train_set, local_batch, shuffle=True)))]
    # optimizer
    own = {"fused": True} if bare or "optimizer" in args.without else {}
    optimizer = torch.optim.SGD(
        net.parameters(), args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4, **own
    )

    def log(event, seconds, **fields):
        """One record, by rank 0; seconds are the slowest process's."""
        slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
        if distributed:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if rank == 0:
            fields |= {"time": time.time(), "seconds": slowest.item()}
            line = json.dumps({"event": event, **fields}, default=str)
            print(line, flush=True)
            with open(args.log_json, "a") as file:
                file.write(line + "\n")

    def mean(total, steps):
        """The mean of a number a step over the window's steps and all processes."""
        total = torch.as_tensor(total, dtype=torch.float64, device=device).detach().clone()
        if distributed:
            dist.all_reduce(total)
        return total.item() / steps / world_size

    # train
    sync = not bare and "sync" not in args.without
    facts = {"script": Path(__file__).stem, **vars(args), "torch": torch.__version__}
    facts |= {"world_size": world_size, "local_batch": local_batch}
    log("start", time.perf_counter() - started, **facts)
    steps = min(args.epochs * len(loader), args.max_steps)
    step = 0
    for epoch in range(1, -(-steps // len(loader)) + 1):
        sampler.set_epoch(epoch)
        if sys.version_info < (3, 11, 10):  # a worker may hang if it is forked just as a thread of
            time.sleep(0.1)  # gloo's begins: https://github.com/python/cpython/issues/112275
        last, logged, losses, hits = min(epoch * len(loader), steps), step, 0.0, 0.0
        begin = time.perf_counter()
        for images, labels in islice(repeat(kept) if resident else loader, last - step):
            step += 1
            late = args.manner == "tczhangzhi"  # its copies do not block
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
            if step % args.log_every == 0 or step == last:
                count = step - logged
                fields = {"loss": mean(losses, count), "accuracy": mean(hits, count)}
                seconds = time.perf_counter() - begin
                images = count * args.batch_size
                log("train", seconds, epoch=epoch, step=step, images=images, **fields)
                logged, losses, hits, begin = step, 0.0, 0.0, begin + seconds
    log("end", time.perf_counter() - started)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
