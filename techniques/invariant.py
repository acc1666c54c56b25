"""The same bits on 1, 2 or 4 processes: a fixed number of shards, added up in a fixed order.

torchrun --standalone --nproc-per-node 4 techniques/invariant.py
On two machines (HOST is the first; on the second one: --node-rank 1):
torchrun --nproc-per-node 4 --nnodes 2 --node-rank 0 --master-addr HOST techniques/invariant.py
Without a GPU, on images that come with this project:
torchrun --standalone --nproc-per-node 2 techniques/invariant.py --dataset fashion-mnist
The default data set, CIFAR-10, is downloaded by snsc.py: run it first, on each machine.

Start reading at main(). The scripts of this project differ only where the parallelism does: see
`diff -u mnmc_ddp_launch.py techniques/invariant.py`. They train on the same batches with
the same augmentation.
Left out on purpose: a learning-rate schedule, random resized crops, mixed precision.
"""

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets, models
from torchvision.io import decode_image
from torchvision.transforms import v2


def main(args):
    # 0. processes and devices
    # torchrun starts --nproc-per-node copies of this script, and tells each one who it is.
    if "RANK" not in os.environ:
        sys.exit("start this script with torchrun, as its first lines show")
    rank = int(os.environ["RANK"])  # among all processes: 0 to 7 on 2 machines with 4 GPUs each
    local_rank = int(os.environ["LOCAL_RANK"])  # on this machine: 0 to 3
    world_size = int(os.environ["WORLD_SIZE"])  # number of processes: 8
    # Join the group of all ranks. Every rank must call every collective (all_reduce, broadcast,
    # what DDP does), in the same order. If a rank skips one, the others wait for it until a
    # timeout: 10 minutes with NCCL, which communicates between GPUs; 30 with Gloo, between CPUs.
    if args.device == "cuda":
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"--nproc-per-node: this machine has {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)  # otherwise "cuda" would be GPU 0 on every rank
        dist.init_process_group("nccl", device_id=device)  # connects now, through this GPU
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    # No kernels that are chosen by their speed, or that add up in the order in which threads end.
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it for that
    if args.device == "cpu":  # the threads of a process split a sum, each adds up a part
        torch.set_num_threads(args.threads)

    # 1. data
    # --batch-size is the global batch, cut into --shards: as many on any number of ranks. Rank r
    # computes the shards r, r + world_size, ... one after the other, with the same kernels.
    if args.shards % world_size or args.batch_size % args.shards:
        multiple = f"must be a multiple of {world_size} processes"
        sys.exit(f"--shards {args.shards}: {multiple}, and divide --batch-size {args.batch_size}")
    local_shards = args.shards // world_size
    local_batch_size = args.batch_size // world_size
    shard_size = args.batch_size // args.shards
    train_set, classes = load_dataset(args.dataset, args.data, args.image_size, train=True)
    test_set, test_classes = load_dataset(args.dataset, args.data, args.image_size, train=False)
    if classes != test_classes:
        sys.exit(f"--data {args.data}: train/ and val/ have different class folders")
    if args.batch_size > len(train_set):
        sys.exit(f"--batch-size {args.batch_size}: there are {len(train_set)} training images")
    # All ranks draw the same order, that of snsc.py. Rank r takes the images r, r + world_size, ...
    # drop_last leaves out the last few images. Otherwise some would be repeated, so that all ranks
    # get the same number.
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = make_loader(
        train_set, sampler, local_batch_size, device, args.workers, drop_last=True
    )
    # The test images in the same batches on any number of ranks. A kernel may round an image's
    # numbers differently beside other images. Rank r takes the batches r, r + world_size, ...
    batches = list(BatchSampler(range(len(test_set)), shard_size, drop_last=False))
    test_indices = [index for batch in batches[rank::world_size] for index in batch]
    test_loader = make_loader(test_set, test_indices, shard_size, device, args.workers)

    # 2. model
    torch.manual_seed(args.seed)
    model = models.get_model(args.arch, num_classes=len(classes)).to(device)
    # No DDP: its all-reduce adds up in an order that depends on the number of ranks. All ranks have
    # made the same weights from the same seed, and take the same steps.

    # 3. optimizer
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        fused=True,  # updates all weights in a few kernel launches
    )

    first_epoch = 1
    if args.resume:
        # Every rank reads the file: on several machines, put it where all of them see it.
        checkpoint = torch.load(args.resume, map_location="cpu")  # not to the GPU that saved it
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"] + 1

    # 4. train
    log("start", world_size=world_size, **vars(args))
    augment_rng = torch.Generator()
    for epoch in range(first_epoch, args.epochs + 1):
        # Seeds that depend on the epoch: a resumed run has the same batches and augmentation.
        sampler.set_epoch(epoch)  # without this call, every epoch would have the same order
        augment_rng.manual_seed(1_000_000 * (args.seed + 1) + epoch)  # independent of the shuffle
        meter = Meter(device)
        model.train()
        for step, (images, labels) in enumerate(train_loader, start=1):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            # All ranks draw the same numbers: one row per image of the global batch, as in snsc.py.
            draws = torch.rand(args.batch_size, 3, generator=augment_rng)
            draws = draws[rank::world_size]  # image k of the global batch is on rank k % world_size
            images = augment(images, draws.to(device, non_blocking=True))

            gradients = []
            for k in range(local_shards):
                shard = rank + k * world_size
                shard_images, shard_labels = images[k::local_shards], labels[k::local_shards]
                torch.manual_seed(hash((args.seed, epoch, step, shard)) % 2**63)  # dropout
                logits = model(to_input(shard_images, args.image_size))
                loss = F.cross_entropy(logits, shard_labels)
                optimizer.zero_grad()  # keeps the gradients of the shards apart
                loss.backward()
                gradients.append(parameters_to_vector(w.grad for w in model.parameters()))
                meter.add(loss, logits, shard_labels)  # float64 adds up float32 without rounding
                if k == 0:  # each forward updates BatchNorm's running statistics: keep the first
                    statistics = [buffer.clone() for buffer in model.buffers()]
            for buffer, kept in zip(model.buffers(), statistics, strict=True):
                buffer.copy_(kept)
            mean = sum_in_order(gradients) / args.shards
            vector_to_parameters(mean, [w.grad for w in model.parameters()])
            optimizer.step()

            if step % args.log_every == 0 or step == len(train_loader):
                metrics = meter.result()  # a collective: never under `if rank == 0`
                log("train", epoch=epoch, step=step, **metrics, digest=digest(model))
                meter = Meter(device)

        # 5. evaluate
        metrics = evaluate(model, test_loader, device, args.image_size)
        log("eval", epoch=epoch, **metrics, digest=digest(model))
        if args.save and rank == 0:  # after evaluate(), all ranks hold the same model
            save(args.save, model, optimizer, epoch)

    # 6. finish
    log("end", peak_gpu_memory_mib=torch.cuda.max_memory_allocated() / 2**20)


def sum_in_order(gradients):
    """The sum of the gradients of all shards, in the order of the shards. Every rank must call it.

    gradients: one vector per shard of this rank. As in a ring all-reduce, each rank adds up one
    part of the numbers for all. But it gets that part of each shard by itself.
    """
    world_size = dist.get_world_size()
    count = len(gradients[0])
    size = -(-count // world_size)  # of a part, rounded up
    padding = [0, size * world_size - count]
    # (ranks, shards per rank, size): sent[r] goes to rank r.
    sent = torch.stack([F.pad(g, padding).view(world_size, size) for g in gradients], dim=1)
    received = torch.empty_like(sent)  # received[r, k]: from rank r, of its shard k
    dist.all_to_all_single(received, sent)
    total = sent.new_zeros(size)
    for k in range(len(gradients)):
        for r in range(world_size):  # shard r + k * world_size
            total += received[r, k]
    whole = total.new_empty(world_size * size)
    dist.all_gather_into_tensor(whole, total)
    return whole[:count]


def digest(model):
    """A hash of all bits of the weights and of BatchNorm's statistics. Waits for the device."""
    sha = hashlib.sha256()
    for value in model.state_dict().values():
        sha.update(value.cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


def load_dataset(name, folder, size, train):
    """The training or the test images, as uint8, and the names of the classes."""
    if name == "imagenet":  # photographs, in one folder per class
        crop = v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
        data = datasets.ImageFolder(folder / ("train" if train else "val"), crop, loader=decode)
        return data, data.classes

    # The other data sets fit into memory: images (N, 3, H, W) and labels (N).
    if name == "cifar10":
        data = datasets.CIFAR10(folder, train)  # run snsc.py first: it downloads
        images, labels = torch.tensor(data.data).permute(0, 3, 1, 2), torch.tensor(data.targets)
    else:  # fashion-mnist: gray, 28 x 28; comes with this project
        data = datasets.FashionMNIST(folder, train)
        images, labels = F.pad(data.data, [2, 2, 2, 2]), data.targets  # 32 x 32
        images = images[:, None].expand(-1, 3, -1, -1)  # red = green = blue
    return TensorDataset(images.contiguous(), labels), data.classes


def decode(path):
    """An image file as uint8 (3, H, W)."""
    return decode_image(path, mode="RGB")


def make_loader(dataset, sampler, batch_size, device, workers, drop_last=False):
    """Batches (images, labels) of the images whose indices the sampler yields."""
    pin_memory = device.type == "cuda"  # from pinned memory, copies run while Python goes on
    batch_sampler = BatchSampler(sampler, batch_size, drop_last)  # yields lists of indices
    if isinstance(dataset, TensorDataset):
        # The images are in memory: dataset[[5, 2, 7]] is a whole batch. batch_size=None makes
        # DataLoader look up each list at once, not image by image, which takes far longer.
        return DataLoader(dataset, sampler=batch_sampler, batch_size=None, pin_memory=pin_memory)
    return DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=workers,
        persistent_workers=workers > 0,  # keep them alive between epochs
        pin_memory=pin_memory,
    )


def augment(images, draws):
    """Shifts each image by up to an eighth of its side, and flips it with probability 1/2.

    images: (N, 3, side, side). draws: (N, 3), random numbers in [0, 1) for row, column and flip.
    """
    side = images.shape[-1]
    max_shift = side // 8
    row, column = (draws[:, :2] * (2 * max_shift + 1)).long().unbind(1)  # 0 to 2 * max_shift
    padded = F.pad(images, [max_shift] * 4)
    # What follows is this loop, without its many small copies, which would slow a GPU down:
    # torch.stack([p[:, r : r + side, c : c + side] for p, r, c in zip(padded, row, column)])
    windows = padded.unfold(2, side, 1).unfold(3, side, 1)  # all possible crops, not yet copied
    n = torch.arange(len(images), device=images.device)
    images = windows[n, :, row, column]  # of each image, the crop at its row and column
    flip = draws[:, 2] < 0.5
    return torch.where(flip[:, None, None, None], images.flip(3), images)


def to_input(images, size):
    """uint8 images as floats in [-2, 2), resized to (N, 3, size, size)."""
    images = (images.float() - 128) / 64  # roughly the mean and the deviation of photographs
    if images.shape[-1] != size:
        images = F.interpolate(images, (size, size), mode="bilinear")
    return images


@torch.no_grad()
def evaluate(model, loader, device, size):
    """Mean loss and accuracy over the images of all ranks. Every rank must call it."""
    model.eval()
    # BatchNorm's running statistics differ between ranks: each rank has those of its first shard.
    # Copy rank 0's, those of shard 0 on any number of ranks: all evaluate what rank 0 saves.
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
    """Mean loss, accuracy and speed since it was made.

    The sums stay on the device, so add() does not wait for it.
    """

    def __init__(self, device):
        self.started = time.perf_counter()
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, images

    def add(self, loss, logits, labels):
        """A batch: its mean loss, its logits (N, classes), its labels (N)."""
        self.sums[0] += loss.detach() * len(labels)
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += len(labels)

    def result(self):
        """Over all ranks. Every rank must call it."""
        sums = self.sums.clone()  # all_reduce writes its result into its argument
        dist.all_reduce(sums)  # adds up the sums of all ranks
        loss, correct, images = sums.tolist()  # waits for the device: only then read the clock
        seconds = time.perf_counter() - self.started
        return {
            "loss": loss / images,
            "accuracy": correct / images,
            "images": int(images),
            "seconds": seconds,
            "images_per_second": images / seconds,
        }


def log(event, **fields):
    """Prints one line, on rank 0 only."""
    if dist.get_rank() != 0:
        return
    pairs = [f"{k}={v:.9g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items()]
    print(event, *pairs, flush=True)


def save(path, model, optimizer, epoch):
    """Writes what --resume needs. The file appears whole: a crash leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, temporary)
    temporary.replace(path)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ["cifar10", "fashion-mnist", "imagenet"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--dataset", choices=names, default="cifar10", help="images to train on [%(default)s]")
    add("--data", type=Path, default="data", help="folder of the data set [%(default)s]")
    add("--arch", default="resnet18", help="classification model of torchvision [%(default)s]")
    add("--image-size", type=int, help="pixels per side [224 for imagenet, else 32]")
    add("--epochs", type=int, default=5, help="passes over the training images [%(default)s]")
    add("--batch-size", type=int, default=256, help="images per step, over all ranks [%(default)s]")
    add("--lr", type=float, default=0.01, help="learning rate [%(default)s]")
    add("--workers", type=int, default=4, help="workers per loader, on each rank [%(default)s]")
    add("--seed", type=int, default=0, help="random seed [%(default)s]")
    add("--device", choices=["cpu", "cuda"], default=device, help="where to train [%(default)s]")
    add("--log-every", type=int, default=50, help="steps between log lines [%(default)s]")
    add("--save", type=Path, help="write a checkpoint to this file after every epoch [none]")
    add("--resume", type=Path, help="resume after this checkpoint's epoch, with its lr [none]")
    add("--shards", type=int, default=4, help="parts of each batch [%(default)s]")
    add("--threads", type=int, default=1, help="CPU threads per process [%(default)s]")
    args = parser.parse_args()
    args.image_size = args.image_size or (224 if args.dataset == "imagenet" else 32)
    return args


if __name__ == "__main__":
    main(parse_args())
    dist.destroy_process_group()  # after main(): DDP, which uses the group, is gone
