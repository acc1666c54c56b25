"""Activation checkpointing: forward keeps little, and backward computes it once more.

torchrun --standalone --nproc-per-node 4 techniques/activation_checkpointing.py

Start reading at main(). All scripts in this project train on the same images in the same batches,
augmented alike; `diff -u snsc.py mnmc_ddp_launch.py` shows what it takes to use several devices.
Left out on purpose: learning-rate schedule, random resized crops, mixed precision, resuming.
"""

import argparse
import contextlib
import fcntl
import json
import math
import os
import resource
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    TensorDataset,
    default_collate,
    default_convert,
)
from torchvision import datasets, models
from torchvision.io import decode_image
from torchvision.transforms import v2


class UserError(Exception):
    """An error that the user can fix. run() prints it as one line."""


def main(args):
    started = time.perf_counter()

    # 0. device
    try:  # torchrun starts this script once for each device, and tells each process who it is
        rank = int(os.environ["RANK"])  # on 2 machines with 4 GPUs each: 0 to 7
        local_rank = int(os.environ["LOCAL_RANK"])  # 0 to 3 on both
        world_size = int(os.environ["WORLD_SIZE"])  # 8: all processes
        local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])  # 4: those on this machine
    except KeyError as missing:
        raise UserError(f"{missing} is not set: start this script with torchrun") from None
    # --batch-size counts the images of all processes together: more processes, fewer images each,
    # and the same steps with the same learning rate. (The other habit: so many images for each
    # process, and a learning rate that grows with them. Then the runs no longer train alike.)
    local_batch = args.batch_size // world_size
    if args.batch_size % world_size or local_batch < 2:  # BatchNorm needs two
        message = f"give a multiple of the {world_size} processes, two images for each at least"
        raise UserError(f"--batch-size {args.batch_size}: {message}")

    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    if cuda and local_rank >= torch.cuda.device_count():
        raise UserError(f"--device: no GPU for process {local_rank} here, try --device cpu")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # else "cuda" is the first GPU, for all processes
    # Joins the other processes: from now on they can exchange tensors, GPUs through NCCL, CPUs
    # through Gloo. If one dies, the launcher ends the others, or their next exchange fails.
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend)
    torch.backends.cudnn.benchmark = True  # try cuDNN's algorithms once, then use the fastest

    # 1. data
    torch.manual_seed(args.seed)  # alike in all processes: they make the same synthetic images
    train_set, test_set, classes = load_datasets(args.dataset, args.data, args.image_size)
    if args.batch_size > len(train_set):
        raise UserError(f"--batch-size {args.batch_size}: there are only {len(train_set)} images")
    # Shuffles alike in all processes. Then, of 4, process 0 takes the images 0, 4, 8 ... of that
    # order, process 1 takes 1, 5, 9 ... With drop_last the last few are left out, where not all
    # processes would get one; else some images would be taken twice.
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader_options = {
        "num_workers": math.ceil(args.workers / local_world_size),  # --workers is for a node
        "persistent_workers": args.workers > 0,  # the same ones in every epoch
        "pin_memory": cuda,  # copies to the GPU can then overlap with computing
    }
    train_loader = DataLoader(
        WithIndex(train_set),
        local_batch,
        sampler=sampler,
        drop_last=True,
        collate_fn=default_convert,
        **loader_options,
    )
    # Any series of indices will do as a sampler. Here each image comes exactly once, so that some
    # processes may take one more than others; DistributedSampler would repeat or leave out some.
    test_sampler = range(rank, len(test_set), world_size)
    test_loader = DataLoader(test_set, local_batch, sampler=test_sampler, **loader_options)

    # 2. model
    model = models.get_model(args.arch, num_classes=len(classes)).to(device)
    repeated = list(blocks(model))
    if not repeated:
        raise UserError(f"--arch {args.arch}: it has no blocks to checkpoint, try resnet18")
    for block in repeated:
        keep_little(block)
    # Sends the weights of process 0 to all. From now on each backward() averages the gradients over
    # the processes, those of the last layers while it still computes those of the first. All local
    # batches have one size, so that is the gradient of the whole batch, and all take the same step.
    # Only BatchNorm sees its local batch alone. (With SyncBatchNorm it would see the whole one.)
    #
    # ddp_model and model share their weights: train with one, evaluate and save the other. It needs
    # no device_ids, since the model is on its device. With gradient_as_bucket_view the gradients
    # lie where they are sent from, which spares a second copy of them.
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    torch.manual_seed(args.seed + rank)  # from here on for dropout: else all drop the same units

    # 3. optimizer
    # fused: one kernel updates all weights.
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True
    )

    # 4. train
    about = {
        "script": Path(__file__).stem,
        "torch": torch.__version__,
        "device_name": torch.cuda.get_device_name() if cuda else "cpu",
        "backend": backend,
        "world_size": world_size,
        "local_batch": local_batch,
    }
    if rank == 0:  # one line, not one from each process
        log(args.log_json, "start", **about, **vars(args))

    step = 0
    kept = Kept(model)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # else all epochs have the same order
        # draws[index] says how to shift and flip the images with these indices, in this epoch.
        draws = draw_augmentation(len(train_set), args.seed, epoch).to(device)
        timed_loader = Timed(train_loader)
        meter = Meter(device)
        model.train()

        for images, labels, index in timed_loader:
            step += 1
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            index = index.to(device, non_blocking=True)
            images = augment(images, draws[index])
            images = to_input(images, args.image_size)

            with kept if step == 1 else contextlib.nullcontext():  # counts once: it takes time
                logits = ddp_model(images)  # with model, no gradient would be averaged
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            meter.add(loss, logits, labels)
            done = step == args.max_steps
            epoch_ends = step % len(train_loader) == 0
            # Step 1 by itself: it takes longer, and shows that it works.
            if done or epoch_ends or step == 1 or step % args.log_every == 0:
                # First the means, which wait for the device; then what the clock says. They are
                # those of all processes, so each process must get here, not only the one that logs.
                result = meter.means() | largest(timed_loader.seconds(), device)
                if rank == 0:
                    log(args.log_json, "train", epoch=epoch, step=step, **result)
                meter.reset()
                timed_loader.reset()
            if done:
                break

        # 5. evaluate
        result = evaluate(model, test_loader, device, args.image_size)
        if rank == 0:
            log(args.log_json, "eval", epoch=epoch, **result)
        if args.save and rank == 0:  # all have the same weights, and a file takes one writer
            save(model.state_dict(), args.save)
        if done:  # --max-steps ends all epochs
            break

    # 6. finish
    memory = largest({"peak_memory_mib": peak_memory(device)}, device)
    weights = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = {
        "parameter_bytes": bytes_of(weights),
        "gradient_bytes": bytes_of(weight.grad for weight in weights),
        "optimizer_bytes": bytes_of(states),
        "activation_bytes": kept.bytes,
    }
    memory |= of_each(held, device)
    seconds = time.perf_counter() - started
    if rank == 0:
        log(args.log_json, "end", seconds=seconds, **memory)
    # DDP's model goes first. As the last to keep the process group it would wait for Gloo's
    # threads with Python's lock in hand, up to torch 2.13: for ever, if one needs that lock.
    del ddp_model
    dist.destroy_process_group()


def load_datasets(name, folder, size):
    """The training images, the test images, and the names of the classes; or a UserError."""
    try:
        train_set, classes = load_split(name, folder, size, train=True)
        test_set, test_classes = load_split(name, folder, size, train=False)
    except (AssertionError, EOFError, OSError, RuntimeError, ValueError) as error:
        # What torchvision raises where files are missing or damaged.
        raise UserError(f"--data {folder}: cannot load {name}: {error!r}") from error
    if classes != test_classes:
        raise UserError(f"--data {folder}: train/ and val/ must have the same class folders")
    return train_set, test_set, classes


def load_split(name, folder, size, train):
    """The training or the test images of a data set, as uint8, and the names of its classes."""
    if name == "imagenet":  # photographs, in one folder for each class
        crop = v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
        data = datasets.ImageFolder(folder / ("train" if train else "val"), crop, loader=decode)
        return data, data.classes

    # The other data sets fit into memory: images (N, 3, H, W), labels (N).
    if name == "cifar10":
        data = download_cifar10(folder, train)
        images = torch.tensor(data.data).permute(0, 3, 1, 2)
        labels, classes = torch.tensor(data.targets), data.classes
    elif name == "fashion-mnist":  # gray, 28 x 28; comes with this project
        data = datasets.FashionMNIST(folder, train)
        images = F.pad(data.data, [2, 2, 2, 2])  # a black edge makes it 32 x 32
        images = images[:, None].expand(-1, 3, -1, -1)  # red = green = blue
        labels, classes = data.targets, data.classes
    else:  # synthetic: each class is a shade of gray, with noise
        classes = list(range(10))
        labels = torch.arange(10_000 if train else 2_000) % 10
        noise = torch.randint(64, (len(labels), 3, size, size), dtype=torch.uint8)
        images = 20 * labels.byte().view(-1, 1, 1, 1) + noise
    return TensorDataset(images.contiguous(), labels), classes


def download_cifar10(folder, train):
    """CIFAR-10, downloaded by one process, while the others that use this folder wait.

    A lock and not a barrier: if the download fails, no process waits for ever, and it does not
    matter whether the machines share the folder.
    """
    try:
        return datasets.CIFAR10(folder, train)
    except RuntimeError:  # not there yet, or damaged
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "download.lock", "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # until the file is closed
            return datasets.CIFAR10(folder, train, download=True)


def decode(path):
    """An image file as uint8 (3, H, W)."""
    try:
        return decode_image(path, mode="RGB")
    except RuntimeError as error:  # its message does not say which file
        raise OSError(f"{path}: damaged, or not a photograph: {error}") from None


class WithIndex(Dataset):
    """A data set whose batches end with the indices of their images: (images, labels, indices)."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, indices):
        """A whole batch: a DataLoader asks for it so, where a data set has this method.

        collate_fn, which would make a batch of single images, then takes it as it is.
        """
        index = torch.tensor(indices)
        if isinstance(self.dataset, TensorDataset):  # in memory: takes a sixth of the time
            images, labels = (tensor.index_select(0, index) for tensor in self.dataset.tensors)
        else:
            images, labels = default_collate([self.dataset[i] for i in indices])
        return images, labels, index


def draw_augmentation(count, seed, epoch):
    """The random numbers that augment() needs for so many images: (count, 3), from 0 to 1.

    They belong to the images, not to the batches: in whatever batch an image comes, and in whatever
    script, it is augmented alike.
    """
    generator = torch.Generator().manual_seed((seed + 1) * 1_000_000 + epoch)  # not the shuffle's
    return torch.rand(count, 3, generator=generator)


def augment(images, draws):
    """Shifts each image by up to an eighth of its side, and flips about one in two.

    images: (N, 3, H, H). draws: (N, 3), random numbers from 0 to 1 that decide by how much.
    """
    side = images.shape[-1]
    reach = side // 8
    padded = F.pad(images, [reach] * 4)
    # All windows of each image, (N, 3, rows, columns, H, H). A view: nothing is copied yet.
    windows = padded.unfold(2, side, 1).unfold(3, side, 1)
    row, column = (draws[:, :2] * (2 * reach + 1)).long().unbind(1)
    n = torch.arange(len(images), device=images.device)
    images = windows[n, :, row, column]  # one window of each image, (N, 3, H, H)

    flip = draws[:, 2] < 0.5
    return torch.where(flip[:, None, None, None], images.flip(3), images)


def to_input(images, size):
    """uint8 images as the model takes them: floats from -2 to 2, (N, 3, size, size).

    128 and 64 are roughly the mean and the standard deviation of photographs.
    """
    images = (images.float() - 128) / 64
    if images.shape[-1] != size:
        images = F.interpolate(images, (size, size), mode="bilinear")
    return images


def blocks(module):
    """The parts that the model repeats, such as a ResNet's residual blocks.

    These stand in an nn.Sequential and are more than one layer. No layer is in two of them.
    """
    for child in module.children():
        layers = list(child.children())
        if type(module) is nn.Sequential and type(child) is not nn.Sequential and layers:
            yield child
        else:
            yield from blocks(child)


def keep_little(block):
    """Lets forward keep the block's input alone, from which backward runs the block once more.

    Dropout then drops the same units again: checkpoint() sees to that.
    """

    def contexts():  # of forward, and of the second run
        return contextlib.nullcontext(), unchanged(list(block.buffers()))

    block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


@contextlib.contextmanager
def unchanged(buffers):
    """Puts them back afterwards: else BatchNorm's running averages count each batch twice."""
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


@torch.no_grad()
def evaluate(model, loader, device, size):
    """Mean loss and accuracy over all processes' images, and their number. All must call it."""
    model.eval()  # until model.train()
    # BatchNorm's running averages: DDP sends process 0's to all before each step, but not after the
    # last one, so they differ. Sent here, too, all evaluate the model that process 0 saves.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    meter = Meter(device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = model(to_input(images, size))
        meter.add(F.cross_entropy(logits, labels), logits, labels)
    return meter.means()


def largest(numbers, device):
    """Of each number the largest of all processes: the slowest sets the pace. All must call it."""
    values = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(numbers, values.tolist(), strict=True))


def bytes_of(tensors):
    """The memory that tensors take: what some of them share, as views do, counts once."""
    memory = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())


def of_each(numbers, device):
    """Of each integer a list: that of process 0, of process 1 ... All must call it."""
    mine = torch.tensor(list(numbers.values()), device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return dict(zip(numbers, torch.stack(rows, dim=1).tolist(), strict=True))


class Kept(saved_tensors_hooks):
    """While it is open, counts the bytes that forward keeps for backward, the model aside."""

    def __init__(self, model):
        super().__init__(self.pack, lambda tensor: tensor)
        self.own = [*model.parameters(), *model.buffers()]

    def __enter__(self):
        self.tensors = []
        return super().__enter__()

    def pack(self, tensor):
        self.tensors.append(tensor)
        return tensor

    def __exit__(self, *error):
        super().__exit__(*error)
        self.bytes = bytes_of(self.tensors + self.own) - bytes_of(self.own)
        del self.tensors


class Meter:
    """Mean loss and accuracy. The sums stay on the device, so that no step waits for it."""

    def __init__(self, device):
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, hits, images

    def reset(self):
        self.sums.zero_()

    def add(self, loss, logits, labels):
        """Adds a batch: its mean loss, its logits (N, classes), its labels (N)."""
        self.sums[0] += loss.detach() * len(labels)
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += len(labels)

    def means(self):
        """Over all images that all processes have added. All must call it."""
        sums = self.sums.clone()
        dist.all_reduce(sums)  # adds up those of all processes
        loss, hits, images = sums.tolist()
        return {"loss": loss / images, "accuracy": hits / images, "images": int(images)}


class Timed:
    """A loader that measures time: in all, and how much of it its user waits for batches."""

    def __init__(self, loader):
        self.loader = loader
        self.reset()

    def reset(self):
        self.started = time.perf_counter()
        self.waited = 0.0

    def __iter__(self):
        asked = time.perf_counter()
        for batch in self.loader:
            self.waited += time.perf_counter() - asked
            yield batch
            asked = time.perf_counter()

    def seconds(self):
        """Since the last reset."""
        return {"seconds": time.perf_counter() - self.started, "data_seconds": self.waited}


def peak_memory(device):
    """The most MiB that tensors took on the GPU; on a CPU, that this process took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # Linux counts it in KiB


def log(path, event, /, **fields):
    """Prints a line for people; appends it to the file, if one is named, as JSON for programs."""
    shown = (f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items())
    print(event, *shown, flush=True)
    if path:
        record = {"event": event, "time": time.time(), **fields}
        if not math.isfinite(record.get("loss", 0)):
            record["loss"] = None  # JSON has no nan
        with open(path, "a") as file:
            print(json.dumps(record, default=str), file=file)


def save(weights, path):
    """Writes the whole file or nothing: if the disk is full, an old file stays as it was."""
    part = path.with_name(path.name + ".part")
    try:
        torch.save(weights, part)
        part.replace(path)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        raise OSError(f"--save {path}: not written, an old file stays: {error}") from None


def number(least, most=10**9, kind=int):
    """A type for argparse: a number from least to most."""

    def check(text):
        value = kind(text)
        if not least <= value <= most:  # this refuses nan, too
            raise argparse.ArgumentTypeError(f"{text}: give a number from {least} to {most}")
        return value

    check.__name__ = kind.__name__  # argparse says: invalid int value
    return check


def writable_file(text):
    """A type for argparse: the name of a file that can be written, there or not."""
    path = Path(text)
    fits = os.access(path.parent, os.W_OK)
    if path.exists():
        fits = fits and path.is_file() and os.access(path, os.W_OK)
    if not fits:
        raise argparse.ArgumentTypeError(f"{text}: name a file that you may write to")
    return path


def classifier(text):
    """A type for argparse: the name of a model in torchvision that returns logits."""
    # googlenet and inception return more than that in training.
    if text not in models.list_models(models, exclude=["googlenet", "inception*"]):
        raise argparse.ArgumentTypeError(f"{text}: torchvision has no such model to classify with")
    return text


def try_model(arch, size):
    """Raises an error if the model does not take images of this size."""
    with torch.device("meta"):  # tensors that have a shape but no numbers: this takes no time
        models.get_model(arch).eval()(torch.empty(1, 3, size, size))


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,  # so that an error is one line
    )
    add = parser.add_argument
    names = ["cifar10", "fashion-mnist", "imagenet", "synthetic"]
    devices = ["auto", "cpu", "cuda"]
    add("--dataset", choices=names, default="cifar10", help="Images to train on. [%(default)s]")
    add("--data", type=Path, default=Path("data"), help="Folder of the images. [%(default)s]")
    add("--arch", type=classifier, default="resnet18", help="Model of torchvision. [%(default)s]")
    add("--image-size", type=number(1, 4096), help="Pixels a side. [224 for imagenet, else 32]")
    add("--epochs", type=number(1), default=5, help="Passes over all images. [%(default)s]")
    add("--max-steps", type=number(1), help="Stop after so many steps. [after all epochs]")
    add("--batch-size", type=number(2), default=256, help="Images a step, in all. [%(default)s]")
    add("--lr", type=number(1e-9, 1e9, float), default=0.01, help="Learning rate. [%(default)s]")
    add("--workers", type=number(0, 999), help="Decoding processes a node. [imagenet: 4, else: 0]")
    add("--seed", type=number(0), default=0, help="Seed of all random numbers. [%(default)s]")
    add("--device", choices=devices, default="auto", help="auto: a GPU, if there is one. [auto]")
    add("--log-every", type=number(1), default=50, help="Steps between two lines. [%(default)s]")
    add("--log-json", type=writable_file, help="Append all lines to this file, as JSON. [none]")
    add("--save", type=writable_file, help="Write the weights here after each epoch. [nowhere]")
    args = parser.parse_args()
    photographs = args.dataset == "imagenet"
    if args.image_size is None:
        args.image_size = 224 if photographs else 32
    if args.workers is None:
        args.workers = 4 if photographs else 0
    try:
        try_model(args.arch, args.image_size)
    except (AssertionError, RuntimeError) as error:
        parser.error(f"argument --image-size: {args.image_size}: {args.arch} refuses it: {error}")
    return args


def run(args):
    """main(), with a line in place of a traceback for errors that the user can fix.

    Each process prints its own, and the launcher adds a report.
    """
    try:
        main(args)
    except (OSError, UserError) as error:
        # An error in a loader's worker comes with its traceback. The last line says what it was.
        line = str(error).strip().split("\n")[-1]
        print(f"{Path(__file__).name}: {line}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run(parse_args())
