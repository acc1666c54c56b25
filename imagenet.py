"""Train an ImageNet classifier on one device or many, under any launcher, despite interruptions.

python imagenet.py --data FOLDER --out FOLDER
torchrun --standalone --nproc-per-node 4 imagenet.py --data FOLDER --out FOLDER
srun --kill-on-bad-exit --ntasks-per-node 4 --gpus-per-node 4 -c8 python imagenet.py ... (the same)

@FILE among the flags reads flags from a file. Started again with the same --out, the run resumes:
after the job's time limit, after a crash, on more devices or fewer. On SIGTERM, SIGHUP, SIGUSR1 it
saves and stops; exit code 75 then means "not finished". Start reading at main(). mnmc_ddp_launch.py
explains DDP; docs/howto/imagenet.md explains how to change the loss, the optimizer or the data set.
Left out on purpose: mixup and CutMix, which need soft labels; optimizers other than SGD.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import errno
import faulthandler
import fcntl
import functools
import hashlib
import io
import itertools
import json
import math
import multiprocessing.connection
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torchvision import datasets, models
from torchvision.io import decode_image
from torchvision.transforms import v2

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # of ImageNet's pixels, from 0 to 1
NO_IMAGE = -100  # the label of an unreadable file: cross_entropy ignores it
NOT_FINISHED = 75  # the exit code after a signal: start it again (EX_TEMPFAIL in sysexits.h)
SLOW = 10  # a phase that cannot report progress may take this many times --hang-timeout
# Save and stop: Slurm and torchrun, a time limit, a closed terminal, a limit of CPU time.
SIGNALS = [getattr(signal, name) for name in "SIGTERM SIGUSR1 SIGUSR2 SIGHUP SIGXCPU".split()]
MOST_SKIPPED = 0.05  # of the images: more are no few damaged files, but a failing disk
CRASHES = [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL]
CONNECT_SECONDS = 120  # all ranks have come, and connect to each other
LOCK_SECONDS = 120  # a dead machine's lock on NFS lasts up to 90 seconds
# Flags that may change when a run resumes. Other devices may need another --accumulate; it
# determines which images BatchNorm normalizes together.
MAY_CHANGE = """
    accumulate bad_images data device evaluate hang_timeout keep log_every max_steps out save_every
    weights workers
""".split()
MAY_DIFFER = "hang_timeout out weights workers".split()  # from rank to rank


class UserError(Exception):
    """An error that the user can fix. run() prints it as one line."""


# Errors of the system that a user can fix: a wrong path, no permission, a full disk. Others, such
# as EIO, are no mistake in the command: they have a traceback, and the same command may succeed.
FIXABLE = """
    ENOENT ENOTDIR EISDIR EEXIST EACCES EPERM EROFS ENOSPC EDQUOT ENAMETOOLONG ELOOP
""".split()


@contextlib.contextmanager
def user_error(what):
    """An OSError in this block that the user can fix becomes a UserError about `what`."""
    try:
        yield
    except OSError as error:
        if errno.errorcode.get(error.errno) not in FIXABLE:
            raise
        raise UserError(f"{what}: {error}") from None


def main(args):
    # 0. ranks and devices
    arm_hang_timer(args)
    stop = Stop()  # from now on it notes signals
    with user_error("--out"):
        args.out.mkdir(parents=True, exist_ok=True)
    arm_hang_timer(args, 2)
    world = setup_distributed(args.device, args.hang_timeout)
    arm_hang_timer(args)
    flags = {f"--{x.replace('_', '-')}": v for x, v in vars(args).items() if x not in MAY_DIFFER}
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__}
    compare(world, {**flags, **versions, Path(__file__).name: digest(__file__)})
    if args.precision == "bf16" and world.device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UserError("--precision bf16: this GPU has no bf16 (V100, T4), take fp16")
    if not args.evaluate:
        arm_hang_timer(args, SLOW)
        from_rank_0(world, lambda: lock(args.out))
    if args.workers is None:
        args.workers = cores_of_node(world)
    if args.warmup_epochs is None:
        args.warmup_epochs = 5.0 if args.epochs > 5 else args.epochs / 10
        if args.epochs <= 5 and world.rank == 0:
            say(f"--epochs {args.epochs}: --warmup-epochs is {args.warmup_epochs}, instead of 5")
    parts = world.size * args.accumulate
    micro_batch = args.batch_size // parts
    if args.batch_size % parts or micro_batch < 2:  # BatchNorm needs two
        message = f"give a multiple of {world.size} ranks x --accumulate {args.accumulate}"
        raise UserError(f"--batch-size {args.batch_size}: {message}, at least two images for each")
    torch.backends.cudnn.benchmark = True  # once per input shape, time cuDNN's algorithms
    if args.precision == "tf32":  # PyTorch allows it by default only in convolutions
        torch.backends.cuda.matmul.allow_tf32 = True

    # 1. data
    arm_hang_timer(args, SLOW)  # rank 0 lists the files, perhaps a million; the others wait
    train_set = from_rank_0(world, lambda: Photographs(args.data / "train", args, train=True))
    test_set = from_rank_0(world, lambda: Photographs(args.data / "val", args, train=False))
    arm_hang_timer(args)
    compare(world, train_set.sample() | test_set.sample())
    if train_set.classes != test_set.classes:
        raise UserError(f"--data {args.data}: train/ and val/ have different class folders")
    if args.batch_size > len(train_set):
        raise UserError(f"--batch-size {args.batch_size}: there are only {len(train_set)} images")
    sampler = ResumableSampler(len(train_set), args.batch_size, args.accumulate, args.seed, world)
    train_loader = make_loader(train_set, sampler, micro_batch, args.workers, world)
    shard = [(0, index) for index in range(world.rank, len(test_set), world.size)]
    test_loader = make_loader(test_set, shard, micro_batch, args.workers, world)

    # 2. model
    torch.manual_seed(args.seed)
    model = models.get_model(args.arch, num_classes=len(train_set.classes))
    weights = args.weights or (args.out / "best.pt" if args.evaluate else None)
    if weights:
        with user_error("--weights"):
            taken = load_weights(model, weights, whole=args.evaluate)
            compare(world, {"the file of --weights": digest(weights)})
        log(args, world, "weights", path=weights, tensors=taken, of=len(model.state_dict()))
    if args.sync_bn:
        if world.device.type == "cpu":
            raise UserError("--sync-bn: it needs GPUs")
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = model.to(world.device, memory_format=layout)

    # 3. train, or only evaluate
    if args.evaluate:
        result = evaluate(model, test_loader, stop, args, world)
        if not stop.agreed:  # else it covers only some of the images
            log(args, world, "eval", **result)
            if not math.isfinite(result["loss"]):
                raise UserError(f"{weights}: with these weights the loss is not finite")
    else:
        fit(model, train_loader, test_loader, stop, args, world)
    arm_hang_timer(args)
    if stop.agreed:
        stop.leave_slurm(world)
        return NOT_FINISHED
    return 0


def fit(model, train_loader, test_loader, stop, args, world):
    """Trains the remaining epochs, and evaluates after each."""
    ema = None  # an average of the weights over the last steps, often the better model
    if args.model_ema_decay:
        average = get_ema_multi_avg_fn(args.model_ema_decay)
        ema = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    # DDP rearranges its buckets after its first step. A resumed run would do that at another step,
    # and more than two ranks on a CPU would then add in another order. DDP keeps its buckets if it
    # looks for unused weights.
    keep_order = world.device.type == "cpu" and world.size > 2
    ddp_model = DistributedDataParallel(
        model, gradient_as_bucket_view=True, find_unused_parameters=keep_order
    )
    ddp_model.broadcast_buffers = False  # training reads no averages of BatchNorm
    if args.compile:
        ddp_model = torch.compile(ddp_model)
    optimizer = make_optimizer(model, args)
    scaler = torch.amp.GradScaler(world.device.type, enabled=args.precision == "fp16")
    torch.manual_seed(args.seed + world.rank)  # for dropout: else all ranks drop the same units

    state = State(model, ema, optimizer, scaler, world)
    settings = {name: str(value) for name, value in vars(args).items() if name not in MAY_CHANGE}
    settings["images"] = f"{len(train_loader.dataset)} {len(test_loader.dataset)}"
    settings["classes"] = " ".join(train_loader.dataset.classes)
    checkpoints = Checkpoints(args.out, args.keep, settings, world)
    arm_hang_timer(args)
    resumed = checkpoints.load_newest(state)
    about = {"launcher": world.launcher, "world_size": world.size, "resumed": resumed}
    about |= {"torch": torch.__version__, "images": len(train_loader.dataset)}
    about["classes"] = len(train_loader.dataset.classes)
    log(args, world, "start", **about, **vars(args))
    if world.rank == 0 and not resumed:
        with user_error(f"--out {args.out}/flags.txt"):
            (args.out / "flags.txt").write_bytes(os.fsencode(as_lines(args)))

    while state.epochs_done < args.epochs:
        train_epoch(ddp_model, state, train_loader, checkpoints, stop, args, world)
        # Save before the evaluation, which may take long: the next start then begins with it.
        arm_hang_timer(args)
        checkpoints.save(state)
        if stop.agreed or (args.max_steps and state.step >= args.max_steps):
            break
        result = evaluate(model, test_loader, stop, args, world)
        if ema and not stop.agreed:
            averaged = evaluate(ema.module, test_loader, stop, args, world)
            result |= {f"ema_{name}": averaged[name] for name in ("loss", "top1", "top5")}
        if stop.agreed:  # then these numbers cover only some of the images
            break
        state.epochs_done += 1
        log(args, world, "eval", epoch=state.epochs_done, **result)
        top1, loss = (result[f"ema_{name}" if ema else name] for name in ("top1", "loss"))
        if top1 > state.best_top1 and math.isfinite(loss):
            state.best_top1 = top1
            if world.rank == 0:
                checkpoints.put("best.pt", (ema.module if ema else model).state_dict())

    arm_hang_timer(args)
    saved = checkpoints.save(state)  # includes the last evaluation
    finished = state.epochs_done == args.epochs
    memory = torch.cuda.max_memory_allocated() / 2**20  # 0 on a CPU
    log(args, world, "end", step=state.step, finished=finished, gpu_peak_mib=memory)
    if not saved:
        raise UserError(f"--out {args.out}: the end of the training could not be saved")


def train_epoch(ddp_model, state, loader, checkpoints, stop, args, world):
    """Trains the rest of an epoch, or until a signal or --max-steps."""
    epoch, steps = state.epochs_done + 1, loader.sampler.steps
    loader.sampler.begin(epoch, state.step - state.epochs_done * steps)
    until = min(epoch * steps, args.max_steps or epoch * steps)
    ddp_model.train()
    batches = Batches(loader)
    meter, begun, first = Meter(world.device), time.perf_counter(), state.step
    while state.step < until:
        arm_hang_timer(args, SLOW if args.compile and state.step == first else 1)
        rate = learning_rate(args, state.step, steps)
        for group in state.optimizer.param_groups:
            group["lr"] = rate

        state.optimizer.zero_grad()
        for part in range(args.accumulate):
            images, labels = to_device(*meter.next(batches), args, world)
            # DDP averages the gradients over the ranks once, in the last part's backward().
            last = part == args.accumulate - 1
            with contextlib.nullcontext() if last else ddp_model.no_sync():
                with autocast(args, world):
                    logits = ddp_model(images)
                losses = losses_of(logits, labels, args.label_smoothing)
                # The mean is over all images, unreadable ones included: all ranks divide by the
                # same number, so DDP's average over the ranks is right.
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
            # fp16's scaler skips a step that has overflowed, and halves its scale, at first 65536.
            skipped = args.precision == "fp16" and state.scaler.get_scale() >= 1
            if not (math.isfinite(result["loss"]) or skipped):
                line = f"--lr {args.lr}: the loss is not finite in the steps up to {state.step}"
                raise UserError(f"{line}; try a lower one, or --clip-grad; older checkpoints stay")
            state.images += result["images"]
            state.unreadable += result["unreadable"]
            refuse_many(state.unreadable, state.images)
            meter = Meter(world.device)
        if stop.agreed:
            return
        if args.save_every and state.step % args.save_every == 0:
            arm_hang_timer(args)
            with meter.paused():
                checkpoints.save(state)


@torch.no_grad()
def evaluate(model, loader, stop, args, world):
    """Loss, top-1 and top-5 over all images, each counted once; a signal cuts it short."""
    arm_hang_timer(args)
    model.eval()
    batches = Batches(loader)
    for buffer in model.buffers():  # each rank has updated its own averages of BatchNorm
        dist.broadcast(buffer, src=0)
    meter = Meter(world.device)
    # Every rank takes as many turns as the rank with most images: agree() is a collective.
    most = math.ceil(len(loader.dataset) / world.size)
    for _ in range(math.ceil(most / loader.batch_size)):
        arm_hang_timer(args)
        batch = meter.next(batches)
        if batch:
            images, labels = to_device(*batch, args, world)
            with autocast(args, world):
                logits = model(images)
            meter.add(losses_of(logits, labels), logits, labels)
        stop.agree()
        if stop.agreed:
            break
    return meter.result()


def refuse_many(unreadable, images):
    """Raises UserError if too many were skipped; a small set may have some damaged files."""
    count = images + unreadable
    if unreadable >= 10 and unreadable > MOST_SKIPPED * count:
        line = f"{unreadable} of {count} images were skipped, more than {MOST_SKIPPED:.0%}"
        raise UserError(f"--bad-images skip: {line}; does --data still hold whole images?")


# Ranks and launchers


@dataclasses.dataclass(frozen=True)
class World:
    """All processes that train together, and which of them this is."""

    launcher: str
    rank: int
    local_rank: int
    size: int
    local_size: int  # the ranks on this machine
    device: torch.device


def setup_distributed(device="auto", seconds=600):
    """Joins the other ranks, within some seconds, whatever has started them. Raises UserError.

    The ranks of a single machine use only its loopback interface.
    """
    env = os.environ
    launcher, rank, local_rank, size, local_size = find_ranks()
    if launcher == "torchrun":
        # The kernel sends SIGTERM when torchrun dies: else the ranks would train on, unnoticed.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG (man 2 prctl)
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if launcher == "srun" and torch.cuda.device_count() == 1:
        local_rank = 0  # with --gpus-per-task 1 each process sees only its own GPU
    if cuda and local_rank >= torch.cuda.device_count():
        raise UserError(f"--device: no GPU for local rank {local_rank}, try --device cpu")
    here = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(here)
    if launcher == "srun" and size > 1:
        meet_in_slurm(size == local_size)
    if size == local_size:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        env.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif interface := interface_to(env.get("MASTER_ADDR", "")):
        # Gloo by itself takes the address of this machine's name, often a loopback address.
        env.setdefault("GLOO_SOCKET_IFNAME", interface)

    names = ["MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    settings = ", ".join(f"{name}={env.get(name, '')}" for name in names)
    line = f"rank {rank} of {size} on {socket.gethostname()} has not joined the others ({settings})"
    line += ": docs/howto/several-machines.md"

    def give_up():
        say(f"{Path(__file__).name}: {line}")
        os._exit(2)

    # All ranks are here when this begins, so who waits for long waits for one that has failed.
    timer = threading.Timer(CONNECT_SECONDS, give_up)
    # Without device_id, NCCL in PyTorch 2.15 takes GPU LOCAL_RANK, or under srun rank % GPUs.
    how = {"rank": rank, "world_size": size, "device_id": here if cuda else None}
    try:
        store = meet(launcher, rank, size, local_size, datetime.timedelta(seconds=seconds))
        timer.start()
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, **how)
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(f"{line}: {' '.join(str(error).split())}") from None
    finally:
        timer.cancel()
    return World(launcher, rank, local_rank, size, local_size, here)


def meet(launcher, rank, size, local_size, limit):
    """A store that all ranks have joined, at MASTER_ADDR:MASTER_PORT."""
    env, listens = os.environ, None
    if size == 1 and launcher != "torchrun":
        return dist.HashStore()  # in memory: one process needs no port
    serves = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = env.get("MASTER_ADDR", ""), int(env.get("MASTER_PORT", 0))
    if size == local_size and launcher != "torchrun":  # else it would listen on all addresses
        host = "127.0.0.1"
        listens = socket.create_server((host, port)).detach() if serves and port else None
    if not (host and port):
        raise UserError("MASTER_ADDR and MASTER_PORT: name rank 0's machine, and a free port there")
    how = {"is_master": serves, "master_listen_fd": listens, "timeout": limit}
    store = dist.TCPStore(host, port, **how)
    if launcher == "torchrun":
        store = part_of_this_start(store, rank, size)
    store.set(f"{rank} is here", "")
    try:
        store.wait([f"{other} is here" for other in range(size)])
    except dist.DistStoreError:
        missing = [k for k in range(size) if not store.check([f"{k} is here"])]
        raise RuntimeError(f"rank {missing[0]} did not start within {limit}") from None
    return store


# The variables in which launchers say: rank, local rank, world size, ranks on this machine.
VARIABLES = {
    "env": ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"],
    "mpirun": [f"OMPI_COMM_WORLD_{x}" for x in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")],
    "mpiexec": ["PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"],
}


def find_ranks():
    """From the environment: launcher, rank, local rank, world size, ranks on this machine."""
    env = os.environ
    in_step = "SLURM_STEP_NODELIST" in env  # not set in a batch script, which is one process
    for launcher, names in VARIABLES.items():
        # Before Slurm: mpirun starts a daemon by srun on each node. But srun may set PMI_RANK.
        if env.get(names[0]) and not (names[0] == "PMI_RANK" and in_step and names[1] not in env):
            launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else launcher
            return launcher, *ranks_in(names)
    if in_step and int(env["SLURM_STEP_NUM_TASKS"]) > 1:
        tasks = tasks_of_nodes(env["SLURM_STEP_TASKS_PER_NODE"])
        here = tasks[int(env["SLURM_NODEID"])]
        return "srun", int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]), sum(tasks), here
    return "srun" if in_step else "python", 0, 0, 1, 1


def ranks_in(names):
    """The numbers in four variables. Of a single process, those that are unset follow."""
    found = [os.environ.get(name, "") for name in names]
    if found[2] == "1":
        found = [text or default for text, default in zip(found, "0011", strict=True)]
    for k in (2, 0, 1, 3):
        if not found[k].isdecimal():
            line = f"{names[0]} is set, so {names[k]} must be a number, not {found[k]!r}"
            raise UserError(f"{line}: docs/howto/imagenet.md#launchers")
    rank, local_rank, size, local_size = map(int, found)
    if not (rank < size and local_rank < local_size <= size):
        raise UserError(f"{'/'.join(names)} = {'/'.join(found)}: no such rank")
    return rank, local_rank, size, local_size


def tasks_of_nodes(text):
    """The number of tasks on each node, from Slurm's short form: "2(x3),1" is [2, 2, 2, 1]."""
    tasks = []
    for part in text.split(","):
        count, _, nodes = part.rstrip(")").partition("(x")
        tasks += [int(count)] * int(nodes or 1)
    return tasks


def meet_in_slurm(here_only):
    """Sets MASTER_ADDR and MASTER_PORT if unset: the job step's first machine, and its own port."""
    env = os.environ
    if "MASTER_ADDR" not in env and not here_only:
        words = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        try:  # a container may have no scontrol
            env["MASTER_ADDR"] = subprocess.check_output(words, text=True, timeout=60).split()[0]
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(f"set MASTER_ADDR to the first node: {error}") from None
    job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
    env.setdefault("MASTER_PORT", str(20_000 + (job * 10 + step) % 10_000))


def interface_to(host):
    """The network interface that leads to a machine; None if it is not found, or is loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect((host, 9))  # UDP: this only chooses the route, and sends nothing
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = name.encode().ljust(256, b"\0")
                found = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR (man 7 netdevice)
                if socket.inet_ntoa(found[20:24]) == address and not address.startswith("127."):
                    return name
    return None


def part_of_this_start(store, rank, size):
    """A part of torchrun's store that belongs only to this start of all ranks.

    torchrun keeps its store when it restarts the ranks, with the addresses of the dead ones. It
    numbers its restarts, but each node numbers its own. So rank 0 makes up a name, and answers each
    rank that joins it; a dead rank 0 no longer answers.
    """
    me = os.urandom(16).hex()
    if rank == 0:
        store.set("leader", me)
        for other in range(1, size):
            name = store.get(f"{other} joins {me}").decode()
            store.set(f"{me} takes {name}", "")
        return dist.PrefixStore(me, store)
    while True:
        leader = store.get("leader").decode()
        store.set(f"{rank} joins {leader}", me)
        with contextlib.suppress(dist.DistStoreError):  # the second is over
            store.wait([f"{leader} takes {me}"], datetime.timedelta(seconds=1))
            return dist.PrefixStore(leader, store)


def from_rank_0(world, work):
    """Collective: rank 0 does the work; every rank returns its result, or raises its error."""
    answer = [None]
    if world.rank == 0:
        try:
            answer = [work()]
        except (OSError, UserError) as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer.pop()  # a list that kept it would keep its traceback's variables alive
    return answer[0]


def compare(world, mine):
    """Ends all ranks if one has other values in a dictionary than rank 0. Collective."""
    every = [None] * world.size
    dist.all_gather_object(every, (socket.gethostname(), mine))
    (first_host, first), *others = every
    for rank, (host, found) in enumerate(others, 1):
        pairs = [(name, found.get(name), first.get(name)) for name in first | found]
        differ = [f"{name} {here}, not {there}" for name, here, there in pairs if here != there]
        if differ:
            who = f"rank {rank} (on {host}) differs from rank 0 (on {first_host})"
            raise UserError(f"{who}: {', '.join(differ[:5])}")


def digest(path):
    """A name for the content of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def cores_of_node(world):
    """The cores that the ranks on this machine may use together."""
    env, cores = os.environ, len(os.sched_getaffinity(0))
    limits = [cores_by_cgroup()]
    tasks = world.local_size if world.launcher == "srun" else 1  # that Slurm started here
    if tasks * cores <= os.cpu_count():  # Slurm has bound each task to cores of its own
        cores *= tasks
    if "SLURM_STEP_NODELIST" in env and "SLURM_CPUS_PER_TASK" in env:
        limits.append(tasks * int(env["SLURM_CPUS_PER_TASK"]))
    if "SLURM_CPUS_ON_NODE" in env:
        limits.append(int(env["SLURM_CPUS_ON_NODE"]))
    return max(1, int(min(cores, *limits)))


def cores_by_cgroup(root="/sys/fs/cgroup", groups="/proc/self/cgroup"):
    """The CPU quota of this process's control groups (v1 and v2), in cores; inf without one."""
    least = math.inf
    for line in Path(groups).read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            top, names = Path(root), ["cpu.max"]
        elif "cpu" in controllers.split(","):
            top, names = Path(root, "cpu"), ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file; "max": no limit
                quota, period = " ".join((top / folder / x).read_text() for x in names).split()
                if int(quota) > 0:  # version 1 writes -1 for no limit
                    least = min(least, int(quota) / int(period))
    return least


def arm_hang_timer(args, times=1):
    """Until the next call, this process has --hang-timeout seconds, `times` over. If they pass, it
    prints where it is, and ends.
    """
    faulthandler.dump_traceback_later(times * args.hang_timeout, exit=True)


class Stop:
    """Ends all ranks after the same step once one of them had one of SIGNALS."""

    def __init__(self):
        self.signal, self.agreed, self.exchange = 0, False, None
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.note)

    def note(self, number, frame):
        self.signal = number

    def agree(self):
        """Sets `agreed` on all ranks once one of them had a signal.

        Collective: every rank must call this. It reports the call before: that all-reduce ran while
        the step computed, so no rank waits for it.
        """
        if self.exchange:
            self.exchange.wait()
            self.agreed = self.agreed or bool(self.largest)
        self.largest = torch.tensor(self.signal)
        self.exchange = dist.all_reduce(self.largest, dist.ReduceOp.MAX, async_op=True)

    def leave_slurm(self, world):
        """In a Slurm job, makes Slurm start the job again. Collective.

        Slurm requeues a job that Slurm itself ends, after SIGTERM: then this waits for it. Before a
        job's time limit Slurm sends SIGUSR1 (--signal=USR1@60), or SIGUSR2 if it was told so: then
        this asks it to requeue.
        """
        self.exchange.wait()
        by_slurm = torch.tensor(0)
        if world.launcher == "srun" and self.largest == signal.SIGTERM:
            by_slurm += 1
        usr = self.largest in (signal.SIGUSR1, signal.SIGUSR2)
        if world.launcher == "srun" and world.rank == 0 and usr:
            words = ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]]
            try:
                done = subprocess.run(words, stdin=subprocess.DEVNULL, timeout=60)
                by_slurm += done.returncode == 0
            except (OSError, subprocess.SubprocessError) as error:
                say(f"not requeued: {error}")
        dist.all_reduce(by_slurm, dist.ReduceOp.MAX)
        if by_slurm:
            say("saved, and waiting for Slurm to end this job")
            faulthandler.cancel_dump_traceback_later()
            time.sleep(600)  # longer than Slurm waits before SIGKILL (KillWait)


# Images


class Photographs(Dataset):
    """A folder with one folder per class, as uint8 images (size, size, 3) and labels.

    Channels come last, as in the files: another order takes time. A key is (epoch, index). An
    image's random numbers follow from its key and the seed, on every rank and after every restart.
    """

    def __init__(self, folder, args, train):
        self.folder, self.size, self.seed = folder, args.image_size, args.seed
        self.skip, self.told = args.bad_images == "skip", set()
        if train:
            self.window = functools.partial(random_window, least_area=args.least_area)
        else:
            self.window = functools.partial(middle_window, share=args.crop_pct)
        kinds = {"none": None, "rand": v2.RandAugment(), "trivial": v2.TrivialAugmentWide()}
        self.augment = kinds[args.augment] if train else None
        with user_error("--data"):
            try:
                self.classes, samples = list_images(folder)
            except FileNotFoundError as error:
                line = f"--data {folder.parent}: {folder.name}/ has no class folders with images"
                cure = "docs/howto/imagenet.md says how to unpack and sort ImageNet"
                raise UserError(f"{line}: {first_line(error)} ({cure})") from None
        # Arrays: the decoding processes share their memory. Of a list of tuples each would make a
        # copy, since to read a Python object is to write its reference count.
        names = [path.removeprefix(f"{folder}/") for path, _ in samples]
        self.names = numpy.array([os.fsencode(name) for name in names])
        self.labels = numpy.array([label for _, label in samples])
        self.crashing = set()  # indices of images that have killed a worker
        # Of each worker: its pid, and the index that it decodes, or -1. make_loader shares it.
        self.decoding = torch.full((1, 2), -1)

    def __len__(self):
        return len(self.labels)

    def sample(self):
        """The digests of up to a hundred files, for compare(): another machine may have others."""
        some = range(0, len(self), math.ceil(len(self) / 100))
        with user_error("--data"):
            paths = [self.path(index) for index in some]
            return {os.path.relpath(path, self.folder.parent): digest(path) for path in paths}

    def path(self, index):
        return os.path.join(self.folder, os.fsdecode(self.names[index]))

    def __getitem__(self, key):
        path = self.path(key[1])
        # Any other error than the decoder's is the system's, and no reason to skip an image.
        with user_error("--data"), open(path, "rb") as file:
            data = file.read()
        worker = get_worker_info()
        row = self.decoding[worker.id if worker else 0].numpy()
        try:
            if key[1] in self.crashing:
                raise BadImage("it crashes the decoder")
            row[:] = os.getpid(), key[1]
            image = decode(data)
        except BadImage as error:
            line = f"{path}: damaged, or not an image"
            if not self.skip:
                raise UserError(f"{line} (--bad-images skip skips it): {error}") from None
            if path not in self.told:
                say(f"skipped: {line}: {error}")
            self.told.add(path)
            return torch.full((self.size, self.size, 3), 127, dtype=torch.uint8), NO_IMAGE
        except MemoryError as error:
            raise UserError(f"{path}: too little memory to decode it: {error}") from None
        finally:
            row[1] = -1
        dice = dice_of(self.seed, *key)
        top, left, height, width, flip = self.window(*image.shape[1:], dice)
        image = image[None, :, top : top + height, left : left + width]
        image = image.contiguous(memory_format=torch.channels_last)  # for a faster resize
        size = (self.size, self.size)
        image = F.interpolate(image, size, mode="bilinear", antialias=True)[0]
        image = image.flip(2) if flip else image
        if self.augment:
            with torch.random.fork_rng(devices=[]):  # leaves dropout's generator as it was
                torch.default_generator.manual_seed(seed_from(dice))
                image = self.augment(image)
        return image.permute(1, 2, 0), int(self.labels[key[1]])


def random_window(height, width, dice, least_area):
    """The part of an image to train on: top, left, height, width, and whether to flip it.

    It has the distribution of torchvision's RandomResizedCrop.
    """
    for _ in range(10):
        area = height * width * dice.uniform(least_area, 1)
        ratio = math.exp(dice.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            top = int(dice.random() * (height - high + 1))
            left = int(dice.random() * (width - wide + 1))
            break
    else:  # the largest part of the middle with such a ratio
        wide, high = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        top, left = (height - high) // 2, (width - wide) // 2
    return top, left, high, wide, dice.random() < 0.5


def middle_window(height, width, dice, share):
    """The same for evaluation: the middle square, `share` of the shorter side, never flipped."""
    side = max(1, round(share * min(height, width)))
    return (height - side) // 2, (width - side) // 2, side, side, False


def list_images(folder):
    """The classes, and (path, label) of each image, as in ImageFolder, but of nothing hidden.

    Jupyter leaves copies of images in .ipynb_checkpoints.
    """

    def is_image(path):
        hidden = "/." in path.removeprefix(str(folder))
        return not hidden and path.lower().endswith(datasets.folder.IMG_EXTENSIONS)

    classes = [x for x in datasets.folder.find_classes(folder)[0] if not x.startswith(".")]
    labels = {name: label for label, name in enumerate(classes)}
    return classes, datasets.folder.make_dataset(folder, labels, is_valid_file=is_image)


def dice_of(*numbers):
    """Random numbers that follow from these numbers.

    Python promises that random() is the same in all its versions; for hash() and randint() it does
    not.
    """
    return random.Random(" ".join(map(str, numbers)))


def seed_from(dice):
    """A seed for a generator of PyTorch's."""
    return int(dice.random() * 2**53)


def decode(data):
    """The bytes of an image file as uint8 (3, H, W); gray, CMYK and 16-bit files as well.

    Transparency is left out: the colors are those below it. Raises BadImage, or MemoryError.
    """
    if not data:
        raise BadImage("an empty file")
    try:
        image = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode="RGB")
    except RuntimeError as error:
        if "can't allocate memory" in str(error):
            raise MemoryError(first_line(error)) from None
        raise BadImage(first_line(error)) from None
    if image.ndim != 3:
        raise BadImage("an animation")
    return (image.int() >> 8).byte() if image.dtype == torch.uint16 else image


class BadImage(Exception):
    """A file that was read, and that the decoder refuses."""


class ResumableSampler:
    """This rank's keys of Photographs, (epoch, index), from any step of an epoch on.

    A step's global batch is the same for any number of ranks. The first of 4 parts has its images
    0, 4, 8 ..., whether a rank or --accumulate makes it. Images that fill no batch are dropped.
    """

    def __init__(self, count, batch, accumulate, seed, world):
        self.count, self.batch, self.seed = count, batch, seed
        self.steps = count // batch  # of a whole epoch
        self.parts = world.size * accumulate
        self.mine = range(world.rank, self.parts, world.size)
        self.begin(1, 0)

    def begin(self, epoch, step):
        """Sets where the next pass begins: the epoch, and the step in it."""
        self.epoch, self.first = epoch, step

    def __len__(self):
        return (self.steps - self.first) * len(self.mine) * (self.batch // self.parts)

    def __iter__(self):
        seed = seed_from(dice_of(self.seed, self.epoch))
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.count, generator=generator)
        for step in range(self.first, self.steps):
            batch = order[step * self.batch : (step + 1) * self.batch]
            for part in self.mine:
                for index in batch[part :: self.parts].tolist():
                    yield self.epoch, index


def make_loader(dataset, sampler, batch, workers, world):
    """Batches of uint8 images (batch, size, size, 3) and labels; workers: of all ranks here."""
    workers = math.ceil(workers / world.local_size)
    dataset.decoding = torch.full((max(workers, 1), 2), -1).share_memory_()
    try:  # workers send their batches through such a socket, in a folder below TMPDIR
        multiprocessing.connection.Listener(family="AF_UNIX").close()
    except OSError as error:
        line = f"TMPDIR {tempfile.gettempdir()}: no sockets there: {error}"
        raise UserError(f"{line}; set it to a folder with a short path, such as /tmp") from None
    return DataLoader(
        dataset,
        batch,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,  # the same processes in every epoch
        pin_memory=world.device.type == "cuda",
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # else each pass draws from dropout's generator
    )


class Batches:
    """A loader's batches; its workers start at once, if they do not run yet.

    If the decoder crashes, and with it a worker, the image counts as a bad one: with --bad-images
    skip, new workers go on with the same batch.
    """

    def __init__(self, loader):
        self.loader, self.done, self.crashes = loader, 0, 0
        self.start()

    def start(self):
        # Gives Gloo's threads time to come to rest. Before Python 3.11.10 a worker may hang if it
        # is forked while one of them releases a tensor:
        # https://github.com/python/cpython/issues/112275
        if sys.version_info < (3, 11, 10):
            time.sleep(0.1)
        keys, done = self.loader.sampler, self.done * self.loader.batch_size
        self.loader.batch_sampler.sampler = itertools.islice(keys, done, None) if done else keys
        self.batches = iter(self.loader)
        # torch's handler would raise an error anywhere, such as in a save; next() sees it as well.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.workers = multiprocessing.active_children()

    def __iter__(self):
        return self

    def __next__(self):
        while True:
            try:
                batch = next(self.batches)
                self.done += 1
                return batch
            except (RuntimeError, OSError, EOFError):  # perhaps because a worker is dead
                if not self.crashed():
                    raise
            for worker in self.workers:
                if worker.pid in self.loader.dataset.decoding[:, 0]:  # another loader has others
                    worker.kill()
            self.batches = self.loader._iterator = None  # this joins them
            self.start()

    def crashed(self):
        """Whether the decoder has killed a worker. Notes its image, or raises UserError."""
        multiprocessing.connection.wait([worker.sentinel for worker in self.workers], 5)
        images = self.loader.dataset
        decoding = dict(images.decoding.tolist())
        for worker in self.workers:
            index = decoding.get(worker.pid, -1)
            if index >= 0 and -(worker.exitcode or 0) in CRASHES:
                images.crashing.add(index)
                self.crashes += 1
                refuse_many(self.crashes, self.done * self.loader.batch_size)
                if images.skip:
                    return True
                line = f"{images.path(index)}: {signal.strsignal(-worker.exitcode)} in the decoder"
                raise UserError(f"{line} (--bad-images skip skips it)") from None
        return False


def ignore_signals(worker=None):
    """For a loader's workers: a signal goes to all, but training goes on for a step or two."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def to_device(images, labels, args, world):
    """The model's input: bytes are sent, a quarter of the traffic, and normalized on the device."""
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    images = images.to(world.device, non_blocking=True).permute(0, 3, 1, 2)
    images = images.contiguous(memory_format=layout)
    mean, scale = pixels(world.device)
    return (images - mean) * scale, labels.to(world.device, non_blocking=True)


@functools.cache
def pixels(device):
    """Mean, and one over the standard deviation, of pixels from 0 to 255, each (3, 1, 1)."""
    mean, std = (255 * torch.tensor(x, device=device).view(3, 1, 1) for x in (MEAN, STD))
    return mean, 1 / std


# Numbers


def make_optimizer(model, args):
    """SGD for a model that is on its device already."""
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]  # norms and biases
    others = [weight for weight in model.parameters() if weight.ndim > 1]
    decay = args.norm_bias_weight_decay
    groups = [
        {"params": others, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": args.weight_decay if decay is None else decay},
    ]
    optimizer = torch.optim.SGD(groups, args.lr, momentum=0.9, nesterov=True, fused=True)
    # If fp16's scaler skips the first step, fused SGD has allocated its momentum but not written
    # it. Zeros give the same first step as no momentum.
    for weight in model.parameters():
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


def learning_rate(args, step, steps):
    """The learning rate of a step, counted from 0; steps: of an epoch."""
    peak = args.lr * (args.batch_size / 256 if args.scale_lr else 1)
    warm, total = args.warmup_epochs * steps, args.epochs * steps
    if step < warm:
        return peak * (step + 1) / (warm + 1)
    if args.schedule == "cosine":  # half of one
        return peak * (1 + math.cos(math.pi * (step - warm) / (total - warm))) / 2
    if args.schedule == "steps":
        return peak * 0.1 ** (step // steps // args.decay_epochs)
    return peak


def autocast(args, world):
    """Computes in half precision where that is safe, if --precision asks for it."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.precision)
    return torch.autocast(world.device.type, kind, enabled=kind is not None)


def losses_of(logits, labels, smoothing=0.0):
    """The loss of each image, (N); 0 for unreadable ones."""
    return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)


class Meter:
    """Sums over images, kept on the device so that no step waits for it, and the time."""

    def __init__(self, device):
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        self.begun, self.waited = time.perf_counter(), 0.0

    def add(self, losses, logits, labels):
        """Adds a batch: the losses (N), the logits (N, classes), the labels (N)."""
        hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        hits &= losses.isfinite()[:, None]  # topk takes nan for the largest logit
        was_read = labels != NO_IMAGE
        values = [losses.detach(), hits[:, 0], hits.any(1), was_read, ~was_read]
        self.sums += torch.stack([value.double().sum() for value in values])

    @contextlib.contextmanager
    def paused(self):
        """Leaves a block out of the time. Collective."""
        self.totals()  # waits for the device: its work until here counts
        begun = time.perf_counter()
        yield
        dist.all_reduce(torch.zeros(1))  # else the others would wait for rank 0 in their next step
        self.begun += time.perf_counter() - begun

    def next(self, batches):
        """The next batch, or None. Counts the time until it is there."""
        asked = time.perf_counter()
        batch = next(batches, None)
        self.waited += time.perf_counter() - asked
        return batch

    def totals(self):
        """The sums over all ranks. Collective. Raises UserError if too many were skipped."""
        sums = self.sums.clone()
        dist.all_reduce(sums)
        totals = sums.tolist()  # waits for the device
        refuse_many(int(totals[4]), int(totals[3]))
        return totals

    def result(self):
        """Over all ranks, for a line of the log. Collective."""
        loss, top1, top5, images, unreadable = self.totals()
        times = torch.tensor([time.perf_counter() - self.begun, self.waited]).to(self.sums)
        dist.all_reduce(times, dist.ReduceOp.MAX)  # the slowest rank sets the pace
        seconds, waited = times.tolist()
        count = max(images, 1)
        means = {"loss": loss / count, "top1": top1 / count, "top5": top5 / count}
        counts = {"images": int(images), "unreadable": int(unreadable)}
        speed = {"images_per_second": (images + unreadable) / seconds, "seconds": seconds}
        return {**means, **counts, **speed, "data_seconds": waited}


# Checkpoints


class State:
    """All that a training has learned so far, and its position."""

    def __init__(self, model, ema, optimizer, scaler, world):
        self.model, self.ema, self.optimizer, self.scaler = model, ema, optimizer, scaler
        named = {"model": model, "ema": ema, "optimizer": optimizer, "scaler": scaler}
        self.modules = {name: module for name, module in named.items() if module is not None}
        self.world = world
        self.step = 0  # over all epochs: also the position in the current one
        self.epochs_done = 0  # trained and evaluated
        self.best_top1 = -1.0
        self.images = self.unreadable = 0  # trained on, and skipped, since this start

    def state_dict(self):
        """Only tensors, numbers and names. Collective."""
        mine = torch.get_rng_state()  # dropout's
        if self.world.device.type == "cuda":
            mine = torch.cat([mine, torch.cuda.get_rng_state()])
        random_states = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(random_states, mine)
        numbers = {name: getattr(self, name) for name in ("step", "epochs_done", "best_top1")}
        modules = {name: module.state_dict() for name, module in self.modules.items()}
        return {**modules, **numbers, "random_states": random_states}

    def load_state_dict(self, found):
        """Resumes from what state_dict() returned."""
        for name, module in self.modules.items():
            module.load_state_dict(found[name])
        for name in ("step", "epochs_done", "best_top1"):
            setattr(self, name, found[name])
        if len(found["random_states"]) == self.world.size:
            mine, size = found["random_states"][self.world.rank], len(torch.get_rng_state())
            torch.set_rng_state(mine[:size])
            if self.world.device.type == "cuda" and len(mine) > size:
                torch.cuda.set_rng_state(mine[size:])
        else:  # another number of ranks: dropout draws other numbers
            torch.manual_seed(seed_from(dice_of(torch.initial_seed(), self.step)))


class Checkpoints:
    """The newest states of a run, in a folder that all ranks see.

    step-000005004-epochs-0001.pt was written after 5,004 steps, with one epoch evaluated. A file
    that would run code when it is read is refused.
    """

    def __init__(self, folder, keep, settings, world):
        self.folder, self.keep, self.settings, self.world = folder, keep, settings, world
        self.last = None  # the name of the file last written or read

    def save(self, state):
        """Rank 0 writes the state, and removes old ones. Returns False on rank 0 if that failed.

        Collective: every rank must call this after the same step. A state that is not finite would
        take the place of a good one: all ranks raise UserError.
        """
        found = {"settings": self.settings, **state.state_dict()}
        finite = torch.stack([part.isfinite().all() for part in found["model"].values()]).all()
        if not from_rank_0(self.world, finite.item):
            raise UserError(f"step {state.step} is not saved: its weights are not finite")
        name = f"step-{state.step:09}-epochs-{state.epochs_done:04}.pt"
        if self.world.rank or name == self.last:
            return True
        if not self.put(name, found):
            return False
        self.last = name
        old = sorted(self.folder.glob("step-*.pt"))[: -self.keep]  # the names sort by age
        for path in [*old, *self.folder.glob("*.part")]:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                say(f"not removed: {error}")
        return True

    def put(self, name, content):
        """Writes a file; returns whether it could. If not, as on a full disk, older files stay."""
        try:
            write(self.folder / name, content)
            return True
        except OSError as error:
            say(f"not saved: {self.folder / name}: {error}; older files stay")
            return False

    def load_newest(self, state):
        """Loads the newest whole checkpoint; returns its name, or None. Collective."""
        self.last = from_rank_0(self.world, self.newest)
        if self.last:
            with user_error("--out: all machines must see it"):
                found = self.read(self.folder / self.last)
                compare(self.world, {self.last: digest(self.folder / self.last)})
            state.load_state_dict(found)
        return self.last

    def newest(self):
        """The name of the newest whole one. Damaged files are reported, and renamed."""
        damaged = []
        for path in sorted(self.folder.glob("step-*.pt"), reverse=True):
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
        """A file's content. Raises DamagedFile, or UserError if its settings differ."""
        found = read(path)
        if not isinstance(found, dict) or "settings" not in found:
            raise DamagedFile(f"{path}: not a checkpoint")
        defaults, differing = make_parser(), []
        for name, value in self.settings.items():
            # A flag that is newer than the file had its default.
            was = found["settings"].get(name, str(defaults.get_default(name)))
            if was != value:
                differing.append(f"--{name.replace('_', '-')} (was {was})")
        if differing:
            other = f"began with other settings: {', '.join(differing)}"
            raise UserError(f"--out {self.folder}: the run there {other}; name a new folder")
        return found


class DamagedFile(UserError):
    """A file that does not hold what was written."""


def read(path):
    """A file of torch.save's, only tensors, numbers and names. Raises OSError, DamagedFile."""
    try:
        with open(path, "rb") as file:  # by Python: torch.load refuses some names
            if zipfile.is_zipfile(file):  # PyTorch before 1.6 wrote another format
                if damaged := zipfile.ZipFile(file).testzip():  # compares checksums
                    raise DamagedFile(f"{path}: {damaged} is damaged")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except (DamagedFile, OSError):
        raise
    except Exception as error:  # a damaged file can cause any
        why = f"damaged, or holds more than tensors: {first_line(error)}"
        raise DamagedFile(f"{path}: {why}") from None


def load_weights(model, path, whole):
    """Loads best.pt, or a state_dict of torchvision's; returns how many tensors it took.

    whole: it must have all. Otherwise those of another shape, such as a head for other classes,
    stay random.
    """
    found = read(path)
    own, line = (
        model.state_dict(),
        f"--weights {path}: not the weights of this {type(model).__name__}",
    )
    if not isinstance(found, dict) or not all(isinstance(x, torch.Tensor) for x in found.values()):
        raise UserError(f"{line}: no dictionary of tensors")
    if more := sorted(found.keys() - own.keys()):
        raise UserError(f"{line}, which has no {more[0]}")
    fitting = {name: tensor for name, tensor in found.items() if tensor.shape == own[name].shape}
    left = [x for x in own if x not in fitting and not x.endswith("num_batches_tracked")]
    if left and (whole or not fitting):  # files before PyTorch 0.4.1 do not count batches
        raise UserError(
            f"{line}: {len(left)} tensors are missing or of another shape, as {left[0]}"
        )
    model.load_state_dict({**own, **fitting})
    return len(fitting)


def write(path, content):
    """torch.save of the whole file or nothing, even if the machine stops. Raises OSError."""
    file, part = io.BytesIO(), path.with_name(path.name + ".part")
    torch.save(content, file)
    try:
        with open(part, "wb") as disk:
            disk.write(file.getbuffer())
            disk.flush()
            os.fsync(disk.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        os.fsync(folder)  # the new name
    os.close(folder)


def lock(folder):
    """Keeps a second run out of a folder until this process ends. Raises UserError.

    It waits for LOCK_SECONDS: a stopped run may still be saving.
    """
    with user_error("--out"):
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)  # never closed
    for second in range(LOCK_SECONDS):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            other = os.pread(file, 99, 0).decode().strip() or "another run"
            if second == 0:
                say(f"--out {folder}: waiting up to {LOCK_SECONDS} s: {other} writes there")
            time.sleep(1)
        except OSError as error:
            say(f"--out {folder}: no locks there ({error}): make sure that no second run uses it")
            break
    else:
        raise UserError(f"--out {folder}: {other} writes there, name another folder")
    with contextlib.suppress(OSError):  # a full disk: then the other one is not named
        me = f"process {os.getpid()} on {socket.gethostname()}"
        os.pwrite(file, f"{me:99}".encode(), 0)


# The log and the command line


def log(args, world, event, /, **fields):
    """Rank 0 prints a line for people, and appends a line of JSON to log.jsonl."""
    if world.rank:
        return
    shown = (f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items())
    record = {"event": event, "time": time.time()}
    for name, value in fields.items():  # JSON has no nan
        broken = isinstance(value, float) and not math.isfinite(value)
        record[name] = None if broken else value
    try:
        print(event, *shown, flush=True)
    except OSError as error:  # such as a pipe that nobody reads, or a full disk
        say(f"not printed: {error}; {args.out}/log.jsonl goes on")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or exiting would fail
    try:
        line = (json.dumps(record, default=str) + "\n").encode()
        with open(args.out / "log.jsonl", "ab", buffering=0) as file:
            end = file.tell()
            if file.write(line) < len(line):
                file.truncate(end)  # else the next line would continue this one
                raise OSError("the disk is full")
    except OSError as error:  # a full disk does not end the training
        say(f"not logged: {args.out}/log.jsonl: {error}")


def say(text):
    """Writes a message to stderr at once, so that those of several processes stay apart."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: stderr is closed
        sys.stderr.write(f"{text}\n")  # print() may write the end of the line separately


def first_line(error):
    return str(error).strip().partition("\n")[0] or type(error).__name__


def as_lines(args):
    """The flags, one a line, for @FILE."""
    lines = []
    for name, value in vars(args).items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            lines.append(f"--{name}\n" if value else f"--no-{name}\n")
        elif value is not None:
            lines.append(f"--{name}={shlex.quote(str(value))}\n")
    return "".join(lines)


def number(least, most=10**9, kind=int):
    """A type for argparse: a number from least to most."""

    def number(text):
        value = kind(text)
        if not least <= value <= most:  # this refuses nan, too
            raise argparse.ArgumentTypeError(f"{text}: give a number from {least} to {most}")
        return value

    return number


def make_parser():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,  # so that an error is one line
        fromfile_prefix_chars="@",
    )
    # A line of an @FILE may hold several words, and a comment.
    parser.convert_arg_line_to_args = functools.partial(shlex.split, comments=True)
    add = parser.add_argument
    real = functools.partial(number, kind=float)
    switch = {"action": argparse.BooleanOptionalAction, "default": False}
    add("--data", type=Path, required=True, help="folder with train/ and val/")
    add("--out", type=Path, default=Path("out"), help="folder of the run; all nodes see it [out]")
    # googlenet and inception return more than logits in training.
    names = models.list_models(models, exclude=["googlenet", "inception*"])
    add("--arch", choices=names, metavar="NAME", default="resnet50", help="model [%(default)s]")
    add("--weights", type=Path, help="start from the weights in this file [random ones]")
    add("--evaluate", **switch, help="only evaluate --weights, or best.pt of --out")
    add("--epochs", type=number(1), default=90, help="passes over all images [%(default)s]")
    add("--max-steps", type=number(1), help="save and stop after this many steps [never]")
    add("--batch-size", type=number(2), default=256, help="images a step, global [%(default)s]")
    add("--accumulate", type=number(1), default=1, help="parts of each local batch [%(default)s]")
    add("--lr", type=real(1e-9, 1e9), default=0.1, help="highest learning rate [%(default)s]")
    add("--scale-lr", **switch, help="multiply --lr by batch size / 256")
    add("--warmup-epochs", type=real(0), help="in which it grows [5, or a tenth of 1 to 5 epochs]")
    kinds = ["cosine", "steps", "constant"]
    add("--schedule", choices=kinds, default="cosine", help="how it then falls [%(default)s]")
    add("--decay-epochs", type=number(1), default=30, help="for --schedule steps [%(default)s]")
    add("--weight-decay", type=real(0), default=1e-4, help="of weights [%(default)s]")
    add("--norm-bias-weight-decay", type=real(0), help="of norms and biases [--weight-decay]")
    add("--label-smoothing", type=real(0, 1), default=0.0, help="a fraction [%(default)s]")
    add("--clip-grad", type=real(0), default=0.0, help="largest norm of the gradient [none]")
    add("--model-ema-decay", type=real(0, 1), default=0.0, help="of averaged weights [no average]")
    add("--sync-bn", **switch, help="BatchNorm over all ranks; only on GPUs")
    kinds = ["fp32", "tf32", "bf16", "fp16"]
    add("--precision", choices=kinds, default="fp32", help="fp32: PyTorch's default [%(default)s]")
    add("--channels-last", **switch, help="memory layout, faster in half precision")
    add("--compile", **switch, help="compile the model")
    add("--image-size", type=number(1, 4096), default=224, help="pixels a side [%(default)s]")
    add("--crop-pct", type=real(0.1, 1), default=0.875, help="side evaluated, a fraction [0.875]")
    add("--least-area", type=real(0.01, 1), default=0.08, help="of random crops, a fraction [0.08]")
    kinds = ["none", "rand", "trivial"]
    add("--augment", choices=kinds, default="none", help="RandAugment, TrivialAugmentWide [none]")
    add("--bad-images", choices=["fail", "skip"], default="fail", help="end, or skip [fail]")
    add("--workers", type=number(0, 999), help="decoding processes of a node [its cores]")
    add("--seed", type=number(0), default=0, help="seed of all random numbers [%(default)s]")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU [auto]")
    add("--log-every", type=number(1), default=50, help="steps between two lines [%(default)s]")
    add("--save-every", type=number(0), default=0, help="steps; 0: only after epochs [%(default)s]")
    add("--keep", type=number(1), default=3, help="newest checkpoints to keep [%(default)s]")
    add("--hang-timeout", type=number(1), default=600, help="seconds without progress [600]")
    return parser


def parse_args(words):
    parser = make_parser()
    args = parser.parse_args(words)
    if args.warmup_epochs is not None and args.warmup_epochs >= args.epochs:
        parser.error(f"argument --warmup-epochs: give less than the {args.epochs} epochs")
    return args


def run(args):
    """main(), with one line instead of a traceback for errors that the user can fix."""
    if sys.stdout:  # a path need not be text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = main(args)
    except UserError as error:
        # An error in a loader's worker comes with its traceback. The last line names the cause.
        line = str(error).strip().split("\n")[-1].split("UserError: ")[-1]
        say(f"{Path(__file__).name}: {line}")
        code = 2
    finally:  # ends the loaders' workers, which ignore milder signals; Python would wait for them
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler complains about each
        for worker in multiprocessing.active_children():
            worker.kill()
    ignore_signals()  # nothing is left to save, and while Python exits a signal would be fatal
    # Here main()'s variables are gone, also those that the error kept, so Gloo's threads can end.
    # One that still works while Python exits aborts the process, with an exit code of its own.
    # But NCCL would wait for the other ranks, which may not come after an error.
    if dist.is_initialized() and not (code == 2 and torch.cuda.is_initialized()):
        dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    run(parse_args(sys.argv[1:]))
