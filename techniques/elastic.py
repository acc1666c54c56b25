"""Elastic restarts: torchrun starts all ranks again after one died; they resume mid-epoch.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # each start gets a new store, see below
torchrun --standalone --nproc-per-node 4 --max-restarts 3 techniques/elastic.py --snapshot FILE
On two machines that both see FILE (HOST: what `hostname` prints on one of them, not an address):
torchrun --nproc-per-node 4 --nnodes 2 --max-restarts 3 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:29400 techniques/elastic.py --snapshot FILE
Without a GPU, on images that come with this project:
torchrun --standalone --nproc-per-node 2 --max-restarts 3 techniques/elastic.py \\
    --dataset fashion-mnist --snapshot FILE
CIFAR-10, the default data set: `python snsc.py --epochs 0` downloads it. Run it on each machine.

Start reading at main(). All scripts of this project train on the same images, in the same order.
`diff -u mnmc_ddp_launch.py techniques/elastic.py` shows what it changes.
Left out on purpose: a learning-rate schedule, random resized crops, mixed precision.
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets, models
from torchvision.io import decode_image
from torchvision.transforms import v2


def main(args):
    # 0. processes and devices
    # torchrun starts --nproc-per-node copies of this script, and tells each one who it is. Where a
    # platform starts one process per container, LOCAL_RANK may be missing: it is 0.
    # The numbers in these comments are for 2 machines with 4 GPUs each.
    if not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        sys.exit("start this script with torchrun, as its first lines show")
    rank = int(os.environ["RANK"])  # number of this process among all: 0 to 7
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))  # number on this machine: 0 to 3
    world_size = int(os.environ["WORLD_SIZE"])  # how many processes there are: 8
    # By default, torchrun keeps the store of the ranks' addresses over a restart. New ranks would
    # find the addresses of dead ones there.
    if args.snapshot and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        sys.exit("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, as the first lines show")
    # Join the group of all processes. (A process is itself called a rank, after its number.)
    # In a collective, all ranks exchange data: all_reduce, broadcast, DDP's forward and backward.
    # Every rank must call every collective, in the same order. If one skips it, the others hang
    # until a timeout: 10 minutes with NCCL, 30 with Gloo.
    if args.device == "cuda":
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"--nproc-per-node: this machine has {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)  # otherwise "cuda" would be GPU 0 on every rank
        dist.init_process_group("nccl", device_id=device)  # device_id: NCCL connects now
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")  # for CPUs
    torch.backends.cudnn.benchmark = True  # cuDNN tries its algorithms and keeps the fastest

    # 1. data
    # --batch-size is the global batch: 256 on 8 GPUs is 32 images on each. So the number of steps
    # and the learning rate stay those of snsc.py. Many other scripts fix the local batch instead.
    local_batch_size, remainder = divmod(args.batch_size, world_size)
    if remainder:
        sys.exit(f"--batch-size {args.batch_size}: must be a multiple of {world_size} processes")
    train_set, classes = load_dataset(args.dataset, args.data, args.image_size, train=True)
    test_set, test_classes = load_dataset(args.dataset, args.data, args.image_size, train=False)
    if classes != test_classes or any(name.startswith(".") for name in classes):
        sys.exit(f"--data {args.data}: train/ and val/ need equal class folders, no hidden ones")
    if args.batch_size > len(train_set):
        sys.exit(f"--batch-size {args.batch_size}: there are {len(train_set)} training images")
    if args.workers and len(tempfile.gettempdirb()) > 75:  # workers put sockets there
        sys.exit("TMPDIR is too long a path for loader workers, which would hang: set it to /tmp")
    # All ranks draw the same order as snsc.py. Rank r takes every world_size-th from r on.
    # drop_last=True skips up to world_size - 1 images, so that all ranks have the same number.
    sampler = ResumableSampler(train_set, seed=args.seed, drop_last=True)
    loader_options = {
        "batch_size": local_batch_size,
        "num_workers": args.workers,
        "persistent_workers": args.workers > 0,  # keep them between epochs
        "pin_memory": args.device == "cuda",  # lets .to(device, non_blocking=True) return at once
    }
    # drop_last=True skips an incomplete last batch, so that all steps have the same batch size.
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loader_options)
    # Each test image exactly once: a DistributedSampler would repeat or drop some. A rank may then
    # have one batch more than another. That is safe: evaluate() calls model, not ddp_model, and
    # the forward of model has no collective.
    test_indices = range(rank, len(test_set), world_size)  # any iterable of indices is a sampler
    test_loader = DataLoader(test_set, sampler=test_indices, **loader_options)

    # 2. model
    torch.manual_seed(args.seed)
    model = models.get_model(args.arch, num_classes=len(classes)).to(device)
    # Train ddp_model; evaluate and save model. Both hold the same weights.
    # DDP copies rank 0's weights to all ranks. As soon as backward() has finished some gradients,
    # DDP averages them over the ranks. Local batches have the same size, so the average is the
    # gradient of the global batch, and all ranks take the same step.
    # BatchNorm sees only the local batch. For the global batch, as in snsc.py, first convert it:
    # model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # gradient_as_bucket_view: gradients live in the buffers that DDP sends, without a second copy.
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    torch.manual_seed(args.seed + rank)  # each rank draws its own dropout masks, if there are any

    # 3. optimizer
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        fused=True,  # updates all weights in a few kernel launches
    )

    # 4. resume
    first_epoch = 1
    if args.resume:
        # Every rank reads the file: on several machines, put it where all of them see it. After a
        # failure, start again with --resume: only techniques/elastic.py resumes by itself.
        checkpoint = torch.load(args.resume, map_location="cpu")  # not on the GPU that saved it
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])  # its learning rate replaces --lr
        first_epoch = checkpoint["epoch"] + 1

    # torchrun starts the script again with the same flags. The snapshot tells where to resume.
    augment_rng = torch.Generator()
    steps_done = 0  # of the first epoch
    if args.snapshot and args.snapshot.exists():
        snapshot = torch.load(args.snapshot, map_location="cpu")
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        first_epoch, steps_done = snapshot["epoch"], snapshot["step"]
    if args.save and rank == 0:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        if args.save.is_dir() or not os.access(args.save.parent, os.W_OK):
            sys.exit(f"--save {args.save}: must be a file, in a folder that is writable")

    # 5. train
    log("start", world_size=world_size, classes=len(classes), **vars(args))
    for epoch in range(first_epoch, args.epochs + 1):
        # The seeds depend only on --seed and the epoch, so a resumed run has the same batches.
        sampler.set_epoch(epoch)  # otherwise, all epochs would have the same order
        augment_rng.manual_seed(1_000_000 * (args.seed + 1) + epoch)  # never the shuffle's seed
        if steps_done:
            # The generator's state belongs in the snapshot: each step draws from it.
            augment_rng.set_state(snapshot["augment_rng"])
        sampler.skip = steps_done * local_batch_size
        meter = Meter(device)
        model.train()
        for step, (images, labels) in enumerate(train_loader, steps_done + 1):
            # For dropout. A seed per step needs no generator state of each rank in the snapshot.
            torch.manual_seed(args.seed + rank + 1_000 * step + 1_000_000_000 * epoch)
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            # All ranks draw the numbers of snsc.py: one row per image of the global batch.
            draws = torch.rand(args.batch_size, 3, generator=augment_rng)
            draws = draws[rank::world_size]  # like the sampler: every world_size-th from rank on
            draws = draws.to(device, non_blocking=True)  # too small to need pinned memory
            images = augment(images, draws)

            images = to_input(images, args.image_size)
            logits = ddp_model(images)  # model(images) would not average the gradients
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            meter.add(loss, logits, labels)
            if step % args.log_every == 0 or step == len(train_loader):
                metrics = meter.result()  # a collective: never under `if rank == 0`
                log("train", epoch=epoch, step=step, **metrics)
                meter = Meter(device)  # each line covers the steps since the last one
                # Here, where the meter is empty: a snapshot need not hold its sums.
                if args.snapshot and rank == 0:
                    position = {"step": step, "augment_rng": augment_rng.get_state()}
                    save(args.snapshot, model, optimizer, epoch, **position)
        steps_done = 0

        # 6. evaluate
        metrics = evaluate(model, test_loader, device, args.image_size)  # a collective, too
        log("eval", epoch=epoch, **metrics)
        if args.save and rank == 0:  # the ranks' models are equal: one is enough
            save(args.save, model, optimizer, epoch)

    # 7. finish
    log("end", peak_gpu_memory_mib=torch.cuda.max_memory_allocated() / 2**20)  # rank 0's; CPU: 0


def load_dataset(name, folder, size, train):
    """The training or the test images, as uint8, and the names of the classes."""
    if name == "imagenet":  # photographs, in one folder per class
        crop = v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
        data = datasets.ImageFolder(folder / ("train" if train else "val"), crop, loader=decode)
        return data, data.classes

    # The others fit into memory: images (N, 3, H, W), which to_input() resizes, and labels (N).
    if name == "cifar10":
        data = datasets.CIFAR10(folder, train)  # snsc.py downloads it
        images = torch.tensor(data.data).permute(0, 3, 1, 2)
        labels = torch.tensor(data.targets)
    else:  # fashion-mnist: gray, 28 x 28, in the folder data/ of this project
        data = datasets.FashionMNIST(folder, train)
        images = F.pad(data.data, [2, 2, 2, 2])  # (N, 28, 28) to (N, 32, 32)
        images = images[:, None].expand(-1, 3, -1, -1)  # (N, 3, 32, 32): red = green = blue
        labels = data.targets
    return TensorDataset(images.contiguous(), labels), data.classes


def decode(path):
    """An image file as uint8 (3, H, W); of 16 bits per sample, the upper 8."""
    data = bytearray(Path(path).read_bytes())  # decode_image(path) fails for names not in UTF-8
    try:
        image = decode_image(torch.frombuffer(data, dtype=torch.uint8), mode="RGB")
    except (RuntimeError, ValueError) as error:  # ValueError: the file is empty
        raise RuntimeError(f"{path}: {error}") from None
    if image.ndim != 3:
        raise RuntimeError(f"{path}: an animation")
    return (image.int() >> 8).byte() if image.dtype == torch.uint16 else image


class ResumableSampler(DistributedSampler):
    """Leaves out the first images of an epoch: those trained on before a restart."""

    skip = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.skip, None)  # len() stays the whole epoch


def augment(images, draws):
    """Shifts each image by up to an eighth of its side, and flips it with probability 1/2.

    images: (N, 3, side, side). draws: (N, 3), random numbers in [0, 1) for row, column and flip.
    """
    side = images.shape[-1]
    max_shift = side // 8
    shifts = (draws[:, :2] * (2 * max_shift + 1)).long()  # integers from 0 to 2 * max_shift
    row, column = shifts.unbind(1)  # the top left corner of each image's crop
    padded = F.pad(images, [max_shift] * 4)  # left, right, top, bottom
    # The next three lines compute this, but with one copy instead of one per image:
    # torch.stack([p[:, r : r + side, c : c + side] for p, r, c in zip(padded, row, column)])
    crops = padded.unfold(2, side, 1).unfold(3, side, 1)  # (N, 3, rows, columns, side, side)
    n = torch.arange(len(images), device=images.device)
    images = crops[n, :, row, column]  # image i is now crops[i, :, row[i], column[i]]
    flip = draws[:, 2] < 0.5
    return torch.where(flip[:, None, None, None], images.flip(3), images)


def to_input(images, size):
    """uint8 images as floats in [-2, 2), resized to (N, 3, size, size)."""
    images = (images.float() - 128) / 64  # photographs: mean about 0, standard deviation about 1
    if images.shape[-1] != size:
        images = F.interpolate(images, (size, size), mode="bilinear")
    return images


@torch.no_grad()
def evaluate(model, loader, device, size):
    """Mean loss and accuracy over the images of all ranks. Every rank must call it."""
    model.eval()
    # The ranks' BatchNorm statistics differ: each rank has updated its own in the last step. Copy
    # rank 0's to all ranks, so that they evaluate the model that rank 0 saves.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    meter = Meter(device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = model(to_input(images, size))
        meter.add(F.cross_entropy(logits, labels), logits, labels)
    return meter.result()


class Meter:
    """Mean loss, accuracy and speed since this Meter was created.

    The sums stay on the device, so add() does not wait for it.
    """

    def __init__(self, device):
        self.started = time.perf_counter()
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, images

    def add(self, loss, logits, labels):
        """Adds a batch: its mean loss, its logits (N, classes), its labels (N)."""
        self.sums[0] += loss.detach() * len(labels)
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += len(labels)

    def result(self):
        """Mean loss, accuracy and speed over all ranks. Every rank must call it."""
        sums = self.sums.clone()  # a copy, since all_reduce overwrites its argument
        dist.all_reduce(sums)  # adds up the sums of all ranks
        loss, correct, images = sums.tolist()  # waits until the device is done
        seconds = time.perf_counter() - self.started
        return {
            "loss": loss / images,
            "accuracy": (correct + 0 * loss) / images,  # nan with a nan loss: argmax() picks NaN
            "images": int(images),
            "seconds": seconds,
            "images_per_second": images / seconds,
        }


def log(event, **fields):
    """Prints one line, on rank 0 only. Nine digits, so that two runs can be compared exactly."""
    if dist.get_rank() != 0:
        return
    words = [event]
    for name, value in fields.items():
        words.append(f"{name}={value:.9g}" if isinstance(value, float) else f"{name}={value}")
    print(*words, flush=True)


def save(path, model, optimizer, epoch, **position):
    """Writes a file for --resume. It is renamed when complete: a crash leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    try:
        torch.save(state | position, temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        sys.exit(f"{path}: not saved, is the disk full? {error}")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ["cifar10", "fashion-mnist", "imagenet"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--dataset", choices=names, default="cifar10", help="images to train on [%(default)s]")
    add("--data", type=Path, default=Path("data"), help="folder of the data set [%(default)s]")
    add("--arch", default="resnet18", help="classification model of torchvision [%(default)s]")
    add("--image-size", type=int, help="pixels per side [224 for imagenet, else 32]")
    add("--epochs", type=int, default=5, help="passes over the training images [%(default)s]")
    add("--batch-size", type=int, default=256, help="images per step, over all ranks [%(default)s]")
    add("--lr", type=float, default=0.01, help="learning rate [%(default)s]")
    add("--workers", type=int, help="processes per loader [4 for imagenet or cuda, else 0]")
    add("--seed", type=int, default=0, help="random seed [%(default)s]")
    add("--device", choices=["cpu", "cuda"], default=device, help="where to train [%(default)s]")
    add("--log-every", type=int, default=50, help="steps between log lines [%(default)s]")
    add("--save", type=Path, help="write a checkpoint to this file after every epoch [none]")
    add("--resume", type=Path, help="resume after this checkpoint's epoch; --lr is ignored [none]")
    add("--snapshot", type=Path, help="write this file at every log line; resume from it [none]")
    args = parser.parse_args()
    if args.image_size is None:
        args.image_size = 224 if args.dataset == "imagenet" else 32
    if args.workers is None:
        args.workers = 4 if args.dataset == "imagenet" or args.device == "cuda" else 0
    return args


if __name__ == "__main__":
    main(parse_args())
    dist.destroy_process_group()  # after main(), which uses the group to its end
