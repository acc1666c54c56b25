"""Train an image classifier with DistributedDataParallel: a process for each device, by torchrun.

torchrun --standalone --nproc-per-node 4 mnmc_ddp_launch.py
On two machines, the first of which is called HOST:
torchrun --nproc-per-node 4 --nnodes 2 --node-rank 0 --master-addr HOST mnmc_ddp_launch.py
torchrun --nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr HOST mnmc_ddp_launch.py

Start reading at main(). All scripts here train on the same images in the same batches, augmented
alike; `diff -u snsc.py mnmc_ddp_launch.py` shows what it takes to use several devices for it.
Left out on purpose: learning-rate schedule, random resized crops, mixed precision, resuming.
"""

import argparse
import fcntl
import json
import math
import os
import sys
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets, models
from torchvision.io import decode_image
from torchvision.transforms import v2


class UserError(Exception):
    """An error that the user can fix: run() prints it as one line."""


def main(args):
    started = time.perf_counter()

    # 0. where this process runs
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
    train_set, test_set, classes = load_both(args)
    # Shuffles alike in all processes; then, of 4, process 0 takes the images 0, 4, 8 ... of that
    # order, process 1 takes 1, 5, 9 ... With drop_last the last few are left out, where not all
    # processes would get one; else some images would be taken twice.
    sampler = DistributedSampler(
        train_set, num_replicas=world_size, rank=rank, seed=args.seed, drop_last=True
    )
    workers = math.ceil(args.workers / local_world_size)  # --workers are those of a machine
    train_loader = make_loader(train_set, sampler, local_batch, workers, device)
    # In testing each image counts exactly once, so some processes may take one more than others.
    indices = range(rank, len(test_set), world_size)
    test_loader = make_loader(test_set, indices, local_batch, workers, device, drop_last=False)

    # 2. model
    model = models.get_model(args.arch, num_classes=len(classes)).to(device)
    # Copies the weights of process 0 to all. From now on, each backward() averages the gradients
    # over the processes, those of the last layers while it still computes those of the first. As
    # all local batches are of one size, that is the gradient of the whole batch: all processes take
    # the same step. (Only BatchNorm sees its local batch alone; SyncBatchNorm would see them all.)
    # ddp_model and model share their weights: train with one, evaluate and save the other.
    # (gradient_as_bucket_view: the gradients lie where they are sent from, which saves a copy.)
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    torch.manual_seed(args.seed + rank)  # from here on for dropout: else all drop the same units

    # 3. optimizer
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
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # else all epochs have the same order
        model.train()
        meter = Meter(device)

        for images, labels in meter.timed(train_loader):
            step += 1
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            images = augment(images, args.seed, step, rank, world_size)
            images = prepare(images, args.image_size)

            logits = ddp_model(images)  # with model, no gradient would be averaged
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            meter.add(loss, logits, labels)
            last = step % len(train_loader) == 0 or step == args.max_steps
            if last or step % args.log_every == 0 or step == 1:  # step 1 shows that it runs
                result = meter.result()  # of all processes: each of them must get here
                if rank == 0:
                    log(args.log_json, "train", epoch=epoch, step=step, **result)
            if step == args.max_steps:
                break

        # 5. evaluate
        # BatchNorm's running averages: DDP sends process 0's to all before each step, but not after
        # the last one, so they differ. Sent here, too, all evaluate what is saved.
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        result = evaluate(model, test_loader, device, args.image_size)
        if rank == 0:
            log(args.log_json, "eval", epoch=epoch, **result)
        if args.save and rank == 0:  # all have the same weights, and a file takes one writer
            save(model.state_dict(), args.save)
        if step == args.max_steps:
            break

    # 6. finish
    memory = largest(peak_memory(device), device)
    seconds = time.perf_counter() - started
    if rank == 0:
        log(args.log_json, "end", seconds=seconds, peak_memory_mib=memory)
    dist.destroy_process_group()


def load_both(args):
    """The training images, the test images and the names of the classes; or a UserError."""
    try:
        train_set, classes = load_data(args.dataset, args.data, args.image_size, train=True)
        test_set, test_classes = load_data(args.dataset, args.data, args.image_size, train=False)
    except (AssertionError, EOFError, OSError, RuntimeError, ValueError) as error:
        # What torchvision raises for missing or damaged files.
        raise UserError(f"--data {args.data}: cannot load {args.dataset}: {error!r}") from None
    if classes != test_classes:
        raise UserError(f"--data {args.data}: train/ and val/ must have the same class folders")
    if args.batch_size > len(train_set):
        raise UserError(f"--batch-size {args.batch_size}: there are only {len(train_set)} images")
    return train_set, test_set, classes


def load_data(name, folder, size, train):
    """The training or the test images of a data set, as uint8, and the names of its classes."""
    if name == "imagenet":  # photographs, in one folder for each class
        crop = v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
        data = datasets.ImageFolder(folder / ("train" if train else "val"), crop, loader=decode)
        return data, data.classes

    # The others fit into memory: images (N, 3, H, W), labels (N).
    if name == "cifar10":
        data = download_cifar10(folder, train)
        images = torch.tensor(data.data).permute(0, 3, 1, 2)
        labels, classes = torch.tensor(data.targets), data.classes
    elif name == "fashion-mnist":  # gray, 28 x 28; it lies in this repository
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
    """A photograph as uint8 (3, H, W)."""
    try:
        return decode_image(path, mode="RGB")
    except RuntimeError as error:  # its message does not say which file
        raise OSError(f"{path}: damaged, or not a photograph: {error}") from None


def make_loader(dataset, sampler, batch_size, workers, device, drop_last=True):
    """A loader of batches (images, labels) of a TensorDataset, or of photographs.

    sampler: the indices of the images, in order. workers: processes that decode photographs.
    drop_last: without the last batch, if that is smaller.
    """
    batches = BatchSampler(sampler, batch_size, drop_last)  # lists of indices
    pin = device.type == "cuda"  # pinned memory: copies to the GPU overlap with computing
    if isinstance(dataset, TensorDataset):
        # dataset[list of indices] is a whole batch; batch_size=None: the loader adds nothing to it.
        return DataLoader(dataset, sampler=batches, batch_size=None, pin_memory=pin)
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        persistent_workers=workers > 0,  # the same processes in every epoch
        pin_memory=pin,
    )


class Meter:
    """Adds up loss, hits and images, and the time.

    The sums stay on the device, so that no step has to wait for it.
    """

    def __init__(self, device):
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.started = time.perf_counter()
        self.waited = 0.0

    def timed(self, loader):
        """The batches of the loader; adds up the seconds that the caller waits for them."""
        asked = time.perf_counter()
        for batch in loader:
            self.waited += time.perf_counter() - asked
            yield batch
            asked = time.perf_counter()

    def add(self, loss, logits, labels):
        """Adds a batch: its mean loss, its logits (N, classes), its labels (N)."""
        self.sums[0] += loss.detach() * len(labels)
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += len(labels)

    def result(self):
        """Means, counts and seconds since the last result, of all processes. All must call it."""
        dist.all_reduce(self.sums)  # adds up
        loss, hits, images = self.sums.tolist()
        now = time.perf_counter()
        result = {
            "loss": loss / images,
            "accuracy": hits / images,
            "images": int(images),
            "seconds": now - self.started,
            "data_seconds": largest(self.waited, self.sums.device),
        }
        self.sums.zero_()
        self.started = now
        self.waited = 0.0
        return result


def largest(value, device):
    """The largest of the processes' values, for the log. All must call it."""
    value = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def augment(images, seed, step, rank, world_size):
    """Shifts each image (N, 3, H, H) by up to an eighth of its side, and flips about one in two.

    By how much depends on seed and step alone, so that all scripts treat an image alike.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)  # it takes 32 bits of that
    pin = images.is_cuda
    # Not that DDP needs it: to draw the same for an image however many processes there are, each
    # draws for the whole batch, and takes the numbers of its images, every world_size-th.
    count = world_size * len(images)
    numbers = torch.randint(2**31, (3, count), generator=generator, pin_memory=pin)
    row, column, flip = numbers.to(images.device, non_blocking=True)[:, rank::world_size]

    places = images.shape[-1] // 8 * 2 + 1
    images = shift(images, row % places, column % places)
    return torch.where((flip % 2 == 1).view(-1, 1, 1, 1), images.flip(3), images)


def shift(images, row, column):
    """Of each image (N, 3, H, H), with an eighth of black around it, a part as large as the image.

    row, column: (N), where that part begins, from 0 to twice an eighth of the side.
    """
    side = images.shape[-1]
    padded = F.pad(images, [side // 8] * 4)
    # All parts of each image, (N, 3, rows, columns, H, H). This is a view: nothing is copied yet.
    parts = padded.unfold(2, side, 1).unfold(3, side, 1)
    n = torch.arange(len(images), device=images.device)
    return parts[n, :, row, column]  # for each n one part: (N, 3, H, H)


def prepare(images, size):
    """uint8 images as the model takes them: floats from -2 to 2, (N, 3, size, size)."""
    images = (images.float() - 128) / 64
    if images.shape[-1] != size:
        images = F.interpolate(images, (size, size), mode="bilinear")
    return images


@torch.no_grad()
def evaluate(model, loader, device, size):
    """Loss, accuracy and number of the images of all processes' loaders. All must call it."""
    model.eval()
    meter = Meter(device)
    for images, labels in meter.timed(loader):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = model(prepare(images, size))
        meter.add(F.cross_entropy(logits, labels), logits, labels)
    return meter.result()


def peak_memory(device):
    """The most MiB that tensors took on the GPU; on a CPU, that this process took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return getrusage(RUSAGE_SELF).ru_maxrss / 2**10  # Linux counts it in KiB


def log(path, event, **fields):
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


def between(least, most, kind=int):
    """A type for argparse: a number from least to most."""

    def number(text):
        value = kind(text)
        if not least <= value <= most:  # so it refuses nan, too
            raise argparse.ArgumentTypeError(f"{text}: give a number from {least} to {most}")
        return value

    return number


def writable_file(text):
    """A type for argparse: a file that can be written, there or not."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: name a file that you may write to")
    return path


def check_model(arch, size):
    """Raises UserError unless torchvision has this classifier and it takes images of this size."""
    # googlenet and inception return more than logits in training.
    if arch not in models.list_models(models, exclude=["googlenet", "inception*"]):
        raise UserError(f"--arch {arch}: torchvision has no such model for classification")
    with torch.device("meta"):  # tensors that have a shape only: this takes no time
        model = models.get_model(arch).eval()
        try:
            model(torch.empty(1, 3, size, size))
        except (AssertionError, RuntimeError) as error:
            raise UserError(f"--image-size {size}: {arch} can't take it: {error}") from None


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,  # or an error would print it, too
    )
    add = parser.add_argument
    names = ["cifar10", "fashion-mnist", "imagenet", "synthetic"]
    count = between(1, 10**9)
    add("--dataset", choices=names, default="cifar10", help="images to train on [%(default)s]")
    add("--data", type=Path, default=Path("data"), help="folder of the images [%(default)s]")
    add("--arch", default="resnet18", help="classification model of torchvision [%(default)s]")
    add("--image-size", type=between(1, 4096), help="pixels a side [32; for imagenet 224]")
    add("--epochs", type=count, default=5, help="passes over the images [%(default)s]")
    add("--max-steps", type=count, help="stop after so many steps [no limit]")
    add("--batch-size", type=between(2, 10**9), default=256, help="of all processes [%(default)s]")
    add("--lr", type=between(1e-9, 1e9, float), default=0.01, help="learning rate [%(default)s]")
    add("--workers", type=between(0, 999), default=4, help="of a machine [%(default)s]")
    add("--seed", type=between(0, 10**9), default=0, help="of all that is random [%(default)s]")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if any")
    add("--log-every", type=count, default=50, help="steps between two lines [%(default)s]")
    add("--log-json", type=writable_file, help="append all lines to this file, as JSON [none]")
    add("--save", type=writable_file, help="write the weights here after each epoch [nowhere]")
    args = parser.parse_args()
    if args.image_size is None:
        args.image_size = 224 if args.dataset == "imagenet" else 32
    return args


def run(args):
    """main(), with a line in place of a traceback for errors that the user can fix.

    Each process prints its own, and the launcher adds a report.
    """
    try:
        check_model(args.arch, args.image_size)
        main(args)
    except (OSError, UserError) as error:
        line = str(error).strip().split("\n")[-1]  # before it, a loader's worker puts its traceback
        print(f"{Path(__file__).name}: {line}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run(parse_args())
