"""OneFlow instead of PyTorch: its DistributedDataParallel (DDP), or its global tensors.

. FOLDER/bin/activate                            # after: bash bench/install_oneflow.sh FOLDER
python -m oneflow.distributed.launch --nproc_per_node 4 techniques/oneflow_ddp.py
Global tensors instead of DDP:
python -m oneflow.distributed.launch --nproc_per_node 4 techniques/oneflow_ddp.py --global-tensors
Without a download, on images that come with this project: --dataset fashion-mnist. The default
data set, CIFAR-10, is downloaded by snsc.py: run it first.

Start reading at main(). OneFlow has PyTorch's names, so `diff -u snsc.py techniques/oneflow_ddp.py`
shows what data parallelism asks, and where the two libraries differ. OneFlow draws other random
numbers: the order of the images, the augmentation and the initial weights are not snsc.py's.
Left out on purpose: what snsc.py leaves out, several machines, OneFlow's static graphs.
"""

import argparse
import copy
import shutil
import sys
import time
from pathlib import Path

import oneflow as torch  # then most lines of a PyTorch script stay as they are
import oneflow.nn.functional as F
from flowvision import datasets, models  # OneFlow's torchvision
from flowvision.transforms import CenterCrop, Compose, PILToTensor, Resize
from oneflow.nn.parallel import DistributedDataParallel
from oneflow.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


def main(args):
    # 0. processes and devices
    # OneFlow's launcher starts --nproc_per_node copies of this script. `import oneflow` connects
    # them, so there is no init_process_group(). Without the launcher, world_size is 1.
    rank = torch.env.get_rank()
    world_size = torch.env.get_world_size()
    # Without an index, OneFlow takes the local rank's device: cuda:1, and even cpu:1. With cpu:0 on
    # every rank, DDP would fail.
    device = torch.device(args.device)

    # 1. data
    # --batch-size is the global batch, split over the ranks.
    local_batch_size, remainder = divmod(args.batch_size, world_size)
    if remainder:
        sys.exit(f"--batch-size {args.batch_size}: must be a multiple of {world_size} processes")
    train_set, classes = load_dataset(args.dataset, args.data, args.image_size, train=True)
    test_set, test_classes = load_dataset(args.dataset, args.data, args.image_size, train=False)
    if classes != test_classes:
        sys.exit(f"--data {args.data}: train/ and val/ have different class folders")
    if args.batch_size > len(train_set):
        sys.exit(f"--batch-size {args.batch_size}: there are {len(train_set)} training images")
    # All ranks draw the same order. Rank r takes the images r, r + world_size, ... of it.
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = make_loader(
        train_set, sampler, local_batch_size, device, args.workers, drop_last=True
    )
    test_indices = range(rank, len(test_set), world_size)  # each test image exactly once
    test_loader = make_loader(test_set, test_indices, local_batch_size, device, args.workers)

    # 2. model
    torch.manual_seed(args.seed)
    model = getattr(models, args.arch)(num_classes=len(classes)).to(device)
    if args.global_tensors:
        # A global tensor is one tensor on many devices. Its placement says on which, and its sbp
        # what each of them holds. split(0): some rows. broadcast: all of it. partial_sum: a part of
        # a sum. OneFlow infers the sbp of a result from those of the inputs, and communicates where
        # it must. Here gradients come out as partial_sum, and an all-reduce makes them broadcast.
        placement = torch.placement.all(args.device)
        parallel_model = copy.deepcopy(model)  # to_global() would convert model itself
        # This also copies rank 0's weights to all ranks.
        parallel_model.to_global(placement=placement, sbp=torch.sbp.broadcast)
    else:
        # As PyTorch's DDP, but it returns model itself, with hooks on it. So broadcast_buffers=True
        # would make model() a collective in evaluate(), too. There a rank may have one batch more
        # than another, and its broadcast would meet an all-reduce of the others: a crash.
        parallel_model = DistributedDataParallel(model, broadcast_buffers=False)
    torch.manual_seed(args.seed + rank)  # from here on another seed per rank, for dropout

    # 3. optimizer
    optimizer = torch.optim.SGD(
        parallel_model.parameters(),
        lr=args.lr,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        fused=device.type == "cuda",  # updates all weights in a few kernel launches
    )

    first_epoch = 1
    if args.resume:
        # With global tensors, rank 0 reads the files. Otherwise every rank reads them.
        source = 0 if args.global_tensors else None
        checkpoint = torch.load(args.resume, global_src_rank=source)
        parallel_model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"] + 1

    # 4. train
    log("start", world_size=world_size, **vars(args))
    augment_rng = torch.Generator()
    for epoch in range(first_epoch, args.epochs + 1):
        # Seeds that depend on the epoch: a resumed run has the same batches and augmentation.
        sampler.set_epoch(epoch)
        augment_rng.manual_seed(1_000_000 * (args.seed + 1) + epoch)  # independent of the shuffle
        meter = Meter(device)
        parallel_model.train()
        for step, (images, labels) in enumerate(train_loader, start=1):
            images = images.to(device)
            labels = labels.to(device)
            # All ranks draw the same numbers: one row per image of the global batch.
            draws = torch.rand(args.batch_size, 3, generator=augment_rng)
            draws = draws[rank::world_size]  # image k of the global batch is on rank k % world_size
            images = to_input(augment(images, draws.to(device)), args.image_size)
            if args.global_tensors:
                # No image is sent: the local batches of all ranks are now rows of one tensor.
                images = images.to_global(placement=placement, sbp=torch.sbp.split(0))
                labels = labels.to_global(placement=placement, sbp=torch.sbp.split(0))

            logits = parallel_model(images)
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            if args.global_tensors:
                # The loss is the mean over the global batch, as partial_sum. A rank's part of it
                # comes from its own images: world_size times that part is their mean.
                loss, logits = loss.to_local() * world_size, logits.to_local()
                labels = labels.to_local()
            meter.add(loss, logits, labels)
            if step % args.log_every == 0 or step == len(train_loader):
                metrics = meter.result()
                log("train", epoch=epoch, step=step, **metrics)
                meter = Meter(device)

        # 5. evaluate
        if args.global_tensors:  # they are broadcast: each rank holds all weights
            state = parallel_model.state_dict()
            model.load_state_dict({name: value.to_local() for name, value in state.items()})
        metrics = evaluate(model, test_loader, device, args.image_size)
        log("eval", epoch=epoch, **metrics)
        if args.save and (rank == 0 or args.global_tensors):
            save(args.save, parallel_model, optimizer, epoch, args.global_tensors)

    # 6. finish
    log("end")  # OneFlow has no torch.cuda.max_memory_allocated()


def load_dataset(name, folder, size, train):
    """The training or the test images, as uint8, and the names of the classes."""
    if name == "imagenet":  # photographs, in one folder per class
        crop = Compose([Resize(size), CenterCrop(size), PILToTensor()])
        data = datasets.ImageFolder(folder / ("train" if train else "val"), crop)
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
    images = images.float()  # torch.where() below: OneFlow has no kernel for uint8
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
    for buffer in model.buffers():  # each rank has BatchNorm statistics of its own: take rank 0's
        torch.comm.broadcast(buffer, 0)
    meter = Meter(device)
    for images, labels in loader:
        images = images.to(device)
        labels = labels.to(device)
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
        # The ranks' sums as one global tensor. partial_sum: its value is the sum of them.
        placement = torch.placement.all(self.sums.device.type)
        sums = self.sums.to_global(placement=placement, sbp=torch.sbp.partial_sum)
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
    if torch.env.get_rank() != 0:
        return
    pairs = [f"{k}={v:.9g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items()]
    print(event, *pairs, flush=True)


def save(path, model, optimizer, epoch, global_tensors):
    """Writes what --resume needs, as OneFlow does: a folder. A crash leaves the old one or .part.

    With global tensors every rank must call it. Rank 0 writes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, temporary, global_dst_rank=0 if global_tensors else None)
    if torch.env.get_rank() == 0:  # it has written all files when torch.save() returns
        if path.exists():
            shutil.rmtree(path)
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
    add("--save", type=Path, help="write a checkpoint folder after every epoch [none]")
    add("--resume", type=Path, help="resume after this checkpoint's epoch, with its lr [none]")
    add("--global-tensors", action="store_true", help="global tensors instead of DDP [off]")
    args = parser.parse_args()
    args.image_size = args.image_size or (224 if args.dataset == "imagenet" else 32)
    return args


if __name__ == "__main__":
    main(parse_args())
