"""Apex: automatic mixed precision and its DistributedDataParallel, started by torchrun.
torchrun --nproc-per-node 4 [--nnodes 2 --node-rank 0 --master-addr HOST] mnmc_apex.py
"""

import argparse
import fcntl
import json
import os
import time
from functools import partial
from itertools import islice
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

started = time.perf_counter()  # before torch: its import is a part of the start-up
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchvision import datasets, io, models
from torchvision.transforms import v2

parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, epilog=__doc__)
fail, add = parser.error, parser.add_argument  # fail: one line, exit code 2


def parse_args():
    flags = {"dataset": (str, "cifar10"), "data": (Path, "data"), "arch": (str, "resnet18")}
    flags |= {"image-size": (int, None), "epochs": (int, 5), "max-steps": (int, None)}
    flags |= {"batch-size": (int, 256), "lr": (float, 0.01), "workers": (int, 4), "seed": (int, 0)}
    flags |= {"device": (str, "auto"), "log-every": (int, 50)}
    flags |= {"log-json": (Path, None), "save": (Path, None)}
    choices = {"dataset": ["cifar10", "fashion-mnist", "imagenet", "synthetic"]}
    choices |= {"device": ["auto", "cpu", "cuda"], "arch": models.list_models(models)}
    for flag, (kind, value) in flags.items():
        add(f"--{flag}", type=kind, default=value, choices=choices.get(flag), help=f"[{value}]")
    add("--opt-level", default="O1", choices=["O0", "O1", "O2", "O3"], help="[O1], on a GPU")
    args = parser.parse_args()
    for name, value in vars(args).items():
        least = 0 if name in ("workers", "seed") else 1e-9
        if type(value) in (int, float) and not value >= least:  # nan neither
            fail(f"--{name.replace('_', '-')} {value}: give a larger number")
    if any(p.is_dir() or not os.access(p.parent, os.W_OK) for p in (args.log_json, args.save) if p):
        fail("--log-json, --save: name files in existing folders that you may write to")
    args.image_size = args.image_size or (224 if args.dataset == "imagenet" else 32)
    return args


def load_data(args, part):
    """A data set, and how the loader makes a batch (uint8 images, labels) of its items."""
    if args.dataset == "imagenet":
        crop = v2.Compose([v2.Resize(args.image_size), v2.CenterCrop(args.image_size)])
        decode = partial(io.decode_image, mode="RGB")
        return datasets.ImageFolder(args.data / part, crop, loader=decode), None
    if args.dataset == "cifar10":
        with open(__file__) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process downloads, the others wait here
            data = datasets.CIFAR10(args.data, part == "train", download=True)
        images, labels = torch.tensor(data.data), torch.tensor(data.targets)
    elif args.dataset == "fashion-mnist":
        data = datasets.FashionMNIST(args.data, part == "train")
        images, labels = F.pad(data.data, [2] * 4)[..., None].expand(-1, -1, -1, 3), data.targets
    else:  # a shade a class, plus noise
        labels = torch.arange(10_000 if part == "train" else 2_000) % 10
        noise = torch.randint(64, (len(labels), *[args.image_size] * 2, 3), dtype=torch.uint8)
        images = 20 * labels[:, None, None, None].byte() + noise
    images = images.permute(0, 3, 1, 2).contiguous()
    return range(len(images)), lambda items: (images[items], labels[items])


def augment(images, size, draws=None):
    """uint8 images (N, 3, H, W) and random integers (3, N), to floats (N, 3, size, size)."""
    if draws is not None:  # shift by up to an eighth, black beyond the edge, and flip one in two
        edge, most = images.shape[-1], images.shape[-1] // 8
        y, x = draws[:2] % (2 * most + 1)
        windows = F.pad(images, [most] * 4).unfold(2, edge, 1).unfold(3, edge, 1)  # a view
        images = windows[torch.arange(len(images), device=images.device), :, y, x]
        images = torch.where(draws[2, :, None, None, None] % 2 == 0, images, images.flip(3))
    images = images.float().sub_(128).div_(64)
    return images if images.shape[-1] == size else F.interpolate(images, (size, size))


def main(args):
    def log(event, maxima, sums=None, **fields):
        if sums is not None:  # of loss, hits and images
            dist.all_reduce(sums)
            loss, hits, images = sums.tolist()
            fields |= {"loss": loss / images, "accuracy": hits / images, "images": int(images)}
        values = torch.tensor([*maxima.values()], dtype=torch.float64, device=device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        fields |= zip(maxima, values.tolist(), strict=True)
        if rank == 0:
            shown = (f"{k}={v:.4f}" if type(v) is float else f"{k}={v}" for k, v in fields.items())
            print(event, *shown, flush=True)
            with open(args.log_json or os.devnull, "a") as file:
                file.write(json.dumps({"event": event, **fields}, default=str) + "\n")

    # 0. where this process runs
    try:
        from apex import amp
        from apex.parallel import DistributedDataParallel
    except (ImportError, OSError) as error:
        fail(f"no apex.amp and apex.parallel, docs/backends.md says which has them: {error!r}")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if not set(names) <= set(os.environ):
        fail(f"{', '.join(names)} are set by torchrun: start this script with it")
    rank, local_rank, world_size, local_world_size = (int(os.environ[name]) for name in names)
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if cuda else "cpu", local_rank)
    if cuda and local_rank >= torch.cuda.device_count():
        fail(f"--device: no GPU for process {local_rank} of {local_world_size}, try --device cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # pays off: every batch has the same shape
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.empty(2**25 - 2**16, dtype=torch.uint8)  # freed at once: glibc then keeps what is freed
    # 1. model
    torch.manual_seed(args.seed)  # the same weights in every process
    try:
        (train_set, gather), (test_set, test_gather) = map(load_data, [args] * 2, ("train", "val"))
    except (AssertionError, EOFError, OSError, RuntimeError, ValueError) as error:
        fail(f"--data {args.data}: no intact {args.dataset} there, see README.md: {error!r}")
    net = models.get_model(args.arch, num_classes=len(getattr(train_set, "classes", range(10))))
    model = net.to(device)
    # 2. data
    local_batch, rest = divmod(args.batch_size, world_size)
    if rest or args.batch_size > len(train_set) or world_size > len(test_set):
        fail(f"--batch-size {args.batch_size}: not a multiple of {world_size}, or too few images")
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    train_batches = BatchSampler(sampler, local_batch, drop_last=True)
    batches = BatchSampler(range(rank, len(test_set), world_size), local_batch, drop_last=False)
    workers = args.workers // local_world_size if args.dataset == "imagenet" else 0
    load = partial(DataLoader, num_workers=workers, persistent_workers=workers > 0, pin_memory=cuda)
    train_loader = load(train_set, batch_sampler=train_batches, collate_fn=gather)
    test_loader = load(test_set, batch_sampler=batches, collate_fn=test_gather)  # each image once
    # 3. optimizer
    sgd = partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True)
    optimizer = sgd(net.parameters(), args.lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, enabled=cuda)
    model = (DistributedDataParallel if cuda else torch.nn.parallel.DistributedDataParallel)(model)
    # 4. train
    facts = {"script": Path(__file__).stem, **vars(args), "torch": torch.__version__}
    facts |= {"backend": dist.get_backend(), "world_size": world_size, "local_batch": local_batch}
    facts |= {"device_name": torch.cuda.get_device_name() if cuda else "cpu"}
    log("start", {"startup_seconds": time.perf_counter() - started}, **facts)
    steps = min(args.epochs * len(train_loader), args.max_steps or 10**9)
    step, epochs = 0, -(-steps // len(train_loader))
    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)  # else every epoch repeats the order
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        last, waited = min(epoch * len(train_loader), steps), 0.0
        begin = asked = time.perf_counter()
        for images, labels in islice(train_loader, last - step):
            waited += time.perf_counter() - asked
            step += 1
            dice = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
            draw = torch.randint(2**31, (3, args.batch_size), generator=dice)[:, rank::world_size]
            images, labels, draw = (x.to(device, non_blocking=True) for x in (images, labels, draw))
            logits = model(augment(images, args.image_size, draw))
            losses = F.cross_entropy(logits, labels, reduction="none")
            optimizer.zero_grad()
            with amp.scale_loss(losses.mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()
            sums += torch.stack([losses.detach(), logits.argmax(1) == labels, labels >= 0]).sum(1)
            if step % args.log_every == 0 or step in (1, last):
                sums.tolist()  # waits for the device: once a line, not once a step
                times = {"seconds": time.perf_counter() - begin, "data_seconds": waited}
                log("train", times, sums, epoch=epoch, step=step)
                sums, begin, waited = torch.zeros_like(sums), begin + times["seconds"], 0.0
            asked = time.perf_counter()
        # 5. evaluate
        for buffer in net.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm's averages: each process has its own until here
        net.eval()
        with torch.inference_mode():
            for images, labels in test_loader:
                images, labels = (x.to(device, non_blocking=True) for x in (images, labels))
                logits = net(augment(images, args.image_size))
                losses = F.cross_entropy(logits, labels, reduction="none")
                sums += torch.stack([losses, logits.argmax(1) == labels, labels >= 0]).sum(1)
        net.train()
        log("eval", {"seconds": time.perf_counter() - begin}, sums, epoch=epoch)
    # 6. finish
    kib = torch.cuda.max_memory_allocated() / 1024 if cuda else getrusage(RUSAGE_SELF).ru_maxrss
    log("end", {"seconds": time.perf_counter() - started, "peak_memory_mib": kib / 1024})
    if args.save and rank == 0:  # the whole file or none: on a full disk the old one stays
        part = args.save.with_name(args.save.name + ".part")
        try:
            torch.save(net.state_dict(), part)
            part.replace(args.save)
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            fail(f"--save {args.save}: not written, the old file stays: {error}")
    del model  # what Apex could not import keeps this frame: gloo's threads would abort the exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
