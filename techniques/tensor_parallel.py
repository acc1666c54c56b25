"""Tensor parallelism by DTensor, with sequence parallelism by a flag.

torchrun --standalone --nproc-per-node 4 techniques/tensor_parallel.py --arch vit_tiny
It communicates within each layer: keep all ranks on one machine.
Without a GPU, on images that come with this project, add: --device cpu --dataset fashion-mnist
CIFAR-10, the default data set: `python snsc.py --epochs 0` downloads it. Run it on each machine.

Start reading at main(). All scripts of this project train on the same images, in the same order.
`diff -u techniques/tensor_parallel_by_hand.py techniques/tensor_parallel.py` shows what it changes.
Left out on purpose: a learning-rate schedule, random resized crops, mixed precision.
"""

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
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
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))  # number on this machine: 0 to 3
    world_size = int(os.environ["WORLD_SIZE"])  # how many processes there are: 8
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
    torch.backends.cudnn.deterministic = True  # whole weights get equal gradients on all ranks

    # 1. data
    # The ranks split the layers, not the images: every rank gets the whole global batch.
    train_set, classes = load_dataset(args.dataset, args.data, args.image_size, train=True)
    test_set, test_classes = load_dataset(args.dataset, args.data, args.image_size, train=False)
    if classes != test_classes or any(name.startswith(".") for name in classes):
        sys.exit(f"--data {args.data}: train/ and val/ need equal class folders, no hidden ones")
    if args.batch_size > len(train_set):
        sys.exit(f"--batch-size {args.batch_size}: there are {len(train_set)} training images")
    if args.workers and len(tempfile.gettempdirb()) > 75:  # workers put sockets there
        sys.exit("TMPDIR is too long a path for loader workers, which would hang: set it to /tmp")
    # All ranks draw the same order as snsc.py. num_replicas=1: each takes all images of it.
    sampler = DistributedSampler(train_set, 1, 0, seed=args.seed, drop_last=True)
    loader_options = {
        "batch_size": args.batch_size,
        "num_workers": args.workers,
        "persistent_workers": args.workers > 0,  # keep them between epochs
        "pin_memory": args.device == "cuda",  # lets .to(device, non_blocking=True) return at once
    }
    # drop_last=True skips an incomplete last batch, so that all steps have the same batch size.
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loader_options)
    # Each forward communicates, so all ranks evaluate the same batches, too.
    test_loader = DataLoader(test_set, **loader_options)

    # 2. model
    torch.manual_seed(args.seed)
    if args.arch == "vit_tiny":  # patches of 4 x 4, 4 layers, 4 heads, width 128, in the MLP 256
        model = models.VisionTransformer(args.image_size, 4, 4, 4, 128, 256, 0, 0, len(classes))
    else:
        model = models.get_model(args.arch, num_classes=len(classes))
    if not isinstance(model, models.VisionTransformer):
        sys.exit(f"--arch {args.arch}: give a vision transformer, such as vit_tiny or vit_b_16")
    heads = model.encoder.layers[0].num_heads
    if heads % world_size:
        sys.exit(f"--nproc-per-node: {world_size} processes cannot split {heads} heads evenly")
    # A layer's weights become DTensors, of which this rank has a shard. Colwise: split by outputs.
    # Rowwise: by inputs, and the outputs are summed over the ranks. In between, tensors are local.
    # With sequence parallelism, tensors between such pairs are split by tokens.
    tokens = Shard(1) if args.sequence_parallel else Replicate()  # (N, tokens, width)
    summed = {"output_layouts": tokens, "use_local_output": not args.sequence_parallel}
    plan = {
        "self_attention.in_proj": ColwiseParallel(input_layouts=tokens),
        "self_attention.out_proj": RowwiseParallel(**summed),
        "mlp.0": ColwiseParallel(input_layouts=tokens),
        "mlp.3": RowwiseParallel(**summed),
    }
    if args.sequence_parallel:
        plan |= {"ln_1": SequenceParallel(), "ln_2": SequenceParallel()}
    mesh = init_device_mesh(device.type, (world_size,))  # all ranks, in one dimension
    for block in model.encoder.layers:
        block.self_attention = Attention(block.self_attention, world_size)
        parallelize_module(block, mesh, plan)  # a collective: rank 0 sends shards
    if args.sequence_parallel:  # cut the tokens before the first block, join them after the last
        cut = {"input_layouts": Replicate(), "desired_input_layouts": tokens}
        join = {"output_layouts": tokens, "desired_output_layouts": Replicate()}
        edges = PrepareModuleInputOutput(**cut, **join)
        parallelize_module(model.encoder.layers, mesh, edges)
    model.to(device)  # only what this rank keeps
    # No DDP: DTensors know what to add up in backward(). The other weights get the same gradients
    # on all ranks.
    # The seed stays the same on all ranks: dropout would have to drop the same numbers.

    # 3. optimizer
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        foreach=False,  # one by one: the faster ways cannot mix DTensors and tensors
    )

    # 4. resume
    first_epoch = 1
    if args.resume:
        # Every rank reads the file: on several machines, put it where all of them see it. After a
        # failure, start again with --resume: only techniques/elastic.py resumes by itself.
        checkpoint = torch.load(args.resume, map_location="cpu")  # not on the GPU that saved it
        # The file has whole tensors, like the file of every script.
        whole = {k.replace("in_proj_", "in_proj."): w for k, w in checkpoint["model"].items()}
        alike = partial(shard, dict(model.named_parameters()))
        weights, momenta = with_each(alike, whole, checkpoint["optimizer"])
        for group in momenta["param_groups"]:
            group.update(fused=None, foreach=False)  # other scripts have saved fused=True
        model.load_state_dict(weights)
        optimizer.load_state_dict(momenta)
        first_epoch = checkpoint["epoch"] + 1
    if args.save and dist.get_rank() == 0:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        if args.save.is_dir() or not os.access(args.save.parent, os.W_OK):
            sys.exit(f"--save {args.save}: must be a file, in a folder that is writable")

    # 5. train
    log("start", world_size=world_size, classes=len(classes), **vars(args))
    augment_rng = torch.Generator()
    for epoch in range(first_epoch, args.epochs + 1):
        # The seeds depend only on --seed and the epoch, so a resumed run has the same batches.
        sampler.set_epoch(epoch)  # otherwise, all epochs would have the same order
        augment_rng.manual_seed(1_000_000 * (args.seed + 1) + epoch)  # never the shuffle's seed
        meter = Meter(device)
        model.train()
        for step, (images, labels) in enumerate(train_loader, start=1):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            # All ranks draw the same numbers, so that all have the same images.
            draws = torch.rand(args.batch_size, 3, generator=augment_rng)
            draws = draws.to(device, non_blocking=True)  # too small to need pinned memory
            images = augment(images, draws)

            images = to_input(images, args.image_size)
            logits = model(images)  # a collective, as is backward()
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            meter.add(loss, logits, labels)
            if step % args.log_every == 0 or step == len(train_loader):
                metrics = meter.result()
                log("train", epoch=epoch, step=step, **metrics)
                meter = Meter(device)  # each line covers the steps since the last one

        # 6. evaluate
        metrics = evaluate(model, test_loader, device, args.image_size)  # a collective, too
        log("eval", epoch=epoch, **metrics)
        if args.save:
            save(args.save, model, optimizer, epoch)  # a collective: never under `if rank == 0`

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


class Attention(nn.Module):
    """This rank's heads of an nn.MultiheadAttention. Every rank must call it."""

    def __init__(self, whole, world_size):
        super().__init__()
        # ColwiseParallel splits an nn.Linear, so in_proj becomes one.
        self.in_proj = nn.Linear(whole.embed_dim, 3 * whole.embed_dim, device="meta")
        self.in_proj.weight = nn.Parameter(reorder(whole.in_proj_weight.data, 3, world_size))
        self.in_proj.bias = nn.Parameter(reorder(whole.in_proj_bias.data, 3, world_size))
        self.out_proj = whole.out_proj
        self.head_dim = whole.head_dim

    def forward(self, x, *_, need_weights):  # as torchvision calls it: x is query, key and value
        packed = self.in_proj(x)
        packed = packed.unflatten(2, (3, -1, self.head_dim))  # (N, tokens, 3, heads, head_dim)
        query, key, value = packed.permute(2, 0, 3, 1, 4)  # each (N, heads, tokens, head_dim)
        x = F.scaled_dot_product_attention(query, key, value)  # no head needs another one
        x = x.transpose(1, 2).flatten(2)  # (N, tokens, this rank's heads side by side)
        return self.out_proj(x), None  # None: no attention weights


def shard(weights, name, whole):
    """A tensor of a file, split as the weight of this name is. Every rank must call it."""
    weight = weights[name]
    if not isinstance(weight, DTensor):
        return whole
    if "in_proj" in name:
        whole = reorder(whole, 3, weight.device_mesh.size())
    return distribute_tensor(whole, weight.device_mesh, weight.placements)


def gather(name, part):
    """The whole of a DTensor, as torchvision has it. Every rank must call it."""
    if not isinstance(part, DTensor):
        return part
    whole = part.full_tensor().cpu()  # all weights together may be too large for a device
    return reorder(whole, part.device_mesh.size(), 3) if "in_proj" in name else whole


def reorder(rows, outer, inner):
    """Rows in outer groups of inner groups, as inner groups of outer ones.

    in_proj has the rows of all queries, then of all keys, then of all values. Grouped by rank, a
    shard has all three of its heads.
    """
    return rows.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def with_each(function, weights, optimizer_state):
    """Both state dicts, with function(name, tensor) instead of each weight and momentum."""
    weights = {name: function(name, weight) for name, weight in weights.items()}
    momenta = {}
    for number, name in enumerate(weights):  # the optimizer has numbered them in this order
        momentum = optimizer_state["state"][number]["momentum_buffer"]
        momenta[number] = {"momentum_buffer": function(name, momentum)}
    return weights, optimizer_state | {"state": momenta}


@torch.no_grad()
def evaluate(model, loader, device, size):
    """Mean loss and accuracy over all images of the loader. Every rank must call it."""
    model.eval()
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
        """All ranks have the same images, so nothing is added up over the ranks."""
        loss, correct, images = self.sums.tolist()  # waits until the device is done
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


def save(path, model, optimizer, epoch):
    """Writes a file for --resume. It is renamed when complete: a crash leaves no half file."""
    # Whole tensors, so that any script can resume. A collective: each rank has only its shards.
    weights, momenta = with_each(gather, model.state_dict(), optimizer.state_dict())
    momenta["param_groups"][0]["foreach"] = None  # others need not update weights one by one
    if dist.get_rank() != 0:
        return
    temporary = path.with_name(path.name + ".part")
    weights = {k.replace("in_proj.", "in_proj_"): w for k, w in weights.items()}
    state = {"model": weights, "optimizer": momenta, "epoch": epoch}
    try:
        torch.save(state, temporary)
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
    add("--sequence-parallel", action="store_true", help="split by tokens between layers [off]")
    args = parser.parse_args()
    if args.image_size is None:
        args.image_size = 224 if args.dataset == "imagenet" else 32
    if args.workers is None:
        args.workers = 4 if args.dataset == "imagenet" or args.device == "cuda" else 0
    return args


if __name__ == "__main__":
    main(parse_args())
    # DTensor's caches keep the group, and with it Gloo's threads, until Python ends. Python aborts
    # if a thread still frees a tensor then. So wait for a moment.
    time.sleep(0.1)
    dist.destroy_process_group()  # after main(), which uses the group to its end
