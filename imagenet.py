"""Train an ImageNet classifier on one device or many, under any launcher, with interruptions.

python imagenet.py --data FOLDER --out FOLDER
torchrun --standalone --nproc-per-node 4 imagenet.py --data FOLDER --out FOLDER
srun --kill-on-bad-exit --ntasks-per-node 4 --gpus-per-node 4 python imagenet.py ... (the same)

Started again with the same --out, it goes on where it was: after the end of a job's time, after a
crash, on more devices or fewer. SIGTERM and SIGUSR1 make it save and stop; exit code 75 then says
that it is not finished. Start reading at main(); mnmc_ddp_launch.py explains what DDP asks for, and
docs/imagenet.md what to change for another loss, optimizer or data set.
Left out on purpose: mixup and the like, which need soft labels; other optimizers than SGD.
"""

import argparse
import atexit
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import datetime
import errno
import faulthandler
import fcntl
import functools
import io
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import resource
import signal
import socket
import subprocess
import sys
import time
import tomllib
import uuid
import zipfile
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, models
from torchvision.io import decode_image
from torchvision.transforms import v2

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # of ImageNet's pixels, from 0 to 1
NO_IMAGE = -100  # the label of a file that cannot be read; cross_entropy gives it no loss
NOT_FINISHED = 75  # the exit code after a signal: start it again (EX_TEMPFAIL in sysexits.h)
# Flags that may differ when a run goes on. --accumulate is one of them, since other devices may
# need it; it decides which images BatchNorm sees together.
MAY_CHANGE = """
    accumulate bad_images bench_data config data device evaluate hang_timeout keep log_every
    max_steps out save_every set weights workers
""".split()


class UserError(Exception):
    """An error that the user can fix. run() prints it as one line."""


def main(args):
    # 0. processes and devices
    # After so many seconds without progress every process prints where it is, and ends.
    faulthandler.dump_traceback_later(args.hang_timeout, exit=True)
    stop = Stop()  # from now on a signal is noted
    world = setup_distributed(args.device)
    if world.rank == 0 and not args.evaluate:
        lock(args.out)
    if args.workers is None:
        args.workers = cores_of_all(world)
    parts = world.size * args.accumulate
    micro_batch = args.batch_size // parts
    if args.batch_size % parts or micro_batch < 2:  # BatchNorm needs two
        message = f"give a multiple of {world.size} processes x --accumulate {args.accumulate}"
        raise UserError(f"--batch-size {args.batch_size}: {message}, two images for each at least")
    torch.backends.cudnn.benchmark = True  # try cuDNN's algorithms once, then use the fastest
    tf32 = args.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32

    # 1. data
    train_set = Photographs(args.data / "train", args, train=True)
    test_set = Photographs(args.data / "val", args, train=False)
    if train_set.classes != test_set.classes:
        raise UserError(f"--data {args.data}: train/ and val/ must have the same class folders")
    if args.batch_size > len(train_set):
        raise UserError(f"--batch-size {args.batch_size}: there are only {len(train_set)} images")
    sampler = ResumableSampler(len(train_set), args.batch_size, args.accumulate, args.seed, world)
    train_loader = make_loader(train_set, sampler, micro_batch, args, world)
    mine = [(0, index) for index in range(world.rank, len(test_set), world.size)]
    test_loader = make_loader(test_set, mine, micro_batch, args, world)

    # 2. model
    torch.manual_seed(args.seed)
    model = models.get_model(args.arch, num_classes=len(train_set.classes))
    weights = args.weights or (args.out / "best.pt" if args.evaluate else None)
    if weights:
        load_weights(model, weights)
    if args.sync_bn:
        if world.device.type == "cpu":
            raise UserError("--sync-bn: it needs GPUs")
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = model.to(world.device, memory_format=layout)

    # 3. what there is to do
    if args.evaluate:
        result = evaluate(model, test_loader, stop, args, world)
        if not stop.agreed:  # else it is of a part of the images
            log(args, world, "eval", **result)
    elif args.bench_data:
        bench_data(model, train_loader, args, world)
    else:
        fit(model, train_loader, test_loader, stop, args, world)
    faulthandler.dump_traceback_later(args.hang_timeout, exit=True)
    if stop.agreed:
        stop.leave(world)
    ignore_signals()  # there is nothing more to save; Python's end would take them for fatal
    dist.destroy_process_group()


def fit(model, train_loader, test_loader, stop, args, world):
    """Trains all epochs that are left, and evaluates after each."""
    ema = None  # an average of the weights over the last steps, which is often the better model
    if args.model_ema_decay:
        average = get_ema_multi_avg_fn(args.model_ema_decay)
        ema = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    # After its first step DDP sorts the gradients anew into those that it sends together, which a
    # run that goes on would do at another step; more than two processes on a CPU then add up in
    # another order. DDP does not sort where it looks for unused weights.
    keep_order = world.device.type == "cpu" and world.size > 2
    ddp_model = DistributedDataParallel(
        model, gradient_as_bucket_view=True, find_unused_parameters=keep_order
    )
    if args.compile:
        ddp_model = torch.compile(ddp_model)
    optimizer = make_optimizer(model, args)
    scaler = torch.amp.GradScaler(world.device.type, enabled=args.precision == "fp16")
    torch.manual_seed(args.seed + world.rank)  # for dropout: else all drop the same units

    state = State(model, ema, optimizer, scaler, world)
    settings = {name: str(value) for name, value in vars(args).items() if name not in MAY_CHANGE}
    settings["images"] = f"{len(train_loader.dataset)} {len(test_loader.dataset)}"
    settings["classes"] = " ".join(train_loader.dataset.classes)
    checkpoints = Checkpoints(args.out, args.keep, settings, world)
    resumed = checkpoints.load_newest(state)
    about = {"launcher": world.launcher, "world_size": world.size, "resumed": resumed}
    about |= {"torch": torch.__version__, "images": len(train_loader.dataset)}
    log(args, world, "start", **about, **vars(args))
    if world.rank == 0 and not resumed:
        write(args.out / "config.toml", as_toml(args).encode())

    while state.epochs_done < args.epochs:
        train_epoch(ddp_model, state, train_loader, checkpoints, stop, args, world)
        # Before the evaluation, which may take long. The next start would only do that again.
        checkpoints.save(state)
        if stop.agreed or (args.max_steps and state.step >= args.max_steps):
            break
        result = evaluate(model, test_loader, stop, args, world)
        if ema and not stop.agreed:
            averaged = evaluate(ema.module, test_loader, stop, args, world)
            result |= {f"ema_{name}": averaged[name] for name in ("loss", "top1", "top5")}
        if stop.agreed:  # then these numbers are of a part of the images
            break
        state.epochs_done += 1
        log(args, world, "eval", epoch=state.epochs_done, **result)
        top1 = result["ema_top1" if ema else "top1"]
        if top1 > state.best_top1:
            state.best_top1 = top1
            checkpoints.save_weights(ema.module if ema else model)

    saved = checkpoints.save(state)  # with the last evaluation
    finished = state.epochs_done == args.epochs
    memory = peak_memory(world.device)
    log(args, world, "end", step=state.step, finished=finished, peak_memory_mib=memory)
    if not saved:
        raise UserError(f"--out {args.out}: the end of the training could not be saved")


def train_epoch(ddp_model, state, loader, checkpoints, stop, args, world):
    """Trains what is left of an epoch, or until a signal or --max-steps."""
    epoch, steps = state.epochs_done + 1, loader.sampler.steps
    loader.sampler.begin(epoch, state.step - state.epochs_done * steps)
    until = min(epoch * steps, args.max_steps or epoch * steps)
    ddp_model.train()
    batches = begin(loader)
    meter, begun, first = Meter(world.device), time.perf_counter(), state.step
    while state.step < until:
        faulthandler.dump_traceback_later(args.hang_timeout, exit=True)
        rate = learning_rate(args, state.step, steps)
        for parameters in state.optimizer.param_groups:
            parameters["lr"] = rate

        state.optimizer.zero_grad()
        for part in range(args.accumulate):
            asked = time.perf_counter()
            images, labels = next(batches)
            meter.waited += time.perf_counter() - asked
            images, labels = to_device(images, labels, args, world)
            # The gradients are averaged over the processes once, by the last part's backward().
            last = part == args.accumulate - 1
            with contextlib.nullcontext() if last else ddp_model.no_sync():
                with autocast(args, world):
                    logits = ddp_model(images)
                losses = losses_of(logits, labels, args.label_smoothing)
                # A mean over all images, those that could not be read included: so all processes
                # divide by the same number, and the average over them is right.
                state.scaler.scale(losses.mean() / args.accumulate).backward()
            meter.add(losses, logits, labels)
        if args.clip_grad:
            state.scaler.unscale_(state.optimizer)
            torch.nn.utils.clip_grad_norm_(state.model.parameters(), args.clip_grad)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        if state.ema:
            state.ema.update_parameters(state.model)
        state.step += 1

        stop.agree()
        if stop.agreed or state.step in (1, until) or state.step % args.log_every == 0:
            result = meter.result()
            left = (args.epochs * steps - state.step) / (state.step - first)
            eta = left * (time.perf_counter() - begun)
            log(args, world, "train", epoch=epoch, step=state.step, lr=rate, **result, eta=eta)
            meter = Meter(world.device)
        if stop.agreed:
            return
        if args.save_every and state.step % args.save_every == 0:
            checkpoints.save(state)


@torch.no_grad()
def evaluate(model, loader, stop, args, world):
    """Loss, top-1 and top-5 of all images, each counted once; a signal cuts it short."""
    model.eval()
    batches = begin(loader)
    for buffer in model.buffers():  # BatchNorm's averages differ until DDP's next step
        dist.broadcast(buffer, src=0)
    meter = Meter(world.device)
    # As many turns as the process with most images has: all must agree, also without a batch.
    most = math.ceil(len(loader.dataset) / world.size)
    for _ in range(math.ceil(most / loader.batch_size)):
        faulthandler.dump_traceback_later(args.hang_timeout, exit=True)
        batch = next(batches, None)
        if batch:
            images, labels = to_device(*batch, args, world)
            with autocast(args, world):
                logits = model(images)
            meter.add(losses_of(logits, labels), logits, labels)
        stop.agree()
        if stop.agreed:
            break
    return meter.result()


# How it was started


@dataclasses.dataclass(frozen=True)
class World:
    """All processes that train together, and which of them this is."""

    launcher: str
    rank: int
    local_rank: int
    size: int
    local_size: int  # those on this machine
    device: torch.device


def setup_distributed(device="auto"):
    """Joins the other processes, however this one was started: by torchrun, srun or python.

    On one machine all traffic stays on it. From then on CPU tensors can be exchanged, too, on GPUs.
    Raises UserError.
    """
    env = os.environ
    store = None
    in_step = "SLURM_STEP_NODELIST" in env  # a batch script itself is no step: one process there
    if "RANK" in env:
        launcher = "torchrun"
        # Ends as by SIGTERM if torchrun is killed: else all goes on, and nobody sees it.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG (man 2 prctl)
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
        try:
            rank, local_rank, size, local_size = (int(env[name]) for name in names)
        except (KeyError, ValueError) as wrong:
            raise UserError(f"{wrong}: not as torchrun sets it") from None
    elif in_step and int(env["SLURM_STEP_NUM_TASKS"]) > 1:
        launcher = "srun"
        rank, local_rank = int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"])
        size = int(env["SLURM_STEP_NUM_TASKS"])
        local_size = size // int(env["SLURM_STEP_NUM_NODES"])
        meet_in_slurm()
    else:
        launcher = "srun" if in_step else "python"
        rank, local_rank, size, local_size = 0, 0, 1, 1
        store = dist.HashStore()  # in memory: one process needs no port

    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if launcher == "srun" and torch.cuda.device_count() == 1:
        local_rank = 0  # --gpus-per-task 1 shows each process its own GPU alone
    if cuda and local_rank >= torch.cuda.device_count():
        raise UserError(f"--device: no GPU for process {local_rank} here, try --device cpu")
    here = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(here)
    if size == local_size:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        env.setdefault("NCCL_SOCKET_IFNAME", "lo")
        if launcher == "srun" and store is None:  # as env:// has it, but not for other machines
            port = int(env["MASTER_PORT"])
            listens = socket.create_server(("127.0.0.1", port)).detach() if rank == 0 else None
            store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, master_listen_fd=listens)
    if "TORCHELASTIC_RUN_ID" in env:
        serves = env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
        store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=serves)
        store = part_of_this_start(store, rank, size)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return World(launcher, rank, local_rank, size, local_size, here)


def cores_of_all(world):
    """The cores that the processes on this machine may use together."""
    mine = len(os.sched_getaffinity(0))
    # srun gives each process cores of its own, where Slurm binds processes at all.
    bound = world.launcher == "srun" and mine * world.local_size <= os.cpu_count()
    return mine * world.local_size if bound else mine


def part_of_this_start(store, rank, size):
    """A part of torchrun's store that belongs to this start of all processes alone.

    torchrun keeps its store when it starts the processes again, and they must not read there the
    addresses of those that died. It numbers its restarts, but each node for itself. So process 0
    makes a name, and answers to each process that joins it; one of before answers no more.
    """
    me = uuid.uuid4().hex
    if rank == 0:
        store.set("leader", me)
        for other in range(1, size):
            name = store.get(f"{other} joins {me}").decode()
            store.set(f"{me} takes {name}", "")
        return dist.PrefixStore(me, store)
    while True:
        leader = store.get("leader").decode()
        store.set(f"{rank} joins {leader}", me)
        with contextlib.suppress(dist.DistStoreError):  # its time is over
            store.wait([f"{leader} takes {me}"], datetime.timedelta(seconds=1))
            return dist.PrefixStore(leader, store)


def meet_in_slurm():
    """Sets MASTER_ADDR and MASTER_PORT, where a job step's processes meet: its first machine, and a
    port of its own. What is set already stays. Raises UserError."""
    nodes = os.environ["SLURM_STEP_NODELIST"]
    try:
        if "MASTER_ADDR" not in os.environ:
            names = subprocess.check_output(["scontrol", "show", "hostnames", nodes], text=True)
            os.environ["MASTER_ADDR"] = names.split()[0]
        socket.getaddrinfo(os.environ["MASTER_ADDR"], None)
    except (IndexError, OSError, subprocess.SubprocessError) as error:
        raise UserError(f"MASTER_ADDR: set it to the first of {nodes}: {error}") from None
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
    os.environ.setdefault("MASTER_PORT", str(20_000 + (job * 10 + step) % 10_000))


class Stop:
    """Ends all processes after the same step once one of them had SIGTERM or SIGUSR1."""

    def __init__(self):
        self.signal, self.agreed, self.exchange = 0, False, None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self.note)

    def note(self, number, frame):
        self.signal = number

    def agree(self):
        """Sets `agreed`, in all alike, once some process had a signal. All must call it.

        It tells of the call before, so that no process waits: the number travels while the next
        step computes.
        """
        if self.exchange:
            self.exchange.wait()
            self.agreed = self.agreed or bool(self.largest)
        self.largest = torch.tensor(self.signal)
        self.exchange = dist.all_reduce(self.largest, dist.ReduceOp.MAX, async_op=True)

    def leave(self, world):
        """Ends this process, so that who started it starts it again.

        Slurm starts a job again that it ends itself, and not one that ends by itself. It sends
        SIGTERM when it is about to do so: then this waits for it. SIGUSR1 comes by --signal=USR1@60
        before a job's time is over: then this asks Slurm for it.
        """
        self.exchange.wait()
        by_slurm = torch.tensor(0)
        if world.launcher == "srun" and self.largest == signal.SIGTERM:
            by_slurm += 1
        elif world.launcher == "srun" and world.rank == 0:
            words = ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]]
            try:
                done = subprocess.run(words, stdin=subprocess.DEVNULL, timeout=60)
                by_slurm += done.returncode == 0
            except (OSError, subprocess.SubprocessError) as error:
                say(f"not queued again: {error}")
        dist.all_reduce(by_slurm, dist.ReduceOp.MAX)
        if by_slurm:
            say("saved, and waiting for Slurm to end this job")
            faulthandler.cancel_dump_traceback_later()
            time.sleep(600)  # longer than Slurm waits before it ends a process (KillWait)
        sys.exit(NOT_FINISHED)


# Images


class Photographs(Dataset):
    """A folder with a folder for each class, as uint8 images (size, size, 3) and labels.

    Colours come last, as in the files: any other order takes time. The keys are (epoch, index), and
    all that is drawn at random follows from the key and the seed: an image is augmented alike in
    whatever process, and after whatever restart.
    """

    def __init__(self, folder, args, train):
        self.size, self.seed, self.skip = args.image_size, args.seed, args.bad_images == "skip"
        if train:
            self.window = functools.partial(random_window, least_area=args.least_area)
        else:
            self.window = functools.partial(middle_window, share=args.crop_pct)
        kinds = {"none": None, "rand": v2.RandAugment(), "trivial": v2.TrivialAugmentWide()}
        self.augment = kinds[args.augment] if train else None
        self.told = set()
        try:
            found = datasets.ImageFolder(folder)
        except OSError as error:
            flat = folder.is_dir() and any(folder.glob("*.JPEG"))
            packed = any([*folder.glob("*.tar"), *folder.parent.glob("ILSVRC2012_img_*.tar")])
            cure = "docs/imagenet.md says how to unpack and sort ImageNet"
            cure = cure if flat or packed else error
            line = f"--data {folder.parent}: {folder.name}/ has no class folders with images"
            raise UserError(f"{line}: {cure}") from None
        self.samples, self.classes = found.samples, found.classes

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, key):
        path, label = self.samples[key[1]]
        try:
            image = decode(path)
        except (OSError, RuntimeError) as error:
            line = f"{path}: damaged, or not an image: {first_line(error)}"
            if not self.skip:
                raise OSError(f"{line} (--bad-images skip goes on without it)") from None
            if path not in self.told:
                say(f"skipped: {line}")
            self.told.add(path)
            return torch.full((self.size, self.size, 3), 127, dtype=torch.uint8), NO_IMAGE
        number = self.number(key)
        top, left, height, width, flip = self.window(*image.shape[1:], random.Random(number))
        image = image[None, :, top : top + height, left : left + width]
        image = image.contiguous(memory_format=torch.channels_last)  # for a faster resize
        size = (self.size, self.size)
        image = F.interpolate(image, size, mode="bilinear", antialias=True)[0]
        image = image.flip(2) if flip else image
        if self.augment:
            with torch.random.fork_rng(devices=[]):  # dropout's generator goes on as before
                torch.default_generator.manual_seed(number)
                image = self.augment(image)
        return image.permute(1, 2, 0), label

    def number(self, key):
        """What the random numbers for an image begin with."""
        return hash((self.seed, *key)) % 2**63

    def undecoded(self, key):
        """A file's bytes, the corner and the shape of its window (rows, columns), and its flip."""
        path, _ = self.samples[key[1]]
        try:
            file = Path(path).read_bytes()
            width, height = Image.open(io.BytesIO(file)).size
        except OSError as error:
            raise UserError(f"{path}: damaged, or not an image: {first_line(error)}") from None
        top, left, *shape, flip = self.window(height, width, random.Random(self.number(key)))
        numbers = (numpy.array(value, numpy.int32) for value in ((top, left), shape, flip))
        return numpy.frombuffer(file, numpy.uint8), *numbers


def random_window(height, width, dice, least_area):
    """The part of an image to train on: top, left, height, width, and whether it is flipped.

    With the distribution of torchvision's RandomResizedCrop.
    """
    for _ in range(10):
        area = height * width * dice.uniform(least_area, 1)
        ratio = math.exp(dice.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            top, left = dice.randint(0, height - high), dice.randint(0, width - wide)
            break
    else:  # as much of the middle as has such a ratio
        wide, high = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        top, left = (height - high) // 2, (width - wide) // 2
    return top, left, high, wide, dice.random() < 0.5


def middle_window(height, width, dice, share):
    """The same for tests: the middle, so large a share of the shorter side, never flipped."""
    side = max(1, round(share * min(height, width)))
    return (height - side) // 2, (width - side) // 2, side, side, False


def decode(path):
    """An image file as uint8 (3, H, W); gray, CMYK and 16-bit ones, too."""
    image = decode_image(path, mode="RGB")
    if image.ndim != 3:
        raise RuntimeError("an animation")
    return (image.int() >> 8).byte() if image.dtype == torch.uint16 else image


class ResumableSampler:
    """This process's keys of Photographs, (epoch, index), from any step of an epoch on.

    A step's global batch is the same for any number of processes. Of 4 parts, the first has its
    images 0, 4, 8 ..., and a part is the same whether it is one process's or one of --accumulate.
    The last images of an epoch are left out where they fill no batch.
    """

    def __init__(self, count, batch, accumulate, seed, world):
        self.count, self.batch, self.seed = count, batch, seed
        self.steps = count // batch  # of a whole epoch
        self.parts = world.size * accumulate
        self.mine = range(world.rank, self.parts, world.size)
        self.begin(1, 0)

    def begin(self, epoch, step):
        """Where the next pass begins: at which step of which epoch."""
        self.epoch, self.first = epoch, step

    def __len__(self):
        return (self.steps - self.first) * len(self.mine) * (self.batch // self.parts)

    def __iter__(self):
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch)) % 2**63)
        order = torch.randperm(self.count, generator=generator).tolist()
        for step in range(self.first, self.steps):
            batch = order[step * self.batch : (step + 1) * self.batch]
            for part in self.mine:
                for index in batch[part :: self.parts]:
                    yield self.epoch, index


def make_loader(dataset, sampler, batch, args, world):
    """Batches of uint8 images (batch, size, size, 3) and labels."""
    workers = math.ceil(args.workers / world.local_size)
    if args.loader == "dali":
        return DaliLoader(dataset, sampler, batch, max(1, workers), world)
    return DataLoader(
        dataset,
        batch,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,  # the same ones in every epoch
        pin_memory=world.device.type == "cuda",
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # else each pass takes a number from dropout's generator
    )


def begin(loader):
    """Starts a loader's workers, where they are not there yet; returns its batches."""
    # Gloo's threads get a moment. Before Python 3.11.10 a worker may hang if it is forked just as
    # one of them lets go of an exchange's tensors: https://github.com/python/cpython/issues/112275
    if sys.version_info < (3, 11, 10):
        time.sleep(0.1)
    return iter(loader)


class DaliLoader:
    """The same batches by NVIDIA's DALI: decoded by its threads, or by the GPU where there is one.

    The crops are those of Photographs, drawn here; only the pixels differ a little, since DALI
    decodes and resizes in its own way. Raises UserError.
    """

    INPUTS = ("files", "starts", "shapes", "flips")

    def __init__(self, dataset, sampler, batch, threads, world):
        try:
            from nvidia.dali import fn, pipeline_def, types
        except ImportError as error:
            cure = "bash bench/install_techniques.sh installs it"
            raise UserError(f"--loader dali: no DALI here ({error}): {cure}") from None
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch
        cuda = world.device.type == "cuda"
        self.stream = torch.cuda.Stream() if cuda else None
        self.reader = concurrent.futures.ThreadPoolExecutor(1)  # reads files one batch ahead

        settings = {"batch_size": batch, "num_threads": threads, "prefetch_queue_depth": 1}

        @pipeline_def(device_id=world.local_rank if cuda else None, **settings)
        def pipeline():
            files, starts, shapes, flips = (fn.external_source(name=name) for name in self.INPUTS)
            decoder = "mixed" if cuda else "cpu"  # mixed: from memory here to the GPU
            images = fn.decoders.image_slice(
                files,
                starts,
                shapes,
                axes=(0, 1),
                device=decoder,
                output_type=types.RGB,
                adjust_orientation=False,  # as torchvision has it: an EXIF note turns no image
                jpeg_fancy_upsampling=True,  # on GPUs as on CPUs
            )
            size = [dataset.size, dataset.size]
            images = fn.resize(images, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
            return fn.flip(images, horizontal=flips)

        self.pipeline = pipeline()
        self.pipeline.build()

    def __iter__(self):
        """Batches, as DataLoader has them. DALI works on the next one while one is used."""
        labels = None
        for fields in self.read_ahead():
            ready = None if labels is None else (self.images(), labels)
            *inputs, labels = map(list, zip(*fields, strict=True))
            labels = torch.tensor(labels)
            for name, values in zip(self.INPUTS, inputs, strict=True):
                self.pipeline.feed_input(name, values)
            self.pipeline.schedule_run()
            if ready:
                yield ready
        if labels is not None:
            yield self.images(), labels

    def read_ahead(self):
        """Of each batch what DALI is to do with its images, in the order of INPUTS, and labels."""
        keys = iter(self.sampler)

        def read():
            some = itertools.islice(keys, self.batch_size)
            return [(*self.dataset.undecoded(key), self.dataset.samples[key[1]][1]) for key in some]

        coming = self.reader.submit(read)
        while fields := coming.result():
            coming = self.reader.submit(read)
            yield fields

    def images(self):
        """The batch that DALI works on: uint8 (batch, size, size, 3)."""
        try:
            (found,) = self.pipeline.share_outputs()
        except RuntimeError as error:
            why = " ".join(str(error).split())[:300]
            cure = "if an image is damaged, --loader torch says which"
            raise UserError(f"--loader dali: {why} ({cure})") from None
        with torch.cuda.stream(self.stream):  # of its own, so that it waits for no training step
            images = torch.from_dlpack(found.as_tensor()).clone()
        if self.stream:
            self.stream.synchronize()
            images.record_stream(torch.cuda.current_stream())
        self.pipeline.release_outputs()  # from here on DALI uses its memory for another batch
        return images


def ignore_signals(worker=None):
    """Of a loader's workers: a signal to all processes must not end them, since the epoch goes on
    for a step or two. Of a process that is done."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def to_device(images, labels, args, world):
    """Images as the model takes them, normalised where it computes: a quarter of the traffic."""
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    images = images.to(world.device, non_blocking=True).permute(0, 3, 1, 2)
    images = images.contiguous(memory_format=layout)
    mean, scale = pixels(world.device)
    return (images - mean) * scale, labels.to(world.device, non_blocking=True)


@functools.cache
def pixels(device):
    """The mean and one over the standard deviation of pixels from 0 to 255, each (3, 1, 1)."""
    mean, std = (255 * torch.tensor(x, device=device).view(3, 1, 1) for x in (MEAN, STD))
    return mean, 1 / std


# Numbers


def make_optimizer(model, args):
    """SGD for the weights of a model that is on its device."""
    optimizer = torch.optim.SGD(
        weights_by_decay(model, args), args.lr, momentum=0.9, nesterov=True, fused=True
    )
    # Where fp16's scaler leaves out the first step, fused SGD has made room for the momentum, but
    # written nothing there. Zeros are what the first step begins with anyway.
    for weight in model.parameters():
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


def weights_by_decay(model, args):
    """The parameter groups of an optimizer: weights, and the norms' and all biases."""
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    others = [weight for weight in model.parameters() if weight.ndim > 1]
    decay = args.norm_bias_weight_decay
    decay = args.weight_decay if decay is None else decay
    return [
        {"params": others, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": decay},
    ]


def learning_rate(args, step, steps):
    """The learning rate of a step, counted from 0; steps: of an epoch.

    It grows from nearly 0 for --warmup-epochs; then it falls like half a cosine to 0, or by a
    factor of 10 every --decay-epochs, or stays.
    """
    peak = args.lr * (args.batch_size / 256 if args.scale_lr else 1)
    warm, total = args.warmup_epochs * steps, args.epochs * steps
    if step < warm:
        return peak * (step + 1) / (warm + 1)
    if args.schedule == "cosine":
        return peak * (1 + math.cos(math.pi * (step - warm) / (total - warm))) / 2
    if args.schedule == "steps":
        return peak * 0.1 ** (step // steps // args.decay_epochs)
    return peak


def autocast(args, world):
    """Computes in half precision where that is safe, if --precision asks for it."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.precision)
    return torch.autocast(world.device.type, kind, enabled=kind is not None)


def losses_of(logits, labels, smoothing=0.0):
    """The loss of each image, (N); 0 where it could not be read."""
    return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)


class Meter:
    """Sums over images, kept on the device so that no step waits for it, and the clock."""

    def __init__(self, device):
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        self.begun, self.waited = time.perf_counter(), 0.0

    def add(self, losses, logits, labels):
        """Adds a batch: the losses (N), the logits (N, classes), the labels (N)."""
        hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        was_read = labels != NO_IMAGE
        values = [losses.detach(), hits[:, 0], hits.any(1), was_read, ~was_read]
        self.sums += torch.stack([value.double().sum() for value in values])

    def result(self):
        """Of all processes together, for a log's line. All must call it."""
        sums = self.sums.clone()
        dist.all_reduce(sums)
        loss, top1, top5, images, unreadable = sums.tolist()  # waits for the device
        times = torch.tensor([time.perf_counter() - self.begun, self.waited]).to(sums)
        dist.all_reduce(times, dist.ReduceOp.MAX)  # the slowest sets the pace
        seconds, waited = times.tolist()
        was_read = max(images, 1)
        return {
            "loss": loss / was_read,
            "top1": top1 / was_read,
            "top5": top5 / was_read,
            "images": int(images),
            "unreadable": int(unreadable),
            "images_per_second": (images + unreadable) / seconds,
            "seconds": seconds,
            "data_seconds": waited,
        }


def peak_memory(device):
    """The most MiB that tensors took on the GPU; on a CPU, that this process took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # Linux counts it in KiB


def bench_data(model, loader, args, world):
    """Logs how many images a second the loaders give alone, and the devices train with alone.

    The devices train with the same images again and again, which are there and normalised. The
    smaller number is the limit of a training; the exchange of gradients comes on top.
    """
    faulthandler.cancel_dump_traceback_later()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # there is nothing to save

    def endless():
        for epoch in itertools.count(1):
            loader.sampler.begin(epoch, 0)
            yield from begin(loader)

    def load():
        return len(next(batches)[1])

    trained = torch.compile(model) if args.compile else model
    optimizer = make_optimizer(model, args)
    steps = 10 if world.device.type == "cuda" else 1  # for one wait: a GPU is sent its work ahead

    def compute():
        for _ in range(steps):
            optimizer.zero_grad()
            with autocast(args, world):
                logits = trained(images)
            losses = losses_of(logits, labels, args.label_smoothing)
            losses.mean().backward()
            optimizer.step()
        return steps * len(losses.tolist())  # waits for the device

    batches, classes = endless(), len(loader.dataset.classes)
    speeds = [images_per_second(load, args.bench_data)]
    images, labels = to_device(*next(batches), args, world)
    dist.barrier()  # no process computes while another one still loads
    model.train()
    speeds.append(images_per_second(compute, args.bench_data))
    total = torch.tensor(speeds, dtype=torch.float64)
    dist.all_reduce(total)
    loading, computing = total.tolist()
    limit = "the loader" if loading < computing else "the device"
    cuda = world.device.type == "cuda"
    about = {"device_name": torch.cuda.get_device_name() if cuda else "cpu"}
    about |= {"world_size": world.size, "torch": torch.__version__, "classes": classes}
    names = "arch image_size batch_size precision channels_last compile workers".split()
    about |= {name: getattr(args, name) for name in names}
    log(args, world, "bench", loader=loading, device=computing, limit=limit, **about)


def images_per_second(work, seconds):
    """The speed of something that returns how many images it was done with."""
    for _ in range(3):  # workers start, algorithms are tried
        work()
    begun, images = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        images += work()
    return images / (time.perf_counter() - begun)


# Checkpoints


class State:
    """All that a training has learned so far, and where it is."""

    def __init__(self, model, ema, optimizer, scaler, world):
        self.model, self.ema, self.optimizer, self.scaler = model, ema, optimizer, scaler
        self.world = world
        self.step = 0  # of all epochs: also the position within one
        self.epochs_done = 0  # trained and evaluated
        self.best_top1 = -1.0

    def modules(self):
        """What has a state_dict of its own, by name."""
        named = {"model": self.model, "ema": self.ema}
        named |= {"optimizer": self.optimizer, "scaler": self.scaler}
        return {name: module for name, module in named.items() if module is not None}

    def state_dict(self):
        """Tensors, numbers and names alone. All processes must call it, after the same step."""
        mine = torch.get_rng_state()  # dropout's
        if self.world.device.type == "cuda":
            mine = torch.cat([mine, torch.cuda.get_rng_state()])
        random_states = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(random_states, mine)
        numbers = {name: getattr(self, name) for name in ("step", "epochs_done", "best_top1")}
        modules = {name: module.state_dict() for name, module in self.modules().items()}
        return {**modules, **numbers, "random_states": random_states}

    def load_state_dict(self, found):
        """Goes on from there."""
        for name, module in self.modules().items():
            module.load_state_dict(found[name])
        for name in ("step", "epochs_done", "best_top1"):
            setattr(self, name, found[name])
        if len(found["random_states"]) == self.world.size:
            mine, size = found["random_states"][self.world.rank], len(torch.get_rng_state())
            torch.set_rng_state(mine[:size])
            if self.world.device.type == "cuda" and len(mine) > size:
                torch.cuda.set_rng_state(mine[size:])
        else:  # other processes than before: dropout goes on with other numbers
            torch.manual_seed(hash((torch.initial_seed(), self.step)) % 2**63)


class Checkpoints:
    """The newest states of a run, in a folder that all processes see.

    step-000005004-epochs-0001.pt was written after so many steps, with so many epochs evaluated.
    The files are those of torch.save, with its checksums, and are read as tensors, numbers and
    names alone: one that would run code is refused.
    """

    def __init__(self, folder, keep, settings, world):
        self.folder, self.keep, self.settings, self.world = folder, keep, settings, world
        self.last = None  # the name of the one last written or read

    def save(self, state):
        """Writes the state, by process 0. All must call it, after the same step.

        Where that fails, as on a full disk, it says so; the older ones stay. Returns whether this
        process has nothing to say.
        """
        found = {"settings": self.settings, **state.state_dict()}
        name = f"step-{state.step:09}-epochs-{state.epochs_done:04}.pt"
        if self.world.rank or name == self.last:
            return True
        try:
            write(self.folder / name, packed(found))
        except OSError as error:
            say(f"not saved: {error}; the last checkpoint stays")
            return False
        self.last = name
        for path in [*self.files()[: -self.keep], *self.folder.glob("*.part")]:
            path.unlink(missing_ok=True)
        return True

    def files(self):
        """The oldest first: their names sort so."""
        return sorted(self.folder.glob("step-*.pt"))

    def save_weights(self, model):
        """Writes best.pt: the weights alone, by process 0."""
        try:
            if self.world.rank == 0:
                write(self.folder / "best.pt", packed(model.state_dict()))
        except OSError as error:
            say(f"not saved: {error}; an older best.pt stays")

    def load_newest(self, state):
        """Loads the newest checkpoint that is whole; returns its name, None where there is none.

        Raises UserError where none is whole, or where it is of a run with other settings.
        """
        answer = [None]
        try:
            if self.world.rank == 0:
                answer = [self.newest()]
        except UserError as error:
            answer = [error]
        dist.broadcast_object_list(answer, src=0)  # all raise the error, or read the same file
        if isinstance(answer[0], UserError):
            raise answer[0]
        self.last = answer[0]
        if self.last:
            state.load_state_dict(self.read(self.folder / self.last))
        return self.last

    def newest(self):
        """The name of the newest that is whole. Damaged ones are named, and put out of the way."""
        damaged = []
        for path in reversed(self.files()):
            try:
                self.read(path)
            except DamagedFile as error:
                say(f"not used: {error}")
                damaged.append(path)
                continue
            for other in damaged:
                other.replace(other.with_suffix(".damaged"))
            return path.name
        if damaged:
            raise UserError(f"--out {self.folder}: no checkpoint there is whole, name a new folder")
        return None

    def read(self, path):
        """What a file holds. Raises DamagedFile, or UserError where it is of other settings."""
        found = read(path)
        if not isinstance(found, dict) or "settings" not in found:
            raise DamagedFile(f"{path}: not a checkpoint")
        was = found["settings"]
        differing = [
            f"{name.replace('_', '-')} (was {was.get(name)})"
            for name, value in self.settings.items()
            if was.get(name) != value
        ]
        if differing:
            other = f"began with other settings: --{', --'.join(differing)}"
            raise UserError(f"--out {self.folder}: the run there {other}; name a new folder")
        return found


class DamagedFile(UserError):
    """A file that does not hold what was written."""


def packed(what):
    """As torch.save writes it, in memory."""
    file = io.BytesIO()
    torch.save(what, file)
    return file.getbuffer()


def read(path):
    """A file of torch.save's: tensors, numbers and names alone. Raises OSError, DamagedFile."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # compares the checksum of each part
        if damaged:
            raise DamagedFile(f"{path}: {damaged} is damaged")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (DamagedFile, OSError):
        raise
    except pickle.UnpicklingError as error:
        raise DamagedFile(f"{path}: holds more than tensors: {first_line(error)}") from None
    except Exception as error:  # anything can come of a damaged file
        raise DamagedFile(f"{path}: damaged: {first_line(error)}") from None


def load_weights(model, path):
    """Starts from the weights of a file: best.pt, or a state_dict of torchvision's for this model.

    A head for other classes is left as it is, and that is said. Raises OSError, UserError.
    """
    found, own = read(path), model.state_dict()
    if not isinstance(found, dict) or not found.keys() <= own.keys():
        raise UserError(f"--weights {path}: not the weights of {type(model).__name__}")
    fitting = {name: tensor for name, tensor in found.items() if tensor.shape == own[name].shape}
    if left := own.keys() - fitting.keys():
        say(f"--weights {path}: has no {', '.join(sorted(left))} of this shape: these stay random")
    model.load_state_dict({**own, **fitting})


def write(path, data):
    """Writes the whole file or nothing, also if the machine stops meanwhile. Raises OSError."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # its new name, too
        os.close(folder)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def lock(folder):
    """Keeps a second run out of a folder until this process ends. Raises UserError.

    It waits a minute: a run that was stopped may still be saving.
    """
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)  # never closed
    for _ in range(60):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            time.sleep(1)
        except OSError as error:
            say(f"--out {folder}: no locks there ({error}): see to it that no second run has it")
            return
    raise UserError(f"--out {folder}: another run writes there, name another folder")


# The command line


def log(args, world, event, /, **fields):
    """By process 0: prints a line for people, and appends one of JSON to log.jsonl."""
    if world.rank:
        return
    shown = (f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items())
    record = {"event": event, "time": time.time()}
    for name, value in fields.items():  # JSON has no nan
        broken = isinstance(value, float) and not math.isfinite(value)
        record[name] = None if broken else value
    try:
        print(event, *shown, flush=True)
        line = (json.dumps(record, default=str) + "\n").encode()
        with open(args.out / "log.jsonl", "ab", buffering=0) as file:
            end = file.tell()
            if file.write(line) < len(line):
                file.truncate(end)  # else the next line would be a part of this one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:  # a full disk ends no training
        say(f"not logged: {error}")


def say(text):
    """What people should know, on stderr, whole: print() writes a line's end by itself where
    Python is told not to buffer, and lines of several processes would run into each other.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")


def first_line(error):
    return str(error).strip().partition("\n")[0] or type(error).__name__


def as_toml(args):
    """The flags, for --config."""
    lines = []
    for name, value in vars(args).items():
        if value is None or name in ("config", "set"):
            continue
        if isinstance(value, bool):
            text = str(value).lower()
        else:
            number = isinstance(value, int | float)
            text = value if number else json.dumps(str(value), ensure_ascii=False)
        lines.append(f"{name} = {text}\n")
    return "".join(lines)


def flags_of(settings):
    """Settings by name as words of a command line, so that the same checks apply to them."""
    words = []
    for name, value in settings.items():
        flag, text = f"--{name.replace('_', '-')}", str(value)
        if text.lower() == "true":
            words.append(flag)
        elif text.lower() != "false":
            words.append(f"{flag}={text}")
    return words


def number(least, most=10**9, kind=int):
    """A type for argparse: a number from least to most."""

    def check(text):
        value = kind(text)
        if not least <= value <= most:  # this refuses nan, too
            raise argparse.ArgumentTypeError(f"{text}: give a number from {least} to {most}")
        return value

    check.__name__ = kind.__name__  # argparse says: invalid int value
    return check


def classifier(text):
    """A type for argparse: the name of a model in torchvision that returns logits."""
    # googlenet and inception return more than that in training.
    if text not in models.list_models(models, exclude=["googlenet", "inception*"]):
        raise argparse.ArgumentTypeError(f"{text}: torchvision has no such model to classify with")
    return text


def make_parser():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,  # so that an error is one line
    )
    real = functools.partial(number, kind=float)
    add = parser.add_argument
    add("set", nargs="*", metavar="NAME=VALUE", help="A flag without dashes; beats --config.")
    add("--config", type=Path, help="Flags from a TOML file, without dashes. [none]")
    add("--data", type=Path, required=True, help="Folder with train/ and val/.")
    add("--out", type=Path, default=Path("out"), help="Folder of the run; all nodes see it. [out]")
    add("--arch", type=classifier, default="resnet50", help="Model of torchvision. [%(default)s]")
    add("--weights", type=Path, help="Start from the weights in this file. [random ones]")
    add("--evaluate", action="store_true", help="Only evaluate --weights, or best.pt of --out.")
    add("--epochs", type=number(1), default=90, help="Passes over all images. [%(default)s]")
    add("--max-steps", type=number(1), help="Save and stop after so many steps. [never]")
    add("--batch-size", type=number(2), default=256, help="Images a step, in all. [%(default)s]")
    add("--accumulate", type=number(1), default=1, help="Pieces of each share, for memory. [1]")
    add("--lr", type=real(1e-9, 1e9), default=0.1, help="Highest learning rate. [%(default)s]")
    add("--scale-lr", action="store_true", help="Multiply it by (batch size / 256).")
    add("--warmup-epochs", type=real(0), default=5.0, help="It grows for so long. [%(default)s]")
    kinds = ["cosine", "steps", "constant"]
    add("--schedule", choices=kinds, default="cosine", help="How it falls then. [%(default)s]")
    add("--decay-epochs", type=number(1), default=30, help="For --schedule steps. [%(default)s]")
    add("--weight-decay", type=real(0), default=1e-4, help="Of weights. [%(default)s]")
    add("--norm-bias-weight-decay", type=real(0), help="Of norms and biases. [as the others]")
    add("--label-smoothing", type=real(0, 1), default=0.0, help="Share of it. [%(default)s]")
    add("--clip-grad", type=real(0), default=0.0, help="Largest norm of the gradient. [none]")
    add(
        "--model-ema-decay",
        type=real(0, 1),
        default=0.0,
        help="Decay of averaged weights. [no average]",
    )
    add("--sync-bn", action="store_true", help="BatchNorm over all processes; needs GPUs.")
    kinds = ["fp32", "tf32", "bf16", "fp16"]
    add("--precision", choices=kinds, default="fp32", help="bf16, fp16: by autocast. [%(default)s]")
    add("--channels-last", action="store_true", help="Memory layout, faster in half precision.")
    add("--compile", action="store_true", help="Compile the model.")
    add("--image-size", type=number(1, 4096), default=224, help="Pixels a side. [%(default)s]")
    add(
        "--crop-pct",
        type=real(0.1, 1),
        default=0.875,
        help="Side of a test image used. [%(default)s]",
    )
    add("--least-area", type=real(0.01, 1), default=0.08, help="Of random crops. [%(default)s]")
    kinds = ["none", "rand", "trivial"]
    add("--augment", choices=kinds, default="none", help="RandAugment, TrivialAugment. [none]")
    kinds = ["fail", "skip"]
    add("--bad-images", choices=kinds, default="fail", help="What to do at one. [%(default)s]")
    kinds = ["torch", "dali"]
    add("--loader", choices=kinds, default="torch", help="What decodes images. [%(default)s]")
    add("--workers", type=number(0, 999), help="Decoders a node. [its cores]")
    add("--bench-data", type=real(0), default=0.0, help="Only time loader and device, so long.")
    add("--seed", type=number(0), default=0, help="Seed of all random numbers. [%(default)s]")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU. [auto]")
    add("--log-every", type=number(1), default=50, help="Steps between two lines. [%(default)s]")
    add("--save-every", type=number(0), default=0, help="Steps; 0: after epochs alone. [0]")
    add("--keep", type=number(1), default=3, help="Checkpoints that are kept. [%(default)s]")
    add("--hang-timeout", type=number(1), default=600, help="Seconds without a step. [600]")
    return parser


def parse_args(words):
    """The flags: those typed beat NAME=VALUE, which beats --config."""
    parser = make_parser()
    first, _ = parser.parse_known_intermixed_args([*words, "--data=."])  # it may be in the file
    settings = {}
    if first.config:
        try:
            settings = tomllib.loads(first.config.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"argument --config: {first.config}: {error}")
    pairs = (text.partition("=") for text in first.set)
    settings |= {name.replace("-", "_"): value for name, _, value in pairs}
    if unknown := settings.keys() - vars(first).keys():
        parser.error(f"unrecognized arguments: {min(unknown)}")
    args = parser.parse_intermixed_args([*flags_of(settings), *words])
    if args.loader == "dali" and args.augment != "none":
        parser.error("argument --augment: --loader dali has none")
    if args.loader == "dali" and args.bad_images != "fail":
        parser.error("argument --bad-images: --loader dali skips none")
    if args.warmup_epochs >= args.epochs:
        parser.error(f"argument --warmup-epochs: give less than the {args.epochs} epochs")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with open(args.out / "log.jsonl", "a"):
            pass
    except OSError as error:
        parser.error(f"argument --out: {args.out}: {error.strerror}")
    try:  # tensors that have a shape but no numbers: this takes no time
        with torch.device("meta"):
            images = torch.empty(1, 3, args.image_size, args.image_size)
            models.get_model(args.arch).eval()(images)
    except NotImplementedError:
        pass  # a regnet cannot be made without numbers
    except (AssertionError, RuntimeError) as error:
        size = f"{args.image_size}: {args.arch} refuses it: {first_line(error)}"
        parser.error(f"argument --image-size: {size}")
    return args


def end_workers():
    """Ends the loaders' workers, which heed no kinder signal; else Python waits for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's own complains of each
    for worker in multiprocessing.active_children():
        worker.kill()


def run(args):
    """main(), with a line in place of a traceback for errors that the user can fix."""
    atexit.register(end_workers)
    try:
        main(args)
    except (OSError, UserError) as error:
        # An error in a loader's worker comes with its traceback. The last line says what it was.
        line = str(error).strip().split("\n")[-1]
        say(f"{Path(__file__).name}: {line}")
        sys.exit(2)


if __name__ == "__main__":
    run(parse_args(sys.argv[1:]))
