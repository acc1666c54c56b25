"""OneFlow instead of PyTorch: its DistributedDataParallel (DDP), or its global tensors.

. FOLDER/bin/activate                            # after: bash bench/install_oneflow.sh FOLDER
python -m oneflow.distributed.launch --nproc_per_node 4 techniques/oneflow_ddp.py
Global tensors instead of DDP:
python -m oneflow.distributed.launch --nproc_per_node 4 techniques/oneflow_ddp.py --global-tensors
Without a download, on images that come with this project: --dataset fashion-mnist. CIFAR-10,
the default data set: `python snsc.py --epochs 0` downloads it.

Start reading at main(). OneFlow has PyTorch's names, so `diff -u snsc.py techniques/oneflow_ddp.py`
shows what data parallelism needs, and where the two libraries differ. OneFlow draws other random
numbers: the order of the images, the augmentation and the initial weights are not snsc.py's.
Left out on purpose: what snsc.py leaves out, several machines, OneFlow's static graphs.
"""

import argparse
import copy
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import oneflow as torch  # then most lines of a PyTorch script stay as they are
import oneflow.nn.functional as F
from flowvision import datasets, models  # OneFlow's torchvision
from flowvision.transforms import CenterCrop, Compose, PILToTensor, Resize
from oneflow.nn.parallel import DistributedDataParallel
from oneflow.utils.data import DataLoader, DistributedSampler, TensorDataset
from PIL import Image


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
    if classes != test_classes or any(name.startswith(".") for name in classes):
        sys.exit(f"--data {args.data}: train/ and val/ need equal class folders, no hidden ones")
    if args.batch_size > len(train_set):
        sys.exit(f"--batch-size {args.batch_size}: there are {len(train_set)} training images")
    if args.workers and len(tempfile.gettempdirb()) > 75:  # workers put sockets there
        sys.exit("TMPDIR is too long a path for loader workers, which would hang: set it to /tmp")
    # All ranks draw the same order. Rank r takes the images r, r + world_size, ... of it.
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader_options = {
        "batch_size": local_batch_size,
        "num_workers": args.workers,
        "persistent_workers": args.workers > 0,  # keep them between epochs
        "pin_memory": args.device == "cuda",  # lets .to(device, non_blocking=True) return at once
    }
    # drop_last=True skips an incomplete last batch, so that all steps have the same batch size.
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loader_options)
    test_indices = range(rank, len(test_set), world_size)  # each test image exactly once
    test_loader = DataLoader(test_set, sampler=test_indices, **loader_options)

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
    torch.manual_seed(args.seed + rank)  # each rank draws its own dropout masks, if there are any

    # 3. optimizer
    optimizer = torch.optim.SGD(
        parallel_model.parameters(),
        lr=args.lr,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        fused=device.type == "cuda",  # updates all weights in a few kernel launches
    )

    # 4. resume
    first_epoch = 1
    if args.resume:
        # With global tensors, rank 0 reads the files. Otherwise every rank reads them.
        source = 0 if args.global_tensors else None
        checkpoint = torch.load(args.resume, global_src_rank=source)
        parallel_model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"] + 1
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        foreign = args.save.exists() and not (args.save / "pickled_data").exists()
        if foreign or not os.access(args.save.parent, os.W_OK):
            sys.exit(f"--save {args.save}: must be new, or a checkpoint, in a writable folder")

    # 5. train
    log("start", world_size=world_size, classes=len(classes), **vars(args))
    augment_rng = torch.Generator()
    for epoch in range(first_epoch, args.epochs + 1):
        # The seeds depend only on --seed and the epoch, so a resumed run has the same batches.
        sampler.set_epoch(epoch)
        augment_rng.manual_seed(1_000_000 * (args.seed + 1) + epoch)  # never the shuffle's seed
        meter = Meter(device)
        parallel_model.train()
        for step, (images, labels) in enumerate(train_loader, start=1):
            images = images.to(device)
            labels = labels.to(device)
            # All ranks draw the same numbers: one row per image of the global batch.
            draws = torch.rand(args.batch_size, 3, generator=augment_rng)
            draws = draws[rank::world_size]  # like the sampler: every world_size-th from rank on
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
                meter = Meter(device)  # each line covers the steps since the last one

        # 6. evaluate
        if args.global_tensors:  # they are broadcast: each rank holds all weights
            state = parallel_model.state_dict()
            model.load_state_dict({name: value.to_local() for name, value in state.items()})
        metrics = evaluate(model, test_loader, device, args.image_size)
        log("eval", epoch=epoch, **metrics)
        if args.save and (rank == 0 or args.global_tensors):
            save(args.save, parallel_model, optimizer, epoch, args.global_tensors)

    # 7. finish
    log("end")  # OneFlow has no torch.cuda.max_memory_allocated()


def load_dataset(name, folder, size, train):
    """The training or the test images, as uint8, and the names of the classes."""
    if name == "imagenet":  # photographs, in one folder per class
        crop = Compose([Resize(size), CenterCrop(size), PILToTensor()])
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
    """An image file as RGB, with 8 bits per sample; of 16, the upper 8."""
    try:
        image = Image.open(path)
        image.load()
    except Exception as error:
        raise RuntimeError(f"{path}: {error}") from None
    if getattr(image, "is_animated", False):
        raise RuntimeError(f"{path}: an animation")
    if image.mode.startswith("I"):  # gray, with 16 bits: convert() would clip them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


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
    images = images.float()  # torch.where() below: OneFlow has no kernel for uint8
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
        # The ranks' sums as one global tensor. partial_sum: its value is the sum of them.
        placement = torch.placement.all(self.sums.device.type)
        sums = self.sums.to_global(placement=placement, sbp=torch.sbp.partial_sum)
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
    if torch.env.get_rank() != 0:
        return
    words = [event]
    for name, value in fields.items():
        words.append(f"{name}={value:.9g}" if isinstance(value, float) else f"{name}={value}")
    print(*words, flush=True)


def save(path, model, optimizer, epoch, global_tensors):
    """Writes what --resume needs, as OneFlow does: a folder. A crash leaves the old one or .part.

    With global tensors every rank must call it. Rank 0 writes.
    """
    temporary = path.with_name(path.name + ".part")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    try:
        torch.save(state, temporary, global_dst_rank=0 if global_tensors else None)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)  # it may have filled the disk
        sys.exit(f"{path}: not saved, is the disk full? {error}")
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
    add("--save", type=Path, help="write a checkpoint folder after every epoch [none]")
    add("--resume", type=Path, help="resume after this checkpoint's epoch; --lr is ignored [none]")
    add("--global-tensors", action="store_true", help="global tensors instead of DDP [off]")
    args = parser.parse_args()
    if args.image_size is None:
        args.image_size = 224 if args.dataset == "imagenet" else 32
    if args.workers is None:
        args.workers = 4 if args.dataset == "imagenet" or args.device == "cuda" else 0
    return args


if __name__ == "__main__":
    main(parse_args())
