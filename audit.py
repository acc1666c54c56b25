"""Finds silent mistakes of distributed training: runs a script on two ranks, for a few batches.

python audit.py train.py --its flags
python audit.py --ranks 4 --batches 16 -m package.train --its flags
srun --ntasks 2 python audit.py train.py --its flags    # under a launcher: rank 0 reports

The script needs no change. Its loaders end after --batches batches, and it ends after --passes
passes over the training data and two short ones, in which all ranks get equal samples. Each rank
records what it does: samples, inputs, checksums of weights and gradients, random states, its own
collectives, files, what it prints. This starts no collective, draws no random number, and only
reads tensors, so until the short passes all losses are what they are without it. Then the records
are compared:

ERROR: a promise of data-parallel training is broken, as the numbers show.
WARN: a mistake, unless you mean it.  HINT: worth knowing.  NOTE: what was not checked, and why.
Exit code: 1 if there is an ERROR (with --strict, or a WARN), 2 if audit.py was called wrongly,
otherwise 0.
"""

import argparse
import ast
import builtins
import contextlib
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

# Each kind of finding: its level, its name, its page in docs/diffs/, or section of
# mnmc_ddp_launch.md there, and what it is; then its cure. A new kind has an entry here; part 1
# records what it needs, in a function that watch_all() lists; and a function of part 2 yields the
# name, the line, and what was seen, and is listed in BETWEEN_RANKS or ALONE.
KINDS = """
ERROR|hang|10|The ranks wait for each other.
All must call the same collectives, also DDP's forward: look for a condition around these lines.
ERROR|crash|mnmc_ddp_launch|The script ended with an error. The rest was not checked.
Run the script by itself. If it names a GPU that is not here, give audit.py the flag --cpu.
ERROR|same samples|4|All ranks train on the same samples: more devices save no time.
DataLoader(..., sampler=DistributedSampler(dataset)). Without a loader: another seed on each rank.
ERROR|shared samples|4|Some samples are on several ranks, and so count several times.
DistributedSampler(dataset), with this rank's number and the number of all ranks.
ERROR|split samples|pipeline|The ranks hold parts of one model, but read different samples.
All ranks that share one model must read the same batches, in the same order.
ERROR|other data|4|The ranks' data sets differ, but their sampler takes them as equal.
Make the data set from the same seed, or from the same files in sorted order, on all ranks.
ERROR|one order|7|Epoch 2 has the order of epoch 1: the same samples meet again.
sampler.set_epoch(epoch), at the start of every epoch.
WARN|no shuffling|7|The training samples are not shuffled.
shuffle=True, for the sampler if there is one; with set_epoch(epoch) for a DistributedSampler.
ERROR|batches|uneven_inputs|The ranks have different numbers of batches: some will hang.
drop_last=True in sampler and loader, or torch.distributed.algorithms.Join.
ERROR|steps|uneven_inputs|The ranks take different numbers of optimizer steps.
Decide on all ranks alike whether to step: otherwise their weights cannot stay equal.
ERROR|weights|9|The ranks' weights differ: each trains a model of its own.
(by cause)
WARN|summed gradients|comm_hooks|The gradients are the sum over the ranks, not the mean.
Divide by the world size, unless each loss is already divided by the size of the global batch.
WARN|other gradients|ring_allreduce|The gradients are not the mean of those computed.
Compare what averages the gradients with dist.all_reduce(), for a single weight.
ERROR|other model|cpu_offload|The weights that compute the loss stay as they are.
Give the optimizer the model's own parameters. If it has copies, copy them back after each step.
ERROR|not finite|amp|A step made weights infinite or NaN, and so are all later losses.
Initialize all weights. Or a lower learning rate, clipped gradients; with float16, a GradScaler.
WARN|zero gradients|mnmc_ddp_launch|All gradients are zero: nothing is learned.
Look at the loss: cross_entropy() of a single output, say, is always 0.
WARN|sum of parts|grad_accum|The gradient is the sum over the parts of a batch, not the mean.
(loss / parts).backward(), or scale_grads=True for a pipeline's schedule.
ERROR|lost gradients|grad_accum|Each step uses the gradients of its last part only.
optimizer.zero_grad() once per step, before the loop over the parts.
HINT|rounded gradients|comm_hooks|The exchange rounds the gradients, as compression does.
Nothing, if you have chosen that. Otherwise look for a communication hook.
ERROR|summed weights|local_sgd|The ranks' weights are added up, but not divided.
weight /= dist.get_world_size(), after dist.all_reduce(weight).
ERROR|hyperparameters|custom_optimizer|The ranks' optimizers have different hyperparameters.
Give all ranks the same hyperparameters, by flags and by schedules.
WARN|unweighted batches|heterogeneous|Local batches of different sizes count equally.
(loss * len(labels) * world_size / global_batch_size).backward(), or batches of equal size.
WARN|equal summands|tensor_parallel_by_hand|A layer adds up the same tensor of all ranks.
Split the weights or inputs over the ranks before the sum; or leave the sum out.
WARN|forward only|syncbn|A layer adds up over the ranks, but in backward() nothing adds up.
torch.distributed.nn.functional.all_reduce(), or a Function whose backward is an all_reduce(), too.
WARN|other variance|syncbn|A BatchNorm's output has neither locally nor over all ranks variance 1.
Average mean(x) and mean(x²) over the ranks; the variance is mean(x²) - mean(x)².
WARN|ignored momentum|custom_optimizer|The optimizer has a momentum, but its steps ignore it.
buffer.mul_(momentum).add_(gradient), in each step; then use the buffer. Or give it no momentum.
WARN|left out|accelerate_ddp|A part of the training samples is on no rank.
One sampler that deals the samples: a DistributedSampler, or the library's, but not both.
ERROR|not cleared|cpu_offload|Each step also uses the gradients of the steps before.
optimizer.zero_grad(), once per step, since backward() adds to what is there.
WARN|same dropout|6|All ranks draw the same random numbers in forward, as for dropout.
torch.manual_seed(seed + rank), after the model is created.
WARN|same augmentation|8|All ranks augment with the same random numbers.
Use another seed on each rank; or draw for the global batch, and take draws[rank::world_size].
ERROR|other weights|parameter_server|The ranks evaluate different weights.
Evaluate where all ranks hold the same weights, or on one rank.
ERROR|other buffers|12|The ranks evaluate different buffers, such as BatchNorm's statistics.
for buffer in model.buffers(): dist.broadcast(buffer, src=0), before the evaluation.
ERROR|constant statistics|syncbn|BatchNorm's running statistics never change.
Update running_mean and running_var in the forward of training: the evaluation normalizes by them.
WARN|statistics twice|activation_checkpointing|A forward run again updates BatchNorm once more.
Restore the buffers after the second forward, or leave BatchNorm out of the checkpointed part.
WARN|wrong mean|distributed_eval|A result that rank 0 prints is not the mean over all samples.
Add up losses and samples over all batches and ranks (dist.all_reduce); divide once, at the end.
WARN|padding counted|pipeline|The loss of the evaluation counts samples that fill a batch.
logits[: len(labels)], before the loss.
ERROR|not added up|13|Each rank evaluates some samples, but nothing adds up the results.
dist.all_reduce() the sums of losses, hits and samples; then divide.
WARN|counted twice|5|All ranks evaluate the same samples, and then add up their results.
Give each rank its own samples: sampler=range(rank, len(dataset), world_size).
HINT|evaluated by all|5|Every rank evaluates all samples: more devices make it no faster.
sampler=range(rank, len(dataset), world_size); then all_reduce() the sums.
WARN|uneven evaluation|distributed_eval|The evaluation repeats some samples, or leaves some out.
sampler=range(rank, len(dataset), world_size): each sample exactly once.
HINT|padded evaluation|distributed_eval|A DistributedSampler repeats samples if they don't divide.
sampler=range(rank, len(dataset), world_size): each sample exactly once.
ERROR|one file|11|Several ranks write the same file, and can damage it.
if rank == 0: around it.
WARN|wrapped names|6|The names in the saved file begin with a wrapper's name.
Save the model that was wrapped: model.module.state_dict(). Only that can be loaded without it.
ERROR|old weights|pipeline_by_hand|A file has weights as they were before training.
Gather the weights from the ranks that train them, before rank 0 saves.
ERROR|one device|2|Several ranks use the same GPU, and share its memory and time.
torch.cuda.set_device(local_rank), before the first use of a GPU.
WARN|small batch|syncbn|BatchNorm normalizes by few samples, those of the local batch.
A larger local batch, or torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).
HINT|other batch|heterogeneous|The global batch is not what a flag says.
Let the local batches add up to the flag's number, or change its name.
HINT|local batch|3|The batch size is the local one: more ranks take larger, fewer steps.
Nothing, if the learning rate is for the global batch. Or divide the batch size by the world size.
HINT|group left|14|The script ends without destroy_process_group().
dist.destroy_process_group(), as the last line: with NCCL, PyTorch warns of leaked resources.
""".strip().split("\n")
KINDS = {
    head.split("|")[1]: (*head.split("|"), cure)
    for head, cure in zip(KINDS[::2], KINDS[1::2], strict=True)
}
HERE = os.path.abspath(__file__)
RANKS = "RANK SLURM_PROCID HOROVOD_RANK OMPI_COMM_WORLD_RANK PMI_RANK".split()  # by launcher
WORLDS = "WORLD_SIZE SLURM_STEP_NUM_TASKS HOROVOD_SIZE OMPI_COMM_WORLD_SIZE PMI_SIZE".split()
# Collectives, Horovod's too: those that can add up results, and others
SENDS = "send recv isend irecv batch_isend_irecv".split()
SUMS = "all_reduce allreduce allreduce_".split()
GATHERS = """reduce all_gather gather all_gather_into_tensor reduce_scatter_tensor allgather
all_gather_object gather_object allgather_object""".split()
SPREADS = """broadcast scatter broadcast_object_list barrier broadcast_parameters
broadcast_object""".split()
EXCHANGES = {*SUMS, *GATHERS, *SENDS}
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"}
LOSSES = """cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss binary_cross_entropy
binary_cross_entropy_with_logits""".split()
CHECKED = {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33}  # steps whose weights and gradients are compared
MOST = 200_000  # samples of a pass that are compared
LINGER = 10  # seconds that a rank waits for the others' records, once all have been told to stop
ROUND = 0.2  # seconds
# Times --hang that ranks may go on without a batch, a forward or a collective; that they may also
# stay at one place in Python; and that they may also not use the CPU
PATIENCE = 10, 3, 1
WRITERS = re.compile("(pathlib|numpy)($|[.])")  # modules that open files for a script
COLORS = {"ERROR": "1;31", "WARN": "33", "HINT": "36"}
NUMBER = re.compile(r"(?<![\w.])\d+\.(\d{2,})(?:e([-+]\d+))?(?![\w.])")
torch = dist = run = None  # run: the only Run of a process that is recorded; begin() sets them


# 1. What each rank records: the state, and helpers


class Record(dict):
    """A dict whose entries are attributes, too. JSON has it as a dict."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


# The entries of a rank's record that part 2 compares. Checksums are numbers, or None of what is not
# compared; of a shard, they say which part it is.
# passes       over a loader: indices, rows (checksums of samples) and inputs (of models), by batch;
#              equal: of the two short passes; work: backwards and steps; evals: forwards of
#              evaluations; dealt: by a DistributedSampler; part, contents, name: of the data set;
#              total: samples to be dealt; fills: how many a rank may repeat, to have as many as the
#              others; line, made: where it is read, and where the loader was made; ahead: whether
#              the script uses a batch when the next ones are loaded; used: batches so far
# steps        before, after, grads: a checksum for each weight; few: of a small weight, the numbers
#              before and after the step. zero: whether all gradients are. Of one small weight with
#              a gradient: final, which the optimizer gets; local, the sum of what this rank has
#              computed since the last step, and since something cleared it; parts, how many
#              backward() that were; plain, whether each began at a mean; weight, its numbers before
#              and after. done: training passes before it; cleared: not the last step's gradients
#              too; late: weights frozen when DDP was made; norms: of each BatchNorm, its count,
#              forwards, and repeated forwards;
#              at: the lines of the last forward, backward() and zero_grad()
# evaluations  checksums of weights and buffers by name; done, step: where in the training; trained:
#              whether it is the model that is trained
# collectives  that the script calls; sum, numbers, bias: what it adds up; computed: whether there
#              are gradients for the next step; trims: whether repeated samples are left out; norm:
#              whether it is a BatchNorm's
# losses       of evaluations, by where: the step, the line, the pass; then [mean, samples] of each
# printed      numbers after these: the step, the text, how many losses there were
# normalized   of BatchNorms with statistics of their own: the means of input and output
def empty_record():
    lists = "passes steps evaluations collectives files loose losses printed normalized".split()
    return Record({name: [] for name in lists}, kinds={}, faults={}, flags={}, model=Record())


class Run:
    """What this process is doing. Its record is what is written at the end, and compared."""

    def __init__(self, settings):
        self.settings, self.folder = settings, Path(settings.folder)
        script = settings.script or "x"
        self.root = os.path.join(os.path.dirname(os.path.abspath(script)), "")
        self.rank = next((int(os.environ[name]) for name in RANKS if name in os.environ), None)
        self.joins = self.rank is not None  # a rank, or a process that is becoming one
        self.seen = 0  # signs of progress
        self.loads = False  # whether it waits for a loader, and not for other ranks
        self.waiting = None  # the collective that this rank is in
        self.modules = []  # whose forward is running, outermost first
        self.opening = self.current = None  # pass that is being started; of the last batch
        self.unused = None  # pass whose last batch was not used yet
        self.ending = None  # one that has ended so
        self.trained, self.done = set(), 0  # loaders of training passes; how many have ended
        self.inputs_due = True  # to be recorded with the next forward
        self.evaluated, self.noted = set(), Counter()  # models, since the last training; each, ever
        self.step = self.nested = self.loose = 0  # optimizer steps; steps in steps; without loader
        self.early = -1  # the number of a step in its pass, from 0 on
        self.forwards, self.sync = 0, True  # of DDP, since the last step; whether it averages
        self.frozen = {}  # weights that were frozen when DDP was made, and their names
        self.drawn = None  # the random state before the outermost forward in training
        self.dropout = False  # whether one has drawn random numbers
        self.backwards, self.caller = 0, None  # that are running; where the last one was called
        self.at = {}  # the lines of the last forward of a model, backward() and zero_grad()
        self.probes = {}  # of each optimizer
        self.model_weight = None  # the smallest one of the model that computes the loss
        self.linear = None  # weak references to the last linear layer with a bias, and its output
        self.shared = None  # the BatchNorm whose statistics the script itself has exchanged last
        self.norms = {}  # each BatchNorm, its forwards, and those that backward() runs again
        self.equal = False  # from the first pass on in which all ranks get equal samples
        self.cut = False  # whether the loader that was asked last ended before its time
        self.short = False  # whether the last training pass ended before its time
        self.ended = threading.Lock()  # taken by the first who writes the record
        self.record = empty_record()

    def work(self):
        """Counts a backward or a step: a pass with some is a training pass. From the first one on,
        a script that has joined no group is one for one device, and one of its copies is enough.
        """
        self.seen += 1
        watch_horovod()
        self.join()
        if self.rank and not (self.record.get("group") or "horovod.torch" in sys.modules):
            self.enough()
        if self.current:
            self.current.work += 1

    def join(self):
        """Notes the process group, once there is one. init_device_mesh() makes one, too."""
        if "group" not in self.record and dist.is_available() and dist.is_initialized():
            self.rank, self.joins = dist.get_rank(), True
            self.record |= {"group": True, "world": dist.get_world_size()}

    def enough(self):
        """Ends the script: all has been seen."""
        self.record.cut = True
        raise SystemExit(0)


def own_error(error):
    """An error of the audit itself, in words."""
    at = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == HERE]
    return f"line {at[-1]} of audit.py failed: {type(error).__name__}: {error}"[:200]


def attempt(function, *args, **options):
    """Calls what only records: an error in it is the audit's, and never the script's. SystemExit is
    no such error: enough() ends the script by it.
    """
    try:
        return function(*args, **options)
    except StopIteration as end:  # a watcher has done its second half
        return end.value
    except Exception as error:
        run.record.faults[own_error(error)] = True
        return None


def replace(owner, name, function):
    """The function comes instead of owner.name, which it gets as its first argument."""
    old = getattr(owner, name)
    new = functools.wraps(old)(lambda *args, **options: function(old, *args, **options))
    setattr(owner, name, new)
    replaced[id(old)] = new
    return new


CALLER = 4  # frames from a watcher's to the one that called what it watches


def watch(owner, name, watcher):
    """Watches calls of owner.name. The watcher is a generator: what is before its yield runs before
    the call, and the rest after it. The yield gives the result; what it returns comes instead,
    unless that is None.
    """

    def call(old, *args, **options):
        halves = attempt(watcher, *args, **options)
        if halves is None:  # it does not know these arguments
            return old(*args, **options)
        attempt(next, halves)
        try:
            result = old(*args, **options)
        except BaseException:
            halves.close()
            raise
        changed = attempt(halves.send, result)
        return result if changed is None else changed

    return replace(owner, name, call)


replaced = {}  # what came instead of functions, by their ids


def replace_imported(function):
    """Replaces what the user's modules got by `from torch.distributed import all_reduce`: a spawned
    process imports them first. function: what it runs; the names that a function of the script
    itself sees there are not those of a module.
    """
    modules = [m for m in sys.modules.values() if str(getattr(m, "__file__", "")) != HERE]
    names = [vars(m) for m in modules if str(getattr(m, "__file__", "")).startswith(run.root)]
    for space in [*names, getattr(function, "__globals__", {})]:
        for name, value in [*space.items()]:
            while id(value) in replaced:  # twice, with --cpu
                value = space[name] = replaced[id(value)]


def place(frame, number=None):
    """A frame's line, if it is in the user's own files."""
    name = os.path.abspath(frame.f_code.co_filename)
    own = name.startswith(run.root) and name != HERE
    if own and "site-packages" not in name and "<" not in name:  # <frozen os>, say
        return f"{os.path.relpath(name, run.root)}:{number or frame.f_lineno}"
    return None


def stack(frame=None):
    """The lines of the user's own files on a stack, the innermost one first."""
    frames = traceback.walk_stack(frame or sys._getframe())
    return (at for frame, _ in frames if (at := place(frame)))


def line(frame=None):
    """The innermost line of the user's own files on a stack; None without any."""
    return next(stack(frame), None)


def local(tensor):
    """This rank's part of a tensor: no checksum may start a collective."""
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.to_dense() if tensor.is_sparse else tensor  # an embedding's gradient


def part(tensor):
    """Which shard of a tensor this rank has, by the rank's place in the mesh; "" for the whole."""
    places = getattr(tensor, "placements", [])
    where = tensor.device_mesh.get_coordinate() if places else []
    return ",".join(str(n) for n, p in zip(where, places, strict=True) if not p.is_replicate())


def is_flat(weight):
    """Whether this is what FullyShardedDataParallel makes of a module's weights: a shard, and a
    plain tensor.
    """
    return getattr(weight, "_is_flat_param", False) or "Flat" in type(weight).__name__


def checksum(tensor):
    """Of a tensor's bytes; of a shard, behind what part it is. None of what is not compared."""
    if tensor is None or tensor.is_meta or is_flat(tensor):
        return None
    data = local(tensor).cpu().reshape(-1).contiguous().view(torch.uint8)
    number = zlib.crc32(data.numpy())
    return f"{where} {number}" if (where := part(tensor)) else number


def small(tensor):
    """A few numbers of a tensor; none of a shard elsewhere."""
    return local(tensor).flatten()[:512]


def rows(batch):
    """The checksum of each sample of a batch, by its first tensor with two dimensions or more."""
    found, todo = [], [batch]
    while todo:
        value = todo.pop(0)
        if isinstance(value, torch.Tensor) and value.dim() and not value.is_meta:
            found.append(local(value))
        elif isinstance(value, (list, tuple, Mapping)):  # a tokenizer's batch is no dict
            todo += value.values() if isinstance(value, Mapping) else value
    found.sort(key=lambda tensor: tensor.dim() < 2)  # stable
    return [checksum(row) for row in found[0].cpu()] if found else []


# 1a. Loaders


def identity(loader):
    """The same for a loader that is made anew in each epoch."""
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    return [type(loader.dataset).__name__, size, type(loader.sampler).__name__]


def unpack(dataset, indices):
    """The data set that a Subset of a data set is about, and what the indices are there."""
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        indices = [dataset.indices[i] if type(i) is int else i for i in indices]
        dataset = dataset.dataset
    return dataset, [i if isinstance(i, int) else str(i) for i in indices]


def contents(dataset):
    """The first items of all lists and tensors that a data set has, and the indices of a Subset. It
    is not asked for samples, since these may draw random numbers.
    """
    found = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        value = value.indices if hasattr(value, "indices") and hasattr(value, "dataset") else value
        if isinstance(value, (list, tuple)) or type(value).__name__ in ("Tensor", "ndarray"):
            with contextlib.suppress(IndexError):  # a tensor of a single number
                found[name] = f"{len(value)} {value[:8]}"
    return {name: text for name, text in found.items() if " at 0x" not in text}


def innermost(loader):
    """The sampler of single samples; a library may have put its own around it."""
    for name in ("batch_sampler", "sampler"):
        inner = getattr(loader, name, None)
        if inner is not None:
            return innermost(inner)
    return loader


def dealt(sampler):
    """Whether a DistributedSampler is somewhere in a loader or sampler."""
    inner = [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
    deals = isinstance(sampler, torch.utils.data.DistributedSampler)
    return deals or any(dealt(sampler) for sampler in inner if sampler is not None)


def open_pass(loader):
    """A new entry for a pass over a loader; ends the script if that were one too many.

    After --passes passes over the training data, two short ones tell whether the ranks share random
    numbers: all ranks get equal samples in them (on_index), so if the ranks' models also get equal
    inputs, though they change from pass to pass, augmentation is the same on all ranks.
    """
    settle()
    name, most, sampler = identity(loader), run.settings.passes, innermost(loader)
    last = next((entry for entry in reversed(run.record.passes) if entry.name == name), None)
    if last and last.work and not last.complete and torch.is_grad_enabled():
        run.ending = last  # the script took as many batches as it wanted, by next() or with a break
        settle()
    # Under no_grad(), it is an evaluation, also where the data set looks the same.
    equal = str(name) in run.trained and run.done >= most and torch.is_grad_enabled()
    if equal and run.done >= most + 2:
        run.enough()
    run.equal |= equal
    data, ends = unpack(loader.dataset, [0, -1] if hasattr(loader.dataset, "indices") else [])
    entry = Record(line=line(), name=name, contents=contents(data), part=ends, equal=equal)
    short = 2 if not last or last.complete else len(last.rows)
    entry |= {"limit": short if equal else run.settings.batches, "complete": False}
    entry |= {"sampler": type(sampler).__name__, "dealt": dealt(loader)}
    entry.made = getattr(loader, "made", None) or entry.line
    # Accelerate fills the last round with whole batches, where a DistributedSampler uses samples.
    even = type(loader.batch_sampler).__name__ == "BatchSamplerShard"
    entry |= {"fills": loader.batch_sampler.batch_size if even else 1, "ahead": False}
    entry.total = name[1]
    if isinstance(sampler, torch.utils.data.DistributedSampler):
        entry |= {"epoch": sampler.epoch, "total": len(sampler.dataset)}  # of a fold, say
    stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    entry |= {"indices": None if stream else [], "rows": [], "inputs": []}
    entry |= {"work": 0, "evals": 0, "used": 0}
    run.record.passes.append(entry)
    return entry


def note_indices(iterator, entry, index):
    index = index if isinstance(index, (list, tuple)) else [index]
    entry.indices.append(unpack(iterator._dataset, index)[1])


def on_loader(loader, *args, **options):
    yield
    loader.made = line()


def on_iterate(loader):
    run.opening = entry = open_pass(loader)
    iterator = yield  # with workers, this already asks for indices
    run.opening, iterator.entry = None, entry


def on_index(iterator):
    """Notes the indices of a batch, or replaces them by equal ones on all ranks."""
    index, entry = (yield), run.opening or getattr(iterator, "entry", None)
    if not entry or entry.indices is None:
        return None
    if entry.equal and isinstance(index, list) and index and type(index[0]) is int:
        # In the second batch, odd ranks get the samples in another order, to tell random numbers
        # by place from random numbers by sample.
        number, size = len(entry.indices), entry.name[1]
        index = [(number * len(index) + k) % size for k in range(len(index))]
        index = index[::-1] if number % 2 and run.rank % 2 else index
    note_indices(iterator, entry, index)
    return index


def next_batch(old, iterator):
    entry = getattr(iterator, "entry", None)
    if entry is not None and run.unused is entry and len(entry.rows) == 1:
        entry.ahead = True  # as Accelerate, timm and prefetchers do
    run.cut = entry is not None and len(entry.rows) == entry.limit
    try:
        if run.cut:
            raise StopIteration
        run.loads = True
        batch = old(iterator)
    except StopIteration:
        if entry is not None and not entry.complete:
            attempt(end_pass, iterator, entry)
        raise
    finally:
        run.loads = False
    if entry is not None:
        attempt(note_batch, entry, batch)
    return batch


def note_batch(entry, batch):
    entry.rows.append([])
    entry.inputs.append([])
    run.current, run.inputs_due, run.unused = entry, True, entry
    run.seen += 1
    entry.rows[-1] = rows(batch)


def end_pass(iterator, entry):
    entry.complete = True
    if entry.indices and not entry.equal:
        for index in iterator._sampler_iter:  # the rest of the pass, without loading it
            note_indices(iterator, entry, index)
            if len(entry.indices) * len(entry.indices[0]) > MOST:
                break
    run.ending = entry
    if not entry.ahead:
        settle()


def settle():
    """What is to be done at the end of a pass, once its last batch has been used."""
    entry, run.ending = run.ending, None
    if entry is None:
        return
    run.current = None
    if entry.work:
        run.short = len(entry.rows) == entry.limit != len(entry.indices or [])
        run.done += 1
        run.trained.add(str(entry.name))


# 1b. Gradients and steps


class Probe:
    """A small weight of an optimizer, and the gradients that this rank has computed for it.

    total: their sum since the last step; kept: since something cleared the gradient, which is what
    the optimizer gets. cleared: whether that was before the first backward(); None if none has
    begun. A gradient that stays as it was during a backward() will be overwritten by the script.
    """

    def __init__(self, weight):
        self.weight = weight
        self.restart()
        weight.register_hook(lambda gradient: attempt(self.add, gradient))

    def restart(self):
        """After a step."""
        self.total = self.kept = 0
        self.calls, self.cleared = [], None

    def add(self, gradient):
        new = small(gradient).double()
        self.total, self.kept = self.total + new, self.kept + new
        self.calls.append(run.caller if run.backwards else [str([*stack()]), False])

    def begin(self):
        """Before a backward(): looks at the gradient that is there already."""
        self.before = self.weight.grad
        empty = self.before is None or not local(self.before).any()
        self.cleared = bool(self.cleared or empty)
        self.kept = 0 * self.kept if empty else self.kept
        self.version = None if empty else self.before._version

    def end(self):
        if self.cleared is False and self.version == self.before._version:
            self.cleared = True


def on_backward(tensors, *args, **options):
    run.work()
    roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    root = getattr(roots[0], "grad_fn", getattr(roots[0], "node", None))
    is_mean = getattr(root, "_saved_reduction", 0) == 1 or type(root).__name__ == "MeanBackward0"
    lines, run.inputs_due = [*stack()], True
    run.caller, run.at["backward"] = [str(lines), is_mean], next(iter(lines), None)
    probes = [*run.probes.values()]
    for probe in probes:
        probe.begin()
    run.backwards += 1
    try:
        yield
    finally:
        run.backwards -= 1
    for probe in probes:
        probe.end()


def on_zero_grad(owner, *args, **options):
    run.at["zero_grad"] = line()
    yield


def size_of(weight):
    """To choose a small weight, but not one of a few numbers."""
    return weight.numel() < 8, weight.numel()


def weights_of(optimizer):
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def few(own):
    """The first numbers of a small weight."""
    own = [local(weight) for weight in own if not weight.is_meta]
    return small(min(own, key=size_of)).tolist() if own else []


def before_step(optimizer, args, options):
    run.nested += 1
    if run.nested == 1:  # else the optimizer within a ZeroRedundancyOptimizer, for example
        attempt(note_before, optimizer)


def after_step(optimizer, args, options):
    run.nested -= 1
    if run.nested == 0:
        attempt(note_after, optimizer)


def note_before(optimizer):
    run.work()
    most = run.settings.passes
    run.loose += run.current is None and not run.done
    if run.loose > run.settings.batches * most or run.done >= most + 2:
        run.enough()
    run.step += 1
    own = weights_of(optimizer)
    if any(weight is run.model_weight for weight in own):
        run.probes.pop("model", None)
    elif run.step == 1 and run.model_weight is not None:
        run.probes["model"] = Probe(run.model_weight)  # the optimizer has copies of the weights
    probes = [run.probes.get(name) for name in (id(optimizer), "model")]
    run.early = 0 if run.record.steps and run.record.steps[-1].done < run.done else run.early + 1
    entry = Record(step=run.step, line=line(), forwards=run.forwards, sync=run.sync, done=run.done)
    entry.cleared = not any(probe and probe.cleared is False for probe in probes)
    entry.at, run.at = run.at, {}
    trained = [id(weight) for weight in own if weight.grad is not None]
    entry.late = [run.frozen[number][1] for number in trained if number in run.frozen]
    if entry.late and run.equal:
        text = f"{entry.late[0]}, frozen when DDP was made, gets gradients later: give --passes"
        run.record.faults[f"{text} {run.settings.passes + 1}"] = True
    run.record.steps.append(entry)
    run.forwards = 0
    if (run.step in CHECKED or run.early < 2) and not run.equal:
        entry |= state_of(optimizer, own)
        if probes[0] and probes[0].calls and probes[0].weight.grad is not None:
            entry |= gradients_of(probes[0])


def state_of(optimizer, own):
    """What is compared before a step."""
    grads = [weight.grad for weight in own]
    entry = Record(sizes=[w.numel() for w in own], before=[checksum(w) for w in own])
    sums = [None if is_flat(weight) else checksum(weight.grad) for weight in own]
    entry |= {"grads": sums, "few": [few(own)]}
    entry.empty = all(grad is None for grad in grads)
    entry.zero = not any(local(grad).any() for grad in grads if grad is not None)
    if run.step == 1:
        flat = [None if w.is_meta else local(w).flatten() for w in own]
        same = [n for n, w in enumerate(flat) if w is not None and bool((w == w[:1]).all())]
        entry.constant = same
    values = optimizer.param_groups[0].items()
    values = {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in values}
    kinds = (int, float, str, tuple)
    entry.settings = {k: v for k, v in values.items() if isinstance(v, kinds)}
    entry.random = random_state()
    norms = run.norms.values()
    entry.norms = [[int(norm.num_batches_tracked), *counts] for norm, *counts in norms]
    if None in entry.before or any(map(part, own)):
        run.record.kinds["pipeline" if any(w.is_meta for w in own) else "shards"] = True
    if any(weight.is_cuda for weight in own):
        names = [socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")]
        run.record.device = [*names, next(str(w.device) for w in own if w.is_cuda)]
    return entry


def random_state():
    gpus = torch.cuda.is_initialized()
    return checksum(torch.cuda.get_rng_state() if gpus else torch.get_rng_state())


def gradients_of(probe):
    """What a rank has computed for a weight, and what the optimizer gets."""
    grad, calls = local(probe.weight.grad), probe.calls
    entry = {"final": small(grad).tolist(), "exact": grad.element_size() > 2}
    entry["local"] = [probe.total.tolist(), probe.kept.tolist()]
    entry["parts"] = max(Counter(lines for lines, _ in calls).values())
    entry["weight"] = [small(probe.weight).tolist()]
    return entry | {"plain": all(is_mean for _, is_mean in calls)}


def note_after(optimizer):
    own, entry, run.inputs_due = weights_of(optimizer), run.record.steps[-1], True
    if "before" in entry:
        entry.few.append(few(own))
        finite = [local(w).isfinite().all() for w in own if not w.is_meta]
        entry |= {"finite": bool(torch.stack(finite).all()), "dropout": run.dropout}
        entry.after = [checksum(weight) for weight in own]
        if "weight" in entry:
            entry.weight.append(small(run.probes[id(optimizer)].weight).tolist())
    settle()
    for name in (id(optimizer), "model"):
        if name in run.probes:
            run.probes[name].restart()
    with_grad = [w for w in own if w.grad is not None and w.requires_grad]
    if with_grad and id(optimizer) not in run.probes:
        # Not a bias before a BatchNorm, say, whose gradient is nothing but rounding.
        norms = [float(local(weight.grad).norm()) for weight in with_grad]
        large = [w for w, norm in zip(with_grad, norms, strict=True) if norm > 1e-4 * max(norms)]
        run.probes[id(optimizer)] = Probe(min(large or with_grad, key=size_of))


# 1c. Models, collectives, results, files


def on_compile(*args, **options):
    """Hooks don't go with compiled code, and compiling takes a minute."""
    run.record.faults["what torch.compile() makes of the model: it runs as it is"] = True
    torch.compiler.set_stance("force_eager")
    yield


def on_ddp(model, module, *args, **options):
    named = module.named_parameters()
    run.frozen = {id(weight): (weight, name) for name, weight in named if not weight.requires_grad}
    yield
    run.record.kinds["ddp"] = True
    run.record.wrapped = line()
    run.record.averaged = dist.get_process_group_ranks(model.process_group)


def on_ddp_forward(model, *args, **options):
    run.forwards += 1
    run.sync = model.require_backward_grad_sync
    yield


def on_kind(name, /, *args, **options):
    """Notes a kind of parallelism."""
    run.record.kinds[name] = True
    yield


def before_forward(model, args):
    if not (torch.compiler.is_compiling() or run.loads):  # else it changes images, say
        run.modules.append(model)
        attempt(note_forward, model, args)


def after_forward(model, args, output):
    if run.modules and run.modules[-1] is model:
        run.modules.pop()
    if model.training and torch.is_grad_enabled() and not run.loads:
        if not run.modules and not run.dropout and run.drawn is not None:
            run.dropout, run.drawn = attempt(random_state) != run.drawn, None
        attempt(note_layer, model, args, output)


def note_layer(model, args, output):
    """Notes what layers give that a script may have made by hand."""
    if type(model) is torch.nn.Linear and model.bias is not None and output is not None:
        run.linear = weakref.ref(model), weakref.ref(output)
    if model is run.shared and run.step == 0 and model.weight is not None and model.weight.all():
        channels = [x.detach().double().transpose(0, 1).flatten(1)[:64] for x in (args[0], output)]
        weight, bias = (w.detach().double()[:64, None] for w in (model.weight, model.bias))
        channels[1] = (channels[1] - bias) / weight
        sums = [[x.mean(1).tolist(), x.square().mean(1).tolist()] for x in channels]
        entry = Record(line=line(), name=type(model).__name__, eps=model.eps, sums=sums)
        run.record.normalized.append(entry)


def note_forward(model, args):
    run.seen += 1
    run.unused = None
    run.join()
    for base in type(model).__mro__:
        if found := re.match("FSDP|FullyShard|DeepSpeed", base.__name__):
            run.record.kinds["deepspeed" if found[0] == "DeepSpeed" else "fsdp"] = True
    if model.training and torch.is_grad_enabled():
        run.evaluated.clear()
        if not run.modules[:-1] and not run.backwards:
            run.at["forward"], run.drawn = line(), random_state()
        if isinstance(model, torch.nn.modules.batchnorm._BatchNorm):
            if model.num_batches_tracked is not None:
                run.norms.setdefault(id(model), [model, 0, 0])[1 + (run.backwards > 0)] += 1
            if "Sync" not in type(model).__name__:
                size, (least, most, at) = len(args[0]), run.record.get("batchnorm", (99, 0, None))
                at = line() if size < min(3, least) else at
                run.record.batchnorm = [min(size, least), max(size, most), at]
        if run.inputs_due and (found := rows(args)):
            note_inputs(model, found)
    elif all(type(outer).__name__ in WRAPPERS for outer in run.modules[:-1]):
        if run.ending and run.ending.work:
            settle()
        if run.current:
            run.current.evals += 1
        if type(model).__name__ not in WRAPPERS and not model.training:
            note_evaluation(model)


def note_inputs(model, found):
    run.inputs_due = False
    if not run.current:
        run.record.loose.append([f"{run.step} {row}" for row in found])
        run.record.setdefault("fed", line())
    else:
        inputs, used = run.current.inputs, run.current.used
        inputs[min(used, len(inputs) - 1) if run.current.ahead else -1] += found
        run.current.used += 1
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if run.model_weight is None:
        run.model_weight = min(trained, key=lambda weight: weight.numel(), default=None)
    later = str(int(run.done > 0 or run.step >= 3))
    if later not in run.record.model:
        run.record.model[later] = [checksum(weight) for weight in trained]
        run.record.model.step = run.step


def note_evaluation(model):
    begun = run.step or any(entry.work for entry in run.record.passes)
    number = id(model)
    enough = run.noted[number] == 4 or len(run.record.evaluations) > 63
    if run.equal or not begun or number in run.evaluated or enough:
        return
    run.evaluated.add(number)
    run.noted[number] += 1
    entry = Record(line=line(), done=run.done, short=run.short, step=run.step)
    entry.trained = any(weight is run.model_weight for weight in model.parameters())
    entry.weights = {name: checksum(weight) for name, weight in model.named_parameters()}
    entry.buffers = {name: checksum(buffer) for name, buffer in model.named_buffers()}
    norms = [m for m in model.modules() if getattr(m, "running_var", None) is not None]
    same = [bool((m.running_var == 1).all() and not m.running_mean.any()) for m in norms]
    entry.constant = same if run.norms else []
    run.record.evaluations.append(entry)


def on_collective(name, /, *args, **options):
    if run.waiting:  # a part of another one
        yield
        return
    attempt(note_collective, name, [*args, *options.values()], place(sys._getframe(CALLER)))
    run.waiting = name
    run.seen += 1
    try:
        yield
    finally:
        run.waiting = None
        run.seen += 1


def note_collective(name, values, direct):
    """direct: the script's line, if the call is there and not in a library."""
    entry = Record(name=name, line=line(), step=run.step, computed="backward" in run.at)
    entry["pass"] = len(run.record.passes) - 1
    inner = run.modules[-1] if run.modules else None
    entry.norm = isinstance(inner, torch.nn.modules.batchnorm._BatchNorm)
    if name in GATHERS:  # Accelerate's leaves out what fills the last batch
        frames = traceback.walk_stack(sys._getframe())
        entry.trims = any(f.f_code.co_name == "gather_for_metrics" for f, _ in frames)
    if direct and name in SUMS:
        tensor = next(value for value in values if isinstance(value, torch.Tensor))
        entry.group = members(values)
        if run.modules or run.backwards:
            entry.where = "backward" if run.backwards else "forward"
            entry.grad = differentiated(tensor)
            if run.step < 3 and not run.equal and tensor.any():
                entry.sum, entry.bias = checksum(tensor), bias_in(tensor) if run.linear else None
        elif tensor.numel() <= 16 and adds_up(name, values):
            entry.numbers = local(tensor).flatten().tolist()
    if entry.norm:
        run.shared = inner if direct else None
    elif inner is not None and inner.training and type(inner).__name__ not in WRAPPERS:
        # Layers exchange data. It is not, say, Join in DDP, or a running mean of the loss's own.
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if name in SENDS or any(map(differentiated, tensors)):
            run.record.kinds["forward"] = True
    run.record.collectives.append(entry)


def adds_up(name, values):
    """Whether a collective with these arguments gives the sum, and not, say, the mean."""
    if name == "all_reduce":
        kinds = dist.ReduceOp, type(dist.ReduceOp.SUM)
        return all(value == dist.ReduceOp.SUM for value in values if isinstance(value, kinds))
    return any(type(value) is int and value == sys.modules["horovod.torch"].Sum for value in values)


def members(values):
    """The ranks that take part in a collective with these arguments."""
    groups = [v for v in values if dist.is_available() and isinstance(v, dist.ProcessGroup)]
    if not dist.is_available() or not dist.is_initialized():  # Horovod's
        return None
    return dist.get_process_group_ranks(groups[0] if groups else None)


def differentiated(tensor):
    """Whether a tensor is a part of what backward() will go through: by itself, or within the
    forward of a Function.
    """
    if torch.is_grad_enabled():
        return tensor.requires_grad
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name == "forward" and frame.f_code.co_argcount:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            return any(getattr(first, "needs_input_grad", []))
    return False


def bias_in(tensor):
    """The bias of the last linear layer if its output is this tensor, and the bias is not zero."""
    layer, output = (reference() for reference in run.linear)
    same = None not in (layer, output) and output.shape == tensor.shape
    same = same and torch.equal(local(output), local(tensor))
    return checksum(layer.bias) if same and layer.bias.any() else None


def on_group(*args, **options):
    run.joins, run.waiting = True, "init_process_group"
    run.seen += 1
    yield
    run.waiting = None
    run.join()
    run.seen += 1


def on_loss(input, target, *args, **options):
    """What evaluations compute."""
    found = yield
    if torch.is_grad_enabled() or not run.step or run.equal:
        return
    losses, number = run.record.losses, len(target)
    where = [run.step, line(), len(run.record.passes) - 1]
    sums = options.get("reduction", "mean") == "sum"
    value = float(found) / max(1, number) if sums else float(found.mean())
    if not losses or losses[-1].where != where:
        losses.append(Record(where=where, losses=[]))
    losses[-1].losses.append([value, number])


def on_write(text):
    """Which numbers are printed after evaluations."""
    losses = run.record.losses
    if losses and losses[-1].where[0] == run.step and len(run.record.printed) < 1000:
        found = [[run.step, m[0], len(losses)] for m in NUMBER.finditer(str(text))]
        run.record.printed += found
    yield


def on_save(what, file, *args, **options):
    parts = [what, *what.values()] if isinstance(what, dict) else []
    parts = [part for part in parts if isinstance(part, dict)]
    parts = [part for part in parts if "n_averaged" not in part]  # an AveragedModel's own names
    names = [re.match(r"(module|_orig_mod)\.", str(name)) for part in parts for name in part]
    tensors = [v for part in parts for v in part.values() if isinstance(v, torch.Tensor)]
    note_file(file, line(), names, tensors)
    yield


def on_open(file, mode="r", *args, **options):
    if "w" in mode or "x" in mode:
        frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(CALLER)))
        own = (f for f in frames if not WRITERS.match(f.f_globals.get("__name__", "")))
        note_file(file, place(next(own)))
    yield


def note_file(file, at, names=(), tensors=()):
    if at and isinstance(file, (str, Path)) and not str(file).startswith("/dev/"):
        entry = Record(path=os.path.abspath(file), host=socket.gethostname(), line=at)
        entry |= {"prefix": [found[0] for found in names if found][:1], "step": run.step}
        entry.sums = sorted({str(checksum(tensor)) for tensor in tensors})
        run.record.files.append(entry)


def on_flags(parser, *args, **options):
    found, _ = yield
    run.record.flags |= {k: v for k, v in vars(found).items() if type(v) is int}


def create_process(
    old, process, group=None, target=None, name=None, args=(), kwargs=None, **options
):
    module = getattr(target, "__module__", None) or ""
    settings = dict(run.settings, helper=run.joins)  # of a rank, which is no rank by itself
    if module == "torch.multiprocessing.spawn":
        args = (functools.partial(spawned, args[0], settings), *args[1:])
    elif callable(target) and not module.startswith(("torch.", "multiprocessing.")):
        target = functools.partial(spawned, target, settings)
    old(process, group, target, name, args, kwargs or {}, **options)


# 1d. A process from its beginning to its end


def begin(settings, function=None):
    """From now on, this process is recorded. function: what a spawned process runs."""
    global run, torch, dist
    forked, run = run is not None, Run(settings)
    threading.Thread(target=watch_for_hangs, args=[os.getppid()], daemon=True).start()
    import torch  # here: it takes seconds, in which the others wait; what starts them needs none
    import torch.distributed as dist

    if not forked:
        watch_all()
        if settings.cpu:
            use_cpu()
    replace_imported(function)


def watch_all():
    from torch.distributed.algorithms.join import Join
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils.data import DataLoader, dataloader

    iterator, functional = dataloader._BaseDataLoaderIter, torch.nn.functional
    ddp = torch.nn.parallel.DistributedDataParallel
    replace(iterator, "__next__", next_batch)
    replace(multiprocessing.process.BaseProcess, "__init__", create_process)
    for owner, name, watcher in (
        (DataLoader, "__init__", on_loader),
        (DataLoader, "__iter__", on_iterate),
        (iterator, "_next_index", on_index),
        (torch.autograd, "backward", on_backward),
        (torch.optim.Optimizer, "zero_grad", on_zero_grad),
        (torch.nn.Module, "zero_grad", on_zero_grad),
        (torch, "compile", on_compile),
        (ddp, "__init__", on_ddp),
        (ddp, "forward", on_ddp_forward),
        (Join, "__enter__", functools.partial(on_kind, "join")),
        *((functional, name, on_loss) for name in LOSSES),
        (dist, "init_process_group", on_group),
        (torch, "save", on_save),
        (builtins, "open", on_open),
        (io, "open", on_open),  # pathlib's
        (argparse.ArgumentParser, "parse_known_args", on_flags),
        (sys.stdout, "write", on_write),
        (sys.stderr, "write", on_write),
    ):
        watch(owner, name, watcher)
    watch_collectives(dist)
    optimizer.register_optimizer_step_pre_hook(before_step)
    optimizer.register_optimizer_step_post_hook(after_step)
    module.register_module_forward_pre_hook(before_forward)
    module.register_module_forward_hook(after_forward, always_call=True)


def watch_collectives(library):
    for name in [*SUMS, *GATHERS, *SENDS, *SPREADS]:
        if hasattr(library, name):
            new = watch(library, name, functools.partial(on_collective, name))
            if name in ("isend", "irecv"):  # P2POp compares them with these
                setattr(dist.distributed_c10d, name, new)


def watch_horovod():
    """The same for Horovod, once the script has imported it."""
    horovod = sys.modules.get("horovod.torch")
    if horovod and not hasattr(horovod, "audited"):
        horovod.audited = True
        watch_collectives(horovod)


def use_sync_batch_norm():
    """SyncBatchNorm's forward in training, which PyTorch has only for GPUs."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(context, values, group):
            context.group, total = group, values.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(context, gradient):
            total = gradient.clone()
            dist.all_reduce(total, group=context.group)
            return total, None

    def normalize(old, layer, x):
        if not (layer.training and dist.is_initialized()):
            return old(layer, x)
        values = x.float().transpose(0, 1).flatten(1)
        sums = [values.sum(1), values.square().sum(1), torch.ones_like(values).sum(1)]
        first, second, count = Sum.apply(torch.stack(sums), layer.process_group)
        mean = first / count
        variance = second / count - mean.square()
        if layer.track_running_stats:
            layer.num_batches_tracked += 1
            rate = layer.momentum or 1 / int(layer.num_batches_tracked)
            layer.running_mean.lerp_(mean.detach(), rate)
            layer.running_var.lerp_((variance * count / (count - 1)).detach(), rate)
        values = (values - mean[:, None]) * (variance + layer.eps).rsqrt()[:, None]
        if layer.affine:
            values = values * layer.weight[:, None] + layer.bias[:, None]
        return values.unflatten(1, x.transpose(0, 1).shape[1:]).transpose(0, 1).to(x.dtype)

    replace(torch.nn.SyncBatchNorm, "forward", normalize)
    ddp = torch.nn.parallel.DistributedDataParallel
    replace(ddp, "_passing_sync_batchnorm_handle", lambda *_: None)


def use_cpu():
    """What names a GPU means the CPU from now on, but for streams, events and graphs.

    torch.cuda.manual_seed() seeds the CPU's numbers: there is no second generator.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.overrides import TorchFunctionMode

    def moved(value, number=False):
        """number: whether a number is a device, as in model.to(0)."""
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "cuda" else value
        if isinstance(value, str):
            value = re.sub(r"^(.*:)?nccl$", "gloo", value)
            return re.sub(r"^cuda(:\d+)?$", "cpu", value)
        return "cpu" if number and type(value) is int else value

    def call(old, *args, **options):
        to = getattr(old, "__name__", "") == "to"
        options = {k: moved(v, k == "device") for k, v in options.items() if k not in gone}
        return old(*(moved(value, to) for value in args), **options)

    def cast(old, *args, **options):
        """autocast(): CPUs take a hundred times as long for float16."""
        half, brain = torch.float16, torch.bfloat16
        options = {k: brain if v is half else v for k, v in options.items()}
        call(old, *(brain if value is half else value for value in args), **options)

    def reply(answer, old, *args, **options):
        """To the script and to its libraries; PyTorch itself learns the truth."""
        if sys._getframe(2).f_globals.get("__name__", "").startswith("torch."):
            return old(*args, **options)
        return answer(*args, *options.values()) if callable(answer) else answer

    class Generator(torch.Generator):
        def __new__(cls, device=None):
            return super().__new__(cls)

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), options=None):
            if getattr(function, "__name__", "") in ("cuda", "pin_memory"):
                return args[0]
            return call(function, *args, **options or {})

    gone = "device_id device_ids output_device pin_memory pin_memory_device".split()
    nn, amp, cuda, ddp = torch.nn, torch.amp, torch.cuda, torch.nn.parallel.DistributedDataParallel
    for cls in (amp.GradScaler, torch.utils.data.DataLoader):
        replace(cls, "__init__", call)
    replace(amp.autocast, "__init__", cast)
    replace(ddp, "__init__", lambda old, self, model, *_, **more: call(old, self, model, **more))
    cpu = {"device_id": torch.device("cpu")}
    replace(FullyShardedDataParallel, "__init__", lambda old, *args, **o: old(*args, **o | cpu))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed's
    for owner, name in ((nn.Module, "to"), (torch, "load"), (torch, "set_default_device")):
        replace(owner, name, call)
    for name in ("init_process_group", "barrier"):
        replace(dist, name, call)
    dist.init_device_mesh = replace(dist.device_mesh, "init_device_mesh", call)
    seed, rank = torch.default_generator.manual_seed, int(os.environ.get("LOCAL_RANK", 0))
    answers = dict.fromkeys("set_device synchronize empty_cache reset_peak_memory_stats".split())
    names = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved".split()
    answers |= dict.fromkeys(names, 0) | {"is_available": True, "is_bf16_supported": True}
    answers |= {"device_count": run.settings.ranks, "current_device": rank}
    answers |= {"get_device_name": "CPU", "manual_seed": seed, "manual_seed_all": seed}
    about = {"name": "CPU", "major": 8, "minor": 0, "total_memory": 2**34}
    about = types.SimpleNamespace(**about, multi_processor_count=os.cpu_count())
    answers |= {"get_device_properties": about, "get_device_capability": (8, 0)}
    answers |= {"memory_stats": Counter(), "mem_get_info": (2**34, 2**34)}
    for name, answer in answers.items():
        replace(cuda, name, functools.partial(reply, answer))
    answers = dict.fromkeys("set_device_index set_device_idx synchronize".split()) | {
        "is_available": True,
        "current_accelerator": torch.device("cuda"),
        "device_count": run.settings.ranks,
        "current_device_index": rank,
    }
    for name, answer in answers.items():
        if hasattr(torch.accelerator, name):
            replace(torch.accelerator, name, functools.partial(reply, answer))
    use_sync_batch_norm()
    torch.Generator = Generator
    OnCpu().__enter__()


def spawned(function, settings, *args, **options):
    """What a process that the script starts runs. It is a rank if it joins a group."""
    begin(Record(settings), function)
    run.rank, run.joins = None, False
    record_end(functools.partial(function, *args, **options))


def watch_for_hangs(parent):
    """A thread: ends this rank if no rank shows a sign of life, or if another one has ended so.

    Signs are what a rank does for the audit, its place in Python, and its use of the CPU. One that
    waits for its loader, or for a compiler that it has started, does not wait for other ranks. Time
    is counted in rounds: where other programs use the machine, this clock is slow, too.
    """
    own, main = run.folder / f"{os.getpid()}.life", threading.main_thread().ident
    life, told, at, used, others = [0, 0, 0], None, None, 0, 0
    quiet, last = [0] * len(PATIENCE), [None] * len(PATIENCE)
    while time.sleep(ROUND) or not run.ended.locked():
        if os.getppid() != parent or not run.folder.exists():  # the audit was interrupted
            os._exit(1)
        computes, used = time.process_time() - used > ROUND / 20, time.process_time()
        if quiet[0] * ROUND > 1:  # not before: to look at another thread's frames may disturb it
            frames = traceback.walk_stack(sys._current_frames()[main])
            now = [frame.f_lasti for frame, _ in frames]
            before, others = others, seconds_of_children()
            works = run.loads or others - before > ROUND / 2
            life, at = [life[0], life[1] + (works or now != at), life[2] + (works or computes)], now
        life[0] = run.seen
        with contextlib.suppress(OSError):  # the folder is being removed
            if told != life:
                write_whole(own, " ".join(map(str, life)))
            told = [*life]
            lives = [file.read_text().split() for file in sorted(run.folder.glob("*.life"))]
            for n in range(len(PATIENCE)):
                signs = [words[: n + 1] for words in lives]  # the first limit counts only progress
                quiet[n], last[n] = quiet[n] + 1 if signs == last[n] else 0, signs
        limits = zip(quiet, PATIENCE, strict=True)
        hangs = any(ROUND * rounds > times * run.settings.hang for rounds, times in limits)
        if run.joins and (hangs or (run.folder / "stop").exists()):
            inside = run.waiting or ("DataLoader" if run.loads else None)
            run.record.waits = {"line": line(sys._current_frames()[main]), "in": inside}
            (run.folder / "stop").touch()
            leave()


def seconds_of_children():
    """How long the processes that this one has started, and theirs, have used a CPU, on Linux."""
    parents, ticks = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            words = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(words[1])
            ticks[int(file.parent.name)] = sum(map(int, words[11:15]))  # those that ended, too
    own = {os.getpid()}
    for _ in range(9):  # generations
        own |= {child for child, parent in parents.items() if parent in own}
    return sum(ticks.get(number, 0) for number in own - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


def record_end(function):
    """Calls a function. If that made this process a rank, writes its record, and ends it."""
    try:
        function()
        run.record.left = dist.is_initialized()
    except SystemExit as end:
        if end.code not in (None, 0):
            run.record.error = {"text": f"exit: {end.code}", "line": None}
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        traceback.print_exc()
        lines = [at for f in traceback.walk_tb(error.__traceback__) if (at := place(*f))]
        at, text = lines[-1] if lines else None, f"{type(error).__name__}: {error}"[:1000]
        strict = StopIteration in (type(error), type(error.__cause__)) or "zip() arg" in str(error)
        if run.cut and strict:
            run.record.cut = True
            run.record.faults[f"{at}: needs all batches: give --batches"] = True
        else:
            run.record.error = {"text": text, "line": at}
    if "error" in run.record and run.settings.get("helper") and not run.joins:
        raise SystemExit(1)
    if "error" in run.record:
        (run.folder / "stop").touch()  # nobody is to wait for this rank
    # A script that could have started ranks, and has trained by itself, counts as one.
    lone = run.settings.alone and run.record.steps and not multiprocessing.parent_process()
    if run.joins or lone or "error" in run.record:
        leave()


def leave():
    """Writes the record, waits a moment for those of the others, and ends this process."""
    run.ended.acquire()  # and never released
    number, record = run.rank or 0, run.record
    world = next((int(os.environ[name]) for name in WORLDS if name in os.environ), 1)
    defaults = {"rank": number, "world": world, "group": "horovod.torch" in sys.modules}
    defaults |= {"left": False, "cut": False, "cpu": run.settings.cpu}
    file, record = run.folder / f"{number}.json", defaults | record
    if file.exists():  # of ranks that the script has started before: the largest group is compared
        old = json.loads(file.read_text())
        record = record if record["world"] > old["world"] else old
        record["faults"]["other ranks that the script starts, before these or after them"] = True
        record = Record(record)
    write_whole(file, json.dumps(record))
    # The others find their own hangs. Only one that was killed never writes a record.
    since, most = time.monotonic(), 10 + 3 * run.settings.hang
    while len(ended := numbers(run.folder)) < record.get("world", world) and run.folder.exists():
        stopped = (run.folder / "stop").exists()  # the others end, too, if they still can
        if time.monotonic() - since > (LINGER if stopped else most):
            break
        time.sleep(0.05)
    for process in multiprocessing.active_children():  # a loader's workers
        process.terminate()
    code = 0
    if run.settings.reports and number == min(ended, default=None):  # 0, unless it was killed
        code = report(run.folder, run.settings)
        shutil.rmtree(run.folder, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def numbers(folder):
    """The ranks that have written their records."""
    return {int(file.stem) for file in folder.glob("*.json")}


def write_whole(path, text):
    """Nobody sees a part of the file."""
    part = Path(f"{path}.part")
    part.write_text(text)
    part.replace(path)


# 2. What the records show together


class Comparison:
    """The ranks' records side by side: what they show, and what was not checked, and why."""

    def __init__(self, ranks, missing):
        self.ranks, self.missing = ranks, missing
        self.findings, self.unchecked, self.recognized, self.facts = [], [], [], []
        self.kinds = {kind for rank in ranks for kind in rank.kinds}
        # What recognize() finds out, by which the checks know what to expect
        self.steps = []  # those with weights, of all ranks side by side
        self.server = False  # a parameter server: only that rank takes steps
        self.split = False  # one model, split over the ranks
        self.own = set()  # numbers of weights that differ by design
        self.exchange = False  # layers that exchange data between the ranks
        self.groups = []  # ranks that train on the same samples by design; check_samples() knows
        self.rarely = False  # weights that are averaged from time to time; check_weights() knows
        self.judge(check_ends)
        if self.found("crash", "hang") and not any(rank.steps for rank in ranks):
            return  # nothing can be said of the rest
        self.unchecked += sorted({fault for rank in ranks for fault in rank.faults})
        joined = any(rank.group for rank in ranks)
        if not joined or len(ranks) < 2:
            why = "the script joins no process group, so one copy of it was run, on one device"
            why = "the script has started only one rank" if joined else why
            why = f"only rank {ranks[0].rank} has left a record" if ranks and missing else why
            why = why if ranks else "no process has joined a process group"
            self.unchecked.append(f"all that compares ranks: {why}")
            self.ranks = ranks[:1]
        if self.ranks:
            self.judge(recognize)
            for check in [*BETWEEN_RANKS, *ALONE] if len(self.ranks) > 1 else ALONE:
                self.judge(check)

    def judge(self, check):
        """Adds what a check yields: a kind, a line, what was seen, and another cure or level than
        the kind's. Each kind once per line.
        """
        try:
            for name, line, seen, *other in check(self):
                cure, level = [*other, "", ""][:2]
                usual, _, page, what, cures = KINDS[name]
                page = f"mnmc_ddp_launch.md, section {page}" if page.isdigit() else f"{page}.md"
                if (name, line) not in [(f["kind"], f["line"]) for f in self.findings]:
                    finding = {"level": level or usual, "kind": name, "line": line, "what": what}
                    finding |= {"seen": seen, "cure": cure or cures, "page": f"docs/diffs/{page}"}
                    self.findings.append(finding)
        except Exception as error:  # of the audit, not of the script
            self.unchecked.append(own_error(error))

    def found(self, *names):
        return any(finding["kind"] in names for finding in self.findings)

    def evaluations(self):
        """The evaluations that all ranks did, side by side."""
        each = zip(*(rank.evaluations for rank in self.ranks), strict=False)
        return [entries for entries in each if len({entry.done for entry in entries}) == 1]


def recognize(view):
    """Kinds of parallelism that break the rules of data parallelism by design."""
    ranks, kinds, taken = view.ranks, view.kinds, [len(rank.steps) for rank in view.ranks]
    sends = all({c.name for c in rank.collectives} & {*SENDS} for rank in ranks)
    # A rank that was told to stop may have written half of its first step.
    first = [rank.steps[0] for rank in ranks if rank.steps and "sizes" in rank.steps[0]]
    same_sizes = len({str(step.sizes) for step in first}) < 2
    view.server = sends and 0 in taken and any(taken)
    view.steps = side_by_side(view, taken, same_sizes)
    stages = sends and bool(view.steps) and apart(view.steps[0])
    if same_sizes and ("forward" in kinds or sends):
        view.own = set(unequal([step.before for step in first]))
        view.own |= set(first[0].constant) if view.own else set()  # nobody can tell
    shards = "shards" in kinds and "fsdp" not in kinds
    split = shards or "pipeline" in kinds or bool(view.own) or (sends and not same_sizes) or stages
    view.split = split and "deepspeed" not in kinds and not view.server
    view.exchange = view.split or "forward" in kinds
    view.groups = [[n] for n in range(len(ranks))]
    for true, what in (
        (view.server, "a parameter server: only that rank takes steps"),
        (view.split, "one model, split over the ranks: its parts are not compared"),
        ("fsdp" in kinds, "FSDP: of sharded weights, only replicas are compared"),
        ("deepspeed" in kinds, "DeepSpeed: its shards of weights are not compared"),
        ("join" in kinds, "Join: the ranks may have different numbers of batches"),
    ):
        view.recognized += [what] * bool(true)
    if stages:
        view.steps = []
    return []  # no findings


def side_by_side(view, taken, same_sizes):
    """The steps with weights, of all ranks side by side: the n-th ones of each pass."""
    if not all(taken):
        view.unchecked += ["weights: not all ranks take steps"] * (len(view.ranks) > 1)
    elif not same_sizes and "deepspeed" not in view.kinds:
        view.unchecked.append("weights: each rank's optimizer has others")
    elif "deepspeed" not in view.kinds:
        found = []
        for done in sorted({step.done for step in view.ranks[0].steps}):
            own = [[step for step in rank.steps if step.done == done] for rank in view.ranks]
            found += zip(*own, strict=False)
        return [steps for steps in found if all("after" in step for step in steps)]
    return []


def apart(steps):
    """Whether each rank changes weights that the others do not, and only those."""
    moved = [{*unequal([step.before, step.after])} for step in steps]
    return all(moved) and not set.intersection(*moved)


def check_ends(view):
    """Crashes and hangs. A rank whose connection another one's end closed has waited for it."""
    closed = re.compile("[Cc]onnection (closed|reset|refused)|Broken pipe")
    crashes, places, said = [], [], []
    for rank in view.ranks:
        number, error, waits = rank.rank, rank.get("error"), rank.get("waits")
        if error and not closed.search(error.text):
            crashes.append((error.line, f"rank {number}: {error.text}"))
        elif error or waits:
            places.append((error or waits).line or "no line of the script")
            call = f", in {waits['in']}()" if waits and waits["in"] else ""
            said.append(f"rank {number} waits at {places[-1]}{call}")
        else:
            said.append(f"rank {number} {'needs no more' if rank.cut else 'has ended'}")
    said += [f"rank {number} never came, or was killed" for number in view.missing]
    for at, text in crashes:
        cure = "Run the script by itself, where there are GPUs: --cpu stands for much, not for all."
        yield "crash", at, "; ".join([text, *said]), cure * any(rank.cpu for rank in view.ranks)
    if not crashes and (places or view.missing):
        yield "hang", places[0] if places else None, "; ".join(said)


# 2a. Samples


def check_samples(view):
    """Which samples each rank trains on, and in which order."""
    ranks = [rank for rank in view.ranks if not (view.server and rank.steps)]
    training = [[p for p in rank.passes if p.work and not p.equal] for rank in ranks]
    if len(ranks) < 2:
        view.unchecked.append("samples: only one rank trains")
        return
    if not all(training):
        yield from check_inputs(view, ranks)
        return
    first = [passes[0] for passes in training]
    one, at = first[0], first[0].made
    names = {name for entry in first for name in entry.contents}
    other = [n for n in sorted(names) if len({p.contents.get(n) for p in first}) > 1]
    known = all(entry.indices is not None for entry in first) and not other
    if other and all("epoch" in entry for entry in first):
        yield "other data", at, f"{', '.join(other)} of {one.name[0]}: other contents"
    elif not known:
        why = "each rank has data of its own" if other else "the loader has no indices"
        view.unchecked.append(f"{at}: {why}, so only the first batches were compared")
    splits = [str(entry.part) for entry in first]
    if split := len({*splits}) > 1 and all("epoch" in entry for entry in first):
        text = f"each rank has another {one.name[0]}; its first and last samples: {splits}"
        cure = "random_split(..., generator=torch.Generator().manual_seed(0)), on all ranks alike."
        yield "other data", at, text, cure
    counts = [len(entry.indices or entry.rows) for entry in first]
    whole = all(entry.complete for entry in first)
    if whole and len(set(counts)) > 1 and "join" not in view.kinds:
        yield "batches", at, f"batches of the ranks in epoch 1: {counts}"
    key = "indices" if known else "rows"
    samples = [flat(entry[key]) for entry in first]
    if not all(samples):
        view.unchecked.append(f"{at}: samples: the batches have no tensors")
        return
    if not split:
        yield from check_sets(view, at, one.sampler, samples, one.fills)
    yield from check_orders(view, training, key)
    yield from check_sizes(view, ranks, first)
    total, used = one.total, len(set(flat(samples)))
    step = sum(len(entry.rows[0]) for entry in first)
    known = known and whole and not split and max(map(len, samples)) < MOST
    if known and all(entry.dealt for entry in first):
        text, join = f"{total - used:,} of {total:,} samples are on no rank", "join" in view.kinds
        if total - used > max(2 * step, 0.1 * total):
            yield "left out", at, text
        elif join and total > used:
            cure = "drop_last=False: with Join, the ranks may have other numbers of batches."
            yield "left out", at, text, cure, "HINT"


def check_inputs(view, ranks):
    """The samples of a script that trains without a loader."""
    steps = min(len(rank.loose) for rank in ranks)
    if not steps:
        view.unchecked.append("samples: neither a loader nor a model's inputs were seen")
        return
    why = "there is no loader; --batches takes more"
    view.unchecked.append(f"batches after the first {steps}, which were compared: {why}")
    if not view.split and ranks[0].steps:
        samples, at = [flat(rank.loose[:steps]) for rank in ranks], ranks[0].fed
        yield from check_sets(view, at, "no loader", samples)
        if not (view.exchange or view.found("same samples", "shared samples")):
            own = [[sample.split()[1] for sample in rank] for rank in samples]
            yield from check_orders_apart(at, own)


def check_orders_apart(at, samples):
    """Whether each rank deals samples from an order of its own.

    Where samples are drawn with replacement, or an epoch has ended, they meet again on a rank as
    often as on two ranks, by the numbers of pairs. Here, far fewer meet again on a rank: by more
    than five standard deviations.
    """
    owners = Counter(flat({*own} for own in samples))
    shared, again = sum(n > 1 for n in owners.values()), sum(len(a) - len({*a}) for a in samples)
    usual, pairs = 1 / len(samples), shared + again
    if usual * pairs - again > 5 * (pairs * usual * (1 - usual)) ** 0.5:
        text = f"of {len(owners)} samples, {shared} are on several ranks, and {again} are repeated "
        text += "on one: each rank deals from an order of its own, so others are on no rank"
        cure = "The same order on all ranks, from torch.randperm(n, generator=...) that is seeded "
        yield "shared samples", at, text, f"{cure}by the epoch; then [rank::world_size].", "WARN"


def check_sets(view, at, source, samples, fills=1):
    """Which samples of an epoch, or of its first batches, several ranks train on. fills: how many
    a rank may repeat, so that all have as many.
    """
    owners = Counter(sample for own in samples for sample in set(own))
    shared, total = sum(n > 1 for n in owners.values()), len(owners)
    seen = f"{shared:,} of {total:,} samples are on several ranks ({source})"
    if view.split:  # ranks of one model read the same, those of another one other samples
        groups = {}
        for number, own in enumerate(samples):
            groups.setdefault(str(own), []).append(number)
        view.groups = [*groups.values()]
        sizes = [len({*samples[group[0]]}) for group in view.groups]
        if len(sizes) > 1 and (len(sizes) == len(samples) or sum(sizes) > total):
            yield "split samples", at, f"{seen}, but not in the same order"
    elif again_and_again(source, samples):
        view.recognized.append(f"repeated augmentation: {seen}")
    elif shared > 0.9 * total:
        if view.exchange:
            same = "the same samples on all ranks, whose layers exchange data"
            view.recognized.append(f"{same}: taken for parts of each sample")
            view.groups = [[*range(len(samples))]]
        else:
            yield "same samples", at, seen
    elif shared > len(samples) * fills:
        again = any(len(own) - len(set(own)) > len(samples) for own in samples)
        yield "shared samples", at, seen, "", "WARN" if again else ""


def again_and_again(source, samples):
    """Whether a sampler deals each sample several times in a row, to augment each in another way.
    With more ranks than times, only its name tells: torchvision's, timm's and DeiT's.
    """
    rows = [sum(a == b for a, b in itertools.pairwise(own)) > 0.1 * len(own) for own in samples]
    named = re.match("RASampler|RepeatAugSampler", source)
    return named or (all(rows) and len({*map(str, samples)}) > 1)


def check_orders(view, training, key):
    """Whether the first two epochs of a rank have the same order."""
    for passes in training:
        if len(passes) < 2 or passes[0].name != passes[1].name or len(passes[0].rows) < 2:
            continue
        one, two = (flat(entry[key]) for entry in passes[:2])
        length, epochs = min(len(one), len(two)), [entry.get("epoch") for entry in passes[:2]]
        if one[:length] == two[:length]:
            seen = f"{length:,} samples come in the same order"
            seen += f"; the sampler's epochs were {epochs}" if None not in epochs else ""
            plain = None in epochs or (key == "indices" and one == sorted(one))
            kind = ("no shuffling", passes[0].made) if plain else ("one order", passes[0].line)
            yield *kind, seen
            return
    if max(map(len, training)) < 2:
        at = training[0][0].made
        view.unchecked.append(f"{at}: orders of later epochs: only one epoch was seen")


def check_sizes(view, ranks, first):
    """Sizes of batches: what a flag says of them, and whether mean losses count equally."""
    at, steps = first[0].made, first[0].indices or first[0].rows
    sizes = [len(entry.rows[0]) or len((entry.indices or [[]])[0]) for entry in first]
    total = sum(sizes[group[0]] for group in view.groups[: len(sizes)])  # a server has none
    batches = "batch" if len(steps) == 1 else "batches"
    known = f"{len(steps)} {batches} per epoch; " if first[0].complete else ""
    view.facts.append(f"{known}global batch {total}, local {sizes}")
    flags = {name: n for name, n in ranks[0].flags.items() if "batch" in name and n > 1}
    same = [name for name, number in flags.items() if number == sizes[0]]
    if same and total > sizes[0]:
        yield "local batch", at, f"{same[0]}={sizes[0]}, but the ranks take {total}"
    if flags and not {total, *sizes} & {*flags.values()}:
        yield "other batch", at, f"{flags}, but the ranks take {total}: {sizes}"
    each = [[len(batch) for batch in entry.indices or entry.rows] for entry in first]
    rows = [*itertools.zip_longest(*each, fillvalue=0)]
    uneven = [n for n, row in enumerate(rows) if max(row) - min(row) > 1]
    plain = any(step.get("plain") for rank in view.ranks for step in rank.steps)
    if uneven and plain and not view.exchange:
        text = f"batch {uneven[0] + 1} of the ranks has {[*rows[uneven[0]]]} samples"
        at = next((s.at.backward for s in ranks[0].steps if "backward" in s.at), at)
        yield "unweighted batches", at, f"{text}, and each loss is their plain mean"


def check_augmentation(view):
    """Whether random changes of equal samples are equal on all ranks."""
    passes = [[p for p in rank.passes if p.equal and p.work] for rank in view.ranks]
    if view.exchange:
        view.unchecked.append("augmentation: the layers of the ranks exchange data")
        return
    if not any(rank.passes for rank in view.ranks):
        view.unchecked.append("augmentation: there is no loader")
    elif any(len(own) < 2 or len(own[0].rows) < 2 for own in passes):
        why = "the script has no two epochs more than --passes, with two batches each"
        view.unchecked.append(f"augmentation: {why}")
    elif any(entry.indices is None for own in passes for entry in own):
        view.unchecked.append("augmentation: the loader has no indices")
    elif not all(own[0].inputs[n] for own in passes for n in (0, 1)):
        view.unchecked.append("augmentation: the inputs of the model have no samples")
    else:
        batches = [[[{*p.inputs[n]} for p in own[:2]] for own in passes] for n in (0, 1)]
        random = equal_share(batches[0][0]) < 0.5  # epoch by epoch, on rank 0
        by_place, by_sample = (equal_share([own[0] for own in batch]) > 0.9 for batch in batches)
        if random and by_place and not by_sample:
            seen = "when the ranks got equal samples, their models got equal inputs"
            yield "same augmentation", passes[0][0].line, f"{seen}, which change by epoch"


# 2b. Weights and gradients


def check_steps(view):
    taken = [len(rank.steps) for rank in view.ranks]
    cut = any(rank.cut for rank in view.ranks)
    early = view.found("crash") or (view.found("hang") and not cut)
    if len(set(taken)) > 1 and not (view.server or "join" in view.kinds or early):
        at = next(rank.steps[0].line for rank in view.ranks if rank.steps)
        yield "steps", at, f"steps of the ranks: {taken}"
    for each in view.steps:
        for name in each[0].settings:
            values = [step.settings.get(name) for step in each]
            if len({*map(str, values)}) > 1:
                yield "hyperparameters", each[0].line, f"step {each[0].step}: {name} is {values}"
        dropped = all(step.dropout for step in each) and len({step.random for step in each}) == 1
        if dropped and not view.exchange:
            yield "same dropout", each[0].line, f"equal random states, step {each[0].step}"


def check_weights(view):
    """Whether the ranks' weights are equal after each step, or at least from time to time."""
    later = [(each[0].step - 1, [step.before for step in each]) for each in view.steps]
    for each in view.evaluations():
        if each[0].trained:  # not a teacher, or an average of the weights
            later.append((each[0].step, [[*entry.weights.values()] for entry in each]))
    equal = [step for step, weights in later if weights[0] and not unequal(weights)]
    for number, each in enumerate(view.steps, start=1):
        unlike = [n for n in unequal([s.after for s in each]) if n not in view.own]
        only_states = states_differ(each, view.steps[number : number + 1])
        if unlike and each[0].step <= max(equal, default=0) and not only_states:
            view.rarely = True
            view.recognized.append("weights that are averaged only from time to time")
            yield from check_summed(view.steps)
            return
        if unlike and each is view.steps[-1] and view.found("crash"):
            return  # it may have cut off the averaging of these gradients
        if unlike:
            why, cure, at = cause(view, each)
            text = f"step {each[0].step}, {len(unlike)} of {len(each[0].after)} weights: {why}"
            yield "weights", at or each[0].line, text, cure
            return


def states_differ(each, then):
    """Whether the ranks' optimizers have different states: equal weights and gradients before a
    step, but not at the next one. Weights that are averaged from time to time differ in gradients.
    """
    equal = not unequal([step.before for step in each])
    equal = equal and not unequal([step.grads for step in each]) and not each[0].empty
    return equal and any(unequal([step.before for step in steps]) for steps in then)


def check_summed(steps):
    """Whether weights that are averaged from time to time are in truth added up."""
    for each, then in itertools.pairwise(steps):
        ends, begins = [step.few[1] for step in each], [step.few[0] for step in then]
        once = all(s.step == t.step - 1 for s, t in zip(each, then, strict=True))
        if once and len({*map(str, ends)}) > 1 and len({*map(str, begins)}) == 1:
            cosine, factor, _ = alike(mean(ends), begins[0])
            if cosine > 0.99 and abs(factor / len(each) - 1) < 0.01:
                text = f"before step {then[0].step}, they are {factor:.2f} times their mean"
                yield "summed weights", then[0].line, text


def cause(view, each):
    """Why weights differ after a step, the cure, and the line, if it is another than the step's."""
    at = None
    settings, grads = [step.settings for step in each], unequal([step.grads for step in each])
    before, one = unequal([step.before for step in each]), each[0]
    changed = [name for name in settings[0] if len({str(s.get(name)) for s in settings}) > 1]
    early = [c.line for c in view.ranks[0].collectives if c.name in EXCHANGES and c.step < one.step]
    if apart(each) and not view.server:
        why = "each rank changes weights that the others do not, and nothing sends them"
        cure = "dist.broadcast() each weight from the rank that has changed it, in every step."
    elif one.step > 1 and before:
        why = "they differed already before it: something else had changed them"
        cure = "Change weights only in ways that are the same on all ranks."
    elif not grads and changed:
        why = (
            f"the gradients are equal, but {changed[0]} is {[s.get(changed[0]) for s in settings]}"
        )
        cure = "Give all ranks the same hyperparameters, by flags and by schedules."
    elif not grads and before:
        why = "the gradients are equal, but the weights differed before"
        cure = "dist.broadcast() rank 0's weights before the first step, as DDP does."
    elif not grads:
        why = "gradients and weights were equal, so the optimizers' states are not"
        cure = "When you resume, load the optimizer's state on all ranks. After Join, broadcast it."
    elif "fsdp" in view.kinds:
        why = "the ranks that hold the same shard have different gradients"
        cure = "fully_shard(..., mesh=mesh), with the mesh's dimension of the replicas, too."
    elif "ddp" not in view.kinds:
        why = f", also after {early[0]}" if early else ": nothing averages them"
        why = f"the gradients differ{why}"
        cure = "ddp_model = DistributedDataParallel(model); then train ddp_model."
    elif not one.forwards:
        why = "DDP's forward was not called, so nothing averaged the gradients"
        cure = "Call ddp_model(inputs), not the model that it wraps."
        at = one.at.get("forward")
    elif not one.sync:
        why = "the last forward before the step was within no_sync()"
        cure = "Run the last forward and backward before a step outside of no_sync()."
        at = one.at.get("forward")
    elif one.late:
        names, made = ", ".join(one.late[:3]), view.ranks[0].wrapped
        why = f"{names} were frozen when DDP was made ({made}), so it does not average them"
        cure, at = "Make DDP anew after you unfreeze weights.", made
    else:
        why = "DDP ran, but the gradients differ: something changed them after it averaged them"
        cure = "Change gradients only in ways that are the same on all ranks."
    return why, cure, at


def check_gradients(view):
    """Whether gradients are the mean of what was computed, over ranks and parts of a batch."""
    if view.server or {"join", "fsdp", "deepspeed"} & view.kinds:
        return
    factors = []
    for each in zip(*(rank.steps for rank in view.ranks), strict=False):
        groups = {}  # ranks that have the same gradient
        for step in each:
            if any(step.get("final", [])):
                groups.setdefault(str(step.final), []).append(step)
        found = [*filter(None, (wrong_gradients(view, group) for group in groups.values()))]
        yield from found
        if found:  # the first step tells
            return
        if len(groups) == 1 and not view.exchange and all(step.plain for step in each):
            factors += factor(each)
    # Clipping has another factor in each step, and the scale of a loss is large.
    off, steps = [abs(f - 1) > 0.01 and 0.1 < f < 10 for f in factors], len(factors)
    if steps > 2 and all(off) and max(factors) < 1.001 * min(factors):
        text = f"in all of {steps} steps, they are {factors[0]:.3f} times the mean"
        yield "other gradients", averaged(view, each[0]), text


def factor(each):
    """How many times the mean over ranks and parts of a batch a gradient is, if it is a multiple
    of it; the usual ones, with the sum over the parts, count as 1.
    """
    cosine, times, _ = alike(mean([step.local[0] for step in each]), each[0].final)
    parts = {step.parts for step in each}
    if len(parts) > 1 or cosine < 1 - 1e-5 or not times:
        return []
    return [1.0 if abs(times - 1) < 0.01 else times * max(parts)]


def averaged(view, step):
    """The line in which the script itself averages the gradients; that of backward() if it does
    not.
    """
    calls = [c for c in view.ranks[0].collectives if c.step == step.step - 1 and c.computed]
    lines = [c.line for c in calls if c.name in EXCHANGES and not c.get("numbers") and c.line]
    return lines[-1] if lines else step.at.get("backward") or step.line


def wrong_gradients(view, group):
    """What is wrong with a gradient that these ranks have; None if nothing is.

    The bounds lie between what rounding does in right scripts and what mistakes do: both are run by
    the benchmark of docs/evidence/audit.md. A factor is whole, unless the gradients are clipped.
    """
    final, size, parts = group[0].final, len(group), min(step.parts for step in group)
    at, where = averaged(view, group[0]), f"step {group[0].step}, a small weight"
    total, kept = (alike(mean([step.local[n] for step in group]), final) for n in (0, 1))
    plain = all(step.plain for step in group)
    if parts > 1 and kept[0] > 1 - 1e-6 and total[0] < 1 - 1e-5:
        text = f"{where}: of {parts} backward() since the last step, only the last one counts"
        return "lost gradients", group[0].at.get("zero_grad", at), text
    if parts > 1 and plain and total[0] > 0.99 and abs(total[1] - 1) < 0.01:
        text = f"{where}: {parts} backward() of mean losses; their gradients are added up"
        return "sum of parts", group[0].at.get("backward", at), text
    if size == 1 or view.exchange:
        return None
    # The sum that is closer is the one that the script uses: by its cosine, then by its error
    cosine, times, error = min(total, kept, key=lambda found: (-round(found[0], 3), found[2]))
    if cosine < 0.9:
        return "other gradients", at, f"{where}: cosine to the mean: {cosine:.2f}"
    if abs(times / size - 1) < 0.01:
        text = f"{where}: {times:.3f} times the mean"
        return "summed gradients", at, text, "", "" if plain else "HINT"
    if 3e-5 < error < 0.1 and abs(times - 1) < 0.1 and group[0].exact:
        return "rounded gradients", at, f"{where}: relative error {error:.1e}"
    return None


def check_summands(view):
    """Whether layers add up tensors that are equal on all ranks."""
    calls = {}
    for rank in view.ranks:
        for n, call in enumerate(c for c in rank.collectives if "where" in c):
            key = n, call.line, call.step, call.where, str(call.group)
            calls.setdefault(key, []).append(call)
    for (_, at, step, where, _), each in calls.items():
        sums, biases = ([call.get(name) for call in each] for name in ("sum", "bias"))
        split = where == "forward" or view.own
        for name, values in (("tensors", sums), ("biases, within the sum", biases)):
            if split and len(each) > 1 and values[0] is not None and len({*values}) == 1:
                text = f"in {where}, step {step + 1}: {len(each)} ranks give all_reduce() equal"
                yield "equal summands", at, f"{text} {name}"
                break


def check_backward(view):
    """Whether layers that add up over the ranks do so in backward, too. They must if the ranks'
    gradients are averaged: those differ, so each rank has a loss of its own.
    """
    known = [call for call in view.ranks[0].collectives if "where" in call and call.group]
    for group in {tuple(call.group) for call in known}:
        ranks = [rank for rank in view.ranks if rank.rank in group]
        calls = [call for call in known if tuple(call.group) == group]
        forward = [call for call in calls if call.where == "forward" and call.grad]
        if len(ranks) < 2 or not forward or any(call.where == "backward" for call in calls):
            continue
        text = f"{len(forward)} all_reduce() in forward, none in backward"
        if {*group} <= {*view.ranks[0].get("averaged", [])}:
            yield "forward only", forward[0].line, f"{text}; DDP averages the gradients"
            continue
        for each in zip(*(rank.steps for rank in ranks), strict=False):
            final = {str(step.get("final")) for step in each if any(step.get("final", []))}
            if len(final) == 1 < len({str(step.get("local")) for step in each}):
                yield "forward only", forward[0].line, f"{text}; the gradients are averaged"
                break


def check_normalized(view):
    """Whether a BatchNorm that exchanges statistics normalizes, by the local batch or by all."""
    for layers in zip(*(rank.normalized for rank in view.ranks), strict=False):
        local = [variances([layer.sums], layer.eps) for layer in layers]
        off = [max(local), variances([layer.sums for layer in layers], layers[0].eps)]
        if min(off) > 0.005:
            text = f"{layers[0].name}: off by {off[0]:.1%} locally, by {off[1]:.1%} over all ranks"
            yield "other variance", layers[0].line, text
            return


def variances(ranks, eps):
    """How far the mean squares of a layer's output are from what they must be: the largest relative
    error of a channel. ranks: of input and output, each channel's mean, and mean of the squares.
    """
    means, squares, _, given = (
        mean([rank[n][k] for rank in ranks]) for n in (0, 1) for k in (0, 1)
    )
    inputs = [b - a * a for a, b in zip(means, squares, strict=True)]
    pairs = zip(inputs, given, strict=True)
    return max((abs(y * (x + eps) / x - 1) for x, y in pairs if x > eps), default=0.0)


def check_training(view):
    """What each rank's own steps show."""
    for rank in view.ranks:
        all_steps, who = rank.steps, f"rank {rank.rank}"
        steps = [step for step in all_steps if "after" in step]
        broken = [step for step in steps if not step.finite]
        if broken and broken[-1] is steps[-1]:
            yield "not finite", broken[0].line, f"{who}: after step {broken[0].step}"
        for step in all_steps:
            if not step.cleared:
                text = f"before step {step.step}, nothing cleared the gradients of the last step"
                yield "not cleared", step.line, f"{who}: {text}"
        model = rank.model
        moved = any(s.after != s.before for s in steps if s.step <= model.get("step", 0))
        if (moved or not steps) and any(model.get("0", [])) and model["0"] == model.get("1"):
            passed = "after some steps" if steps else "after an epoch without a step"
            text = f"{len(model['0'])} weights are what they were in the beginning, {passed}"
            yield "other model", steps[0].line if steps else None, f"{who}: {text}"
        if steps and all(step.empty for step in steps):
            text = f"none of the optimizer's {len(steps[0].sizes)} weights ever has a gradient"
            yield "other model", steps[0].line, f"{who}: {text}"
        elif len(steps) > 2 and all(step.zero for step in steps):
            yield "zero gradients", averaged(view, steps[0]), f"{who}: in {len(steps)} steps"
        if steps and ignores_momentum(steps):
            text = f"momentum is {steps[0].settings['momentum']}, but each step is -lr * gradient"
            yield "ignored momentum", steps[0].line, f"{who}: {text}"
        norms = [step.norms for step in steps]
        for one, last in zip(norms[0], norms[-1], strict=False) if len(steps) > 2 else []:
            tracked, first, again = (b - a for a, b in zip(one, last, strict=True))
            if tracked == first + again > first:
                text = f"{tracked} updates in {first} forwards"
                yield "statistics twice", steps[0].line, f"{who}: {text}"
        least, most, at = rank.get("batchnorm", (99, 0, None))
        if least < 3 <= most:
            text, cure = "in the last batch of an epoch", "drop_last=True, for the loader."
            yield "small batch", at, f"{who}: {least} samples {text}", cure, "HINT"
        elif least < 3:
            yield "small batch", at, f"{who}: {least} samples"


def ignores_momentum(steps):
    """Whether a small weight's change is in each step what plain SGD does."""
    errors = []
    for step in (step for step in steps if any(step.get("final", []))):
        rate, decay = (step.settings.get(name, 0) for name in ("lr", "weight_decay"))
        before, after = step.weight
        plain = [-rate * (g + decay * w) for g, w in zip(step.final, before, strict=True)]
        change = [b - a for a, b in zip(before, after, strict=True)]
        _, times, error = alike(change, plain)
        errors += [max(abs(times - 1), error) if any(change) else 1.0]
    momentum = steps[0].settings.get("momentum", 0)
    return momentum > 0.1 and len(errors) > 2 and max(errors) < 0.02


# 2c. Evaluations, files, the rest


def check_evaluations(view):
    """Whether the ranks evaluate the same model, and one with statistics."""
    for entry in [entry for rank in view.ranks for entry in rank.evaluations]:
        if entry.constant and all(entry.constant):
            yield "constant statistics", entry.line, f"all {len(entry.constant)} layers"
    for each, what in itertools.product(view.evaluations(), ("weights", "buffers")):
        sums, at = [entry[what] for entry in each], each[0].line
        names = [n for n in sums[0] if unequal([[s.get(n)] for s in sums])]
        if not names or (what == "weights" and view.split):
            continue
        if view.rarely and each[0].short:
            why = "the pass ended early, and weights are averaged from time to time"
            view.unchecked.append(f"{at}: {what}: {why}")
        else:
            alone = what == "buffers" and view.found("evaluated by all")  # each its own
            seen, cure = f"{len(names)} of {len(sums[0])} differ, such as {names[0]}", ""
            if what == "weights" and view.found("weights"):
                cure = "Mend the finding on the training first: this follows from it."
            yield f"other {what}", at, seen, cure, "HINT" if alone else ""
        return


def check_results(view):
    """Which samples the ranks evaluate, and whether something adds up their results."""
    rank = view.ranks[0]
    evaluated = rank.evaluations or rank.losses or any(p.evals and not p.work for p in rank.passes)
    if rank.cut and not evaluated:
        why = f"none came within {len(rank.steps)} steps, after which the audit ended the script"
        more = "give more --passes, or fewer epochs" if rank.passes else "give more --batches"
        view.unchecked.append(f"evaluation: {why}; to reach one, {more}")
    # Sizes of sets that are evaluated exactly: a later, uneven pass of such a size is a comparison
    exact, passes = set(), view.ranks[0].passes
    for number, one in enumerate(passes):
        same = [rank.passes[number] for rank in view.ranks if rank.passes[number:]]
        whole = all(p.complete and p.evals and p.line == one.line for p in same)
        late = any(entry.equal for entry in passes[: number + 1])
        if one.work or not one.indices or not whole or late or len(same) < len(view.ranks):
            continue
        end = next((n for n, p in enumerate(passes) if n > number and p.work), 10**9)
        calls = [[c for c in r.collectives if number <= c["pass"] < end] for r in view.ranks]
        calls = [[c for c in own if c.name in EXCHANGES and not c.norm] for own in calls]
        yield from check_result(view, same, calls, exact)


def check_result(view, same, calls, exact):
    """One evaluation: a pass of each rank, and the collectives after it."""
    one, samples = same[0], [flat(entry.indices) for entry in same]
    counts = [len(own) for own in samples]
    if any(samples[n] != samples[group[0]] for group in view.groups for n in group):
        yield "split samples", one.made, f"the ranks evaluate {counts} samples, not the same ones"
        return
    if twice := counted_twice(samples, calls):
        ranks, line, numbers = twice[0]
        text = f"ranks {ranks} give all_reduce() {numbers} of the same samples"
        if view.exchange:
            cure = "Add up over the ranks that have other samples, by group=; or not at all."
            yield "counted twice", line, text, cure
            return
        counts = {len(one.rows), sum(map(len, one.rows))}
        if counts & set(flat(numbers for *_, numbers in twice)):
            text += f" in {line}; their number is added up, too, so means are right"
            yield "counted twice", one.made, text, "", "HINT"
        else:
            yield "counted twice", one.made, f"{text} in {line}"
        return
    samples = [samples[group[0]] for group in view.groups]
    total, seen = sum(map(len, samples)), set().union(*samples)
    alike = len({str([entry.part, entry.name]) for entry in same}) == 1  # else shards
    passes = [p for rank in view.ranks for p in rank.passes if p.work and p.indices]
    trained = {*flat(flat(p.indices for p in passes if p.name[:2] == one.name[:2]))}
    fold = bool(trained) and trained.isdisjoint(seen)  # the same data set, other samples
    size = one.total if alike and not fold else len(seen)
    if all(set(own) == seen for own in samples):
        if not view.exchange:
            text = f"{len(seen):,} of {size:,} samples on each rank"
            yield "evaluated by all", one.made, text
    elif not any(calls):
        yield "not added up", one.line, f"the ranks evaluate {counts} of {size:,} samples"
    elif len(seen) == size == total:
        exact.add(size)
        if "epoch" in one:
            yield "padded evaluation", one.made, f"{size:,} samples on {len(samples)} ranks"
    elif size not in exact and not (len(seen) == size and any(c.get("trims") for c in calls[0])):
        text = f"{size - len(seen):,} left out, {total - len(seen):,} repeated"
        yield "uneven evaluation", one.made, f"of {size:,} samples, {text}"


def counted_twice(samples, calls):
    """Equal results that ranks with the same samples add up: the ranks, the line, the numbers."""
    places, found = {}, []  # the n-th sum of a line, over some ranks
    for number, own in enumerate(calls):
        seen = Counter()
        for call in (call for call in own if any(call.get("numbers") or [])):
            seen[call.line] += 1
            key = call.line, seen[call.line], str(call.group), frozenset(samples[number])
            places.setdefault(key, []).append((number, call.numbers))
    for (at, *_), each in places.items():
        equal = [number for number, values in each if values == each[0][1]]
        if len(equal) > 1:
            found.append((equal, at, [float(f"{v:.6g}") for v in each[0][1]]))
    return found


def check_printed(view):
    """Whether what rank 0 prints after an evaluation is the mean over all its samples.

    Another mean is no mistake if the right one of the same data is printed with it or before it.
    """
    groups, begun = {}, {}  # the same evaluation on all ranks that take part; its place on rank 0
    for rank in view.ranks:
        for number, entry in enumerate(rank.losses):
            groups.setdefault(tuple(entry.where), []).append(entry.losses)
            if rank is view.ranks[0]:
                begun.setdefault(tuple(entry.where), number)
    means = {}
    for where, each in groups.items():
        passes = [rank.passes[where[2]] for rank in view.ranks if rank.passes[where[2] :]]
        sets = [{*flat(entry.indices or [])} for entry in passes if where[2] >= 0]
        # Of the same samples in other orders, the ranks have seen other ones by now.
        same = bool(sets) and bool(sets[0]) and all(own == sets[0] for own in sets)
        means[where] = formulas(each[:1] if same else each)
    right = {}  # where the right mean of a step's evaluations of some data is printed first
    for where, (true, _) in means.items():
        data = evaluated(view, where)
        for number, _ in printed(view, where, begun, true):
            right[data] = min(number, right.get(data, number))
    for where, (true, wrong) in means.items():
        first = right.get(evaluated(view, where), math.inf)
        for name, value in wrong.items():
            for number, text in printed(view, where, begun, value):
                if number < first and not view.found("not added up"):
                    yield "wrong mean", where[1], f"it prints {text}: {name}, not {true:.9g}"


def printed(view, where, begun, value):
    """What rank 0 prints for a value after an evaluation has begun: how many losses there were by
    then, and the text.
    """
    found = [(number, text) for step, text, number in view.ranks[0].printed if step == where[0]]
    first = begun.get(where, -1)
    return [(number, text) for number, text in found if number > first and shows(text, value)]


def evaluated(view, where):
    """What tells an evaluation's data: the step, and the data set of the pass, if it has one."""
    step, _, number = where
    names = [rank.passes[number].name[:2] for rank in view.ranks if rank.passes[number:]]
    return step, str(names[0] if number >= 0 else None)


def check_padding(view):
    """Whether an evaluation's losses count samples that the loader did not give, to fill a batch. A
    pipeline may compute such losses itself, besides. Losses of tokens count many more.
    """
    counts, most = {}, {}  # how many samples have a loss, by line; in the largest batch
    for rank in view.ranks:
        for entry in rank.losses:
            step, at, number = entry.where
            if number >= 0 and not rank.passes[number].work:
                loaded = sum(map(len, rank.passes[number].rows))
                own = counts.setdefault((step, number, loaded), {}).setdefault(rank.rank, Counter())
                own[at] += sum(n for _, n in entry.losses)
                most[at] = max([n for _, n in entry.losses], default=0)
    for (_, _, loaded), each in counts.items():
        found = [(at, n) for own in each.values() for at, n in own.items()]
        if loaded and loaded not in [n for _, n in found]:
            for at, counted in found:
                if counted > loaded and counted % loaded and counted - loaded < most[at]:
                    text = f"the loader gave {loaded} samples, but {counted} have a loss"
                    yield "padding counted", at, text


def check_files(view):
    writers = {}
    for rank in view.ranks:
        for file in rank.files:
            writers.setdefault((file.host, file.path), {})[rank.rank] = file.line
    for (_, path), lines in writers.items():
        if len(lines) > 1:
            text = f"ranks {sorted(lines)} write {os.path.relpath(path)}"
            yield "one file", next(iter(lines.values())), text
    for rank, other in itertools.product(view.ranks, repeat=2):
        for file in rank.files:
            # A rank may save, say, a teacher: what its own weights were. Not one of several stages.
            stale = untrained(other, file.step) & {*file.sums}
            if stale := stale - (set() if view.split else untrained(rank, file.step)):
                text = f"{len(stale)} weights as they were before rank {other.rank} trained them"
                yield "old weights", file.line, f"rank {rank.rank} saves {text}"
    for device, count in Counter(str(rank.get("device")) for rank in view.ranks).items():
        if count > 1 and device != "None":
            yield "one device", None, f"{count} ranks: {device}"


def untrained(rank, step):
    """What the weights were, at first, that a rank has changed until this step."""
    steps = [s for s in rank.steps if "after" in s and s.step <= step]
    pairs = enumerate(zip(steps[0].before, steps[-1].after, strict=True)) if steps else ()
    return {str(one) for n, (one, last) in pairs if one != last and n not in steps[0].constant}


def check_ending(view):
    for rank in view.ranks:
        for file in rank.files:
            if file.prefix:
                text = f"rank {rank.rank}: they begin with {file.prefix[0]}"
                yield "wrapped names", file.line, text
        if rank.left:
            yield "group left", None, f"rank {rank.rank}: the group is there at the end"


# In this order: later ones use view.groups, view.rarely, and what has been found before.
BETWEEN_RANKS = [check_samples, check_steps, check_weights, check_augmentation, check_results]
BETWEEN_RANKS += [check_evaluations, check_files, check_summands, check_backward]
BETWEEN_RANKS += [check_normalized]
ALONE = [check_gradients, check_printed, check_padding, check_training, check_ending]


# 2d. Arithmetic


def mean(rows):
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def alike(one, two):
    """The cosine of two vectors, how many times the first one the second is, and the relative
    distance that is left then: clipping scales gradients, too.
    """
    dot = sum(a * b for a, b in zip(one, two, strict=True))
    square, other = sum(a * a for a in one), sum(b * b for b in two)
    if not (square * other > 0 and math.isfinite(square * other)):
        return 1.0, 1.0, 0.0  # nothing to compare
    factor = dot / square
    distance = sum((factor * a - b) ** 2 for a, b in zip(one, two, strict=True))
    return dot / (square * other) ** 0.5, factor, (distance / other) ** 0.5


def formulas(ranks):
    """An evaluation's mean loss, and what it may be taken for, by name.

    ranks: of each rank, a mean loss and a number of samples per batch.
    """
    sums = [sum(value * number for value, number in pairs) for pairs in ranks]
    counts = [sum(number for _, number in pairs) for pairs in ranks]
    means = [sum(value for value, _ in pairs) for pairs in ranks]
    batches, total, size = [len(pairs) for pairs in ranks], max(1, sum(counts)), len(ranks)
    own = [a / max(1, b) for a, b in zip(sums, counts, strict=True)]
    return sum(sums) / total, {
        "the mean over rank 0's samples": own[0],
        "the mean of the ranks' means": sum(own) / size,
        "the sum of the ranks' means": sum(own),
        "the mean of the batches' means": sum(means) / sum(batches),
        "the mean of the batches' means of rank 0": means[0] / batches[0],
        "rank 0's batches' means, each divided by its samples": sum(
            a / max(1, b) for a, b in ranks[0]
        ),
        "the batches' means, divided by the number of samples": sum(means) / total,
        "rank 0's batches' means, divided by its samples": means[0] / max(1, counts[0]),
    }


def shows(text, value):
    """Whether a printed number is this value, to all its digits, of which it has four or more."""
    found = NUMBER.fullmatch(text)
    digits = len(re.sub(r"\D", "", text.partition("e")[0]).lstrip("0"))
    unit = 10.0 ** (int(found[2] or 0) - len(found[1]))
    return digits > 3 and abs(float(text) - value) < 0.51 * unit + 1e-6 * abs(value)


def flat(batches):
    return [sample for batch in batches for sample in batch]


def unequal(lists):
    """Places at which checksums differ between ranks, of shards between ranks with the same part.
    None stands for what is not compared.
    """
    columns = enumerate(zip(*lists, strict=False))
    return [n for n, column in columns if None not in column and differ(column)]


def differ(column):
    parts = [str(value).rpartition(" ")[0] for value in column]
    return len({*column}) > len({*parts})


def equal_share(each):
    """How many of these inputs all have, from 0 to 1."""
    return len(set.intersection(*each)) / max(1, *map(len, each))


# 3. The report, and the start


def show(text, color=None):
    """Prints a line, in an ANSI color on a terminal."""
    print(f"\033[{color}m{text}\033[0m" if color and sys.stdout.isatty() else text, flush=True)


def report(folder, settings, ended=False):
    """Prints the findings; returns the exit code. ended: that the script has, without an error."""
    files = {int(file.stem): file for file in folder.glob("*.json")}
    ranks = [json.loads(files[n].read_text(), object_hook=Record) for n in sorted(files)]
    world = max([rank.world for rank in ranks], default=settings.ranks)
    ranks = [rank for rank in ranks if rank.world == world]
    missing = [] if ended and not ranks else sorted({*range(world)} - {rank.rank for rank in ranks})
    found, name = Comparison(ranks, missing), settings.name
    steps = max((len(rank.steps) for rank in ranks), default=0)
    seconds = round(time.time() - settings.started, 1)
    found.findings.sort(key=lambda finding: [*COLORS].index(finding["level"]))
    show(f"\naudit of {name}: {world} ranks, {steps} steps, {seconds:.0f} seconds")
    for text in [*found.facts, *(f"recognized: {what}" for what in found.recognized)]:
        show(f"  {text}")
    for finding in found.findings:
        level = finding["level"]
        show(f"\n{level}  {finding['line'] or name}: {finding['what']}", COLORS[level])
        for word in ("seen", "cure", "page"):
            show(f"  {word}: {finding[word]}")
    for what in found.unchecked:
        show(f"\nNOTE: not checked: {what}")
    counts = Counter(finding["level"] for finding in found.findings)
    show("  ".join(f"{level}: {counts[level]}" for level in COLORS))
    if settings.json:
        keys = {"script": name, "ranks": world, "steps": steps, "seconds": seconds}
        keys |= {"findings": found.findings, "unchecked": found.unchecked}
        keys |= {"recognized": found.recognized, "facts": found.facts}
        write_whole(Path(settings.json), json.dumps(keys, indent=2) + "\n")
    return int(counts["ERROR"] + settings.strict * counts["WARN"] > 0)


def execute(settings, flags):
    """Runs the script in this process, which is a rank, or which starts the ranks."""
    begin(settings)
    sys.argv = [settings.name, *flags]
    sys.path[0] = run.root[:-1]
    sys.path.append(os.path.dirname(HERE))  # for processes that the script starts
    if settings.script:
        record_end(lambda: runpy.run_path(settings.script, run_name="__main__"))
    else:
        record_end(lambda: runpy.run_module(settings.name, None, "__main__", alter_sys=True))


def launched():
    """Whether a launcher has started this process as a rank. Slurm's shells are tasks of one."""
    return "RANK" in os.environ or any(
        rank in os.environ and int(os.environ.get(world, 1)) > 1
        for rank, world in zip(RANKS, WORLDS, strict=True)
    )


def source(settings):
    """The text of the script, or of the module."""
    if settings.script:
        return Path(settings.script).read_text()
    sys.path[0] = os.getcwd()
    with contextlib.suppress(ImportError, AttributeError, OSError):  # running it says so
        return Path(importlib.util.find_spec(settings.name).origin).read_text()
    return ""


def starts_ranks(text):
    """Whether a script starts its ranks itself: by spawn(), or by Process() if it does not leave
    its rank to a launcher.
    """
    with contextlib.suppress(SyntaxError):  # running it says so
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        names = {}
        for call in calls:
            if getattr(getattr(call.func, "value", None), "id", "") != "psutil":
                name = getattr(call.func, "attr", getattr(call.func, "id", ""))
                names.setdefault(name, []).append({word.arg for word in call.keywords})
        joins = names.get("init_process_group", [])
        told = any("rank" in words for words in joins) or not joins
        return bool({"spawn", "start_processes"} & {*names}) or ("Process" in names and told)
    return False


def start(settings, flags, alone):
    """Starts the ranks on this machine, as torchrun does, or a script that starts them itself;
    waits for them. Returns the exit code.
    """
    folder = Path(tempfile.mkdtemp(prefix="audit-"))
    settings.alone = alone
    settings.folder = str(folder)
    command = [sys.executable, HERE, *([] if settings.script else ["-m"]), settings.name]
    with socket.create_server(("127.0.0.1", 0)) as server:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    outer = {name: value for name, value in os.environ.items() if name not in RANKS}
    shared = {"OMP_NUM_THREADS": "1", **outer, **shared, "AUDIT": json.dumps(settings)}
    numbers, size = range(1 if alone else settings.ranks), str(settings.ranks)

    def rank(number):
        own = {"RANK": str(number), "LOCAL_RANK": str(number)}
        own |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RESTART_COUNT": "0"}
        env = shared if alone else shared | own
        return subprocess.Popen([*command, *flags], env=env, start_new_session=True)

    def interrupted(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    processes = []
    try:
        processes += map(rank, numbers)
        while any(process.poll() is None for process in processes):
            time.sleep(0.1)
            ended = [n for n, process in enumerate(processes) if process.poll() is not None]
            if not alone and not all((folder / f"{n}.json").exists() for n in ended):
                (folder / "stop").touch()  # it was killed: nobody is to wait for it
        return report(folder, settings, not any(process.returncode for process in processes))
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # ranks end when it is gone
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
        end_orphans(str(folder))
        shutil.rmtree(folder, ignore_errors=True)  # one may have written there since


def end_orphans(folder):
    """Ends what is left of an audit with this folder, on Linux. A loader's worker whose rank ended
    while it was starting waits forever: it takes its new parent for that rank.
    """
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if folder.encode() in file.read_bytes():
                os.kill(int(file.parent.name), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes to start [%(default)s]")
    add("--batches", type=int, default=8, help="of each pass over a loader [%(default)s]")
    add("--passes", type=int, default=2, help="over the training data [%(default)s]")
    add("--hang", type=float, default=30, help="seconds without progress [%(default)s]")
    add("--json", metavar="FILE", help="write the findings to this file, too")
    add("--records", metavar="FOLDER", help="under a launcher: a folder that all ranks share")
    add("--strict", action="store_true", help="exit code 1 if there is a WARN, too")
    add("--cpu", action="store_true", help="what names a GPU means the CPU")
    add("-m", action="store_true", help="the script is the name of a module, as in python -m")
    add("script", help="the training script")
    add("flags", nargs=argparse.REMAINDER, help="its own flags")
    words = sys.argv[1:]
    # deepspeed and python -m torch.distributed.launch put this in front of the script's own flags
    given = [words.pop(0)] if words and re.match("--local[-_]rank=", words[0]) else []
    args = parser.parse_args(words)
    flags = given + args.flags
    if "AUDIT" in os.environ:  # started by start()
        return execute(Record(json.loads(os.environ["AUDIT"])), flags)
    if args.ranks < 2 or args.batches < 2 or args.passes < 1 or args.hang <= 0:
        parser.error("give at least 2 ranks, 2 batches, 1 pass, and a positive number of seconds")
    if not importlib.util.find_spec("torch"):
        parser.error(f"{sys.executable} has no PyTorch: use the Python of your training")
    if not args.m and not os.path.isfile(args.script):
        parser.error(f"{args.script}: there is no such script")
    names = "ranks batches passes hang cpu strict".split()
    settings = Record({name: getattr(args, name) for name in names})
    settings.json = args.json and os.path.abspath(args.json)  # the script may change the folder
    settings |= {"script": not args.m and os.path.abspath(args.script), "name": args.script}
    settings |= {"started": time.time(), "reports": launched(), "alone": False}
    if not settings.reports:
        return start(settings, flags, starts_ranks(source(settings)))
    names = "MASTER_PORT TORCHELASTIC_RUN_ID SLURM_JOB_ID SLURM_STEP_ID".split()
    key = hashlib.sha256(str([os.environ.get(name) for name in names]).encode()).hexdigest()[:8]
    # A folder of its own, also below --records: at the end it is removed. One that an interrupted
    # audit has left would end this one.
    folder = Path(args.records or ".").absolute() / f".audit-{key}"
    if folder.exists() and folder.stat().st_mtime < settings.started - 120:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    settings.folder = str(folder)
    return execute(settings, flags)


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(HERE)
    import audit  # not as __main__, so that other processes find its classes

    sys.exit(audit.main())
