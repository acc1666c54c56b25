"""Finds silent mistakes of distributed training: runs a script on two ranks, for a few batches.

python audit.py train.py --its flags
python audit.py --ranks 4 --batches 16 -m package.train --its flags
srun --ntasks 2 python audit.py train.py --its flags    # under a launcher: rank 0 reports

The script needs no change. Its loaders end after --batches batches, and it ends after --passes
passes over the training data and two short ones, in which all ranks get equal samples. Each rank
records what it does: samples, inputs, checksums of weights and gradients, random states, its own
collectives, files, what it prints. This starts no collective, and changes no number. Then the
records are compared:

ERROR: a promise of data-parallel training is broken, as the numbers show.
WARN: a mistake, unless you mean it.  HINT: worth knowing.  NOTE: what was not checked, and why.
Exit code: 1 if there is an ERROR, 2 if audit.py was called wrongly, otherwise 0.
"""

import argparse
import builtins
import contextlib
import functools
import hashlib
import importlib.util
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
import zlib
from collections import Counter
from pathlib import Path

# Of each kind: its level, its name, and the page in docs/diffs/ that shows it; what it is, and why
# it matters; the cure.
KINDS = """
ERROR|hang|mnmc_ddp_launch.md#10-collectives-under-if-rank--0
The ranks wait for each other. All must call the same collectives, also DDP's forward, in one order.
Look for a condition around these lines that is not the same on all ranks.
ERROR|crash|mnmc_ddp_launch.md#the-pieces
The script ended with an error. What comes after it was not checked.
Run the script by itself. Without a GPU, give it its flag for CPUs.
ERROR|same samples|mnmc_ddp_launch.md#4-sharding-the-training-images
All ranks train on the same samples. Each does the work of all, so more devices save no time.
DataLoader(..., sampler=DistributedSampler(dataset)). Without a loader: another seed on each rank.
ERROR|shared samples|mnmc_ddp_launch.md#4-sharding-the-training-images
Ranks share a part of their samples. Some samples count several times in an epoch, or others never.
DistributedSampler(dataset), with this rank's number and the number of all ranks.
ERROR|split samples|pipeline.md
The ranks hold parts of one model, but read different samples: inputs meet labels of other samples.
All ranks that share one model must read the same batches, in the same order.
ERROR|other data|mnmc_ddp_launch.md#4-sharding-the-training-images
The ranks' data sets differ, but a DistributedSampler deals their indices as if they were equal.
Make the data set from the same seed, or from the same files in sorted order, on all ranks.
ERROR|one order|mnmc_ddp_launch.md#7-a-new-order-in-every-epoch
Epoch 2 has the order of epoch 1. The same samples meet in a batch again and again.
sampler.set_epoch(epoch), at the start of every epoch.
WARN|no shuffling|mnmc_ddp_launch.md#7-a-new-order-in-every-epoch
The training samples are not shuffled. Neighbors in the data set meet in every epoch.
shuffle=True, for the sampler if there is one; with set_epoch(epoch) for a DistributedSampler.
ERROR|batches|uneven_inputs.md
The ranks have different numbers of batches. When one has none left, the others hang.
drop_last=True in sampler and loader, or torch.distributed.algorithms.Join.
ERROR|steps|uneven_inputs.md
The ranks take different numbers of optimizer steps, so their weights cannot stay equal.
Decide on all ranks alike whether to step.
ERROR|weights|mnmc_ddp_launch.md#9-forward-through-ddp
The ranks' weights differ. Each rank trains a model of its own, and only one of them is saved.
(by cause)
WARN|summed gradients|comm_hooks.md
The gradients are the sum over the ranks, not the mean: more ranks take larger steps.
Divide by the world size, unless each loss is already divided by the size of the global batch.
WARN|other gradients|ring_allreduce.md
All ranks step with equal gradients, but these are not the mean of what the ranks have computed.
Compare what averages the gradients with dist.all_reduce(), for a single weight.
ERROR|other model|cpu_offload.md
The optimizer steps, but the weights that compute the loss stay the same. Training has no effect.
Give the optimizer the model's own parameters. If it has copies, copy them back after each step.
ERROR|not finite|amp.md
The weights are no longer finite numbers. From here on, all losses are NaN.
A lower learning rate, clipped gradients; with float16, a GradScaler.
WARN|sum of parts|grad_accum.md
The gradient of a step is the sum over its parts, not the mean: more parts take larger steps.
(loss / parts).backward(), or scale_grads=True for a pipeline's schedule.
ERROR|lost gradients|grad_accum.md
Each step uses the gradients of its last part only: those of the other parts are cleared before.
optimizer.zero_grad() once per step, before the loop over the parts.
HINT|rounded gradients|comm_hooks.md
The exchange rounds the gradients, as 16-bit or other compressed communication does.
Nothing, if you have chosen that. Otherwise look for a communication hook.
ERROR|summed weights|local_sgd.md
The ranks' weights are added up, but not divided: they grow by the number of ranks.
weight /= dist.get_world_size(), after dist.all_reduce(weight).
ERROR|hyperparameters|custom_optimizer.md
The ranks' optimizers have different hyperparameters, so their steps differ.
Give all ranks the same hyperparameters, by flags and by schedules.
WARN|unweighted batches|heterogeneous.md
The local batches have different sizes, but their mean losses count equally.
(loss * len(labels) * world_size / global_batch_size).backward(), or batches of equal size.
WARN|equal summands|tensor_parallel_by_hand.md
A layer adds up the same tensor of all ranks, so the result is too large by the number of ranks.
Split the weights or inputs over the ranks before the sum; or leave the sum out.
WARN|left out|accelerate_ddp.md
A part of the training samples is on no rank: an epoch is shorter than it seems.
One sampler that deals the samples: a DistributedSampler, or the library's, but not both.
ERROR|not cleared|cpu_offload.md
Each step also uses the gradients of the steps before, since backward() adds to what is there.
optimizer.zero_grad(), once per step.
WARN|same dropout|mnmc_ddp_launch.md#6-distributeddataparallel
All ranks drop the same units. The noise is that of the local batch, not of the global one.
torch.manual_seed(seed + rank), after the model is created.
WARN|same augmentation|mnmc_ddp_launch.md#8-random-numbers-for-the-augmentation
All ranks augment with the same random numbers. Rank 1 repeats the shifts and flips of rank 0.
Use another seed on each rank; or draw for the global batch, and take draws[rank::world_size].
ERROR|other weights|parameter_server.md
The ranks evaluate different weights. The result belongs to no model.
Evaluate where all ranks hold the same weights, or on one rank.
ERROR|other buffers|mnmc_ddp_launch.md#12-batchnorms-buffers
The ranks evaluate different buffers. BatchNorm's statistics are not those of the saved model.
for buffer in model.buffers(): dist.broadcast(buffer, src=0), before the evaluation.
ERROR|constant statistics|syncbn.md
BatchNorm's running statistics never change, so the evaluation normalizes by zeros and ones.
Update running_mean and running_var in the forward of training.
WARN|statistics twice|activation_checkpointing.md
A forward that backward() runs again updates BatchNorm's running statistics once more.
Restore the buffers after the second forward, or leave BatchNorm out of the checkpointed part.
WARN|wrong mean|distributed_eval.md
A result that rank 0 prints is not the mean over all samples.
Add up losses and samples over all batches and ranks (dist.all_reduce); divide once, at the end.
WARN|padding counted|pipeline.md
The evaluation's loss counts more samples than the loader gave: samples that fill a batch.
logits[: len(labels)], before the loss.
ERROR|not added up|mnmc_ddp_launch.md#13-metrics-over-all-ranks
Each rank evaluates some samples, but nothing adds up the results: rank 0 prints only its own.
dist.all_reduce() the sums of losses, hits and samples; then divide.
WARN|counted twice|mnmc_ddp_launch.md#5-sharding-the-test-images
All ranks evaluate the same samples, and then add up their results: each sample counts repeatedly.
Give each rank its own samples: sampler=range(rank, len(dataset), world_size).
HINT|evaluated by all|mnmc_ddp_launch.md#5-sharding-the-test-images
Every rank evaluates all samples. More devices make it no faster.
sampler=range(rank, len(dataset), world_size); then all_reduce() the sums.
WARN|uneven evaluation|distributed_eval.md
The evaluation repeats some samples, or leaves some out. The result depends on the number of ranks.
sampler=range(rank, len(dataset), world_size): each sample exactly once.
HINT|padded evaluation|distributed_eval.md
The evaluation uses a DistributedSampler: where samples can't be dealt evenly, it repeats some.
sampler=range(rank, len(dataset), world_size): each sample exactly once.
ERROR|one file|mnmc_ddp_launch.md#11-saving-on-rank-0
Several ranks write the same file. They can damage it, or rename it while another still writes.
if rank == 0: around it.
WARN|wrapped names|mnmc_ddp_launch.md#6-distributeddataparallel
The names in the saved file begin with a wrapper's name. A model without it cannot load the file.
Save the model that was wrapped: model.module.state_dict().
ERROR|old weights|pipeline_by_hand.md#the-pieces
A file has weights as they were before training, while another rank has trained them.
Gather the weights from the ranks that train them, before rank 0 saves.
ERROR|one device|mnmc_ddp_launch.md#2-the-process-group-and-a-device-per-rank
Several ranks use the same GPU. They share its memory and its time.
torch.cuda.set_device(local_rank), before the first use of a GPU.
WARN|small batch|syncbn.md
BatchNorm normalizes by few samples, since it uses the local batch.
A larger local batch, or torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).
HINT|other batch|heterogeneous.md
The global batch is not what a flag says.
Let the local batches add up to the flag's number, or change its name.
HINT|local batch|mnmc_ddp_launch.md#3-global-and-local-batch
The batch size is the local one, so more ranks take larger and fewer steps, at the same rate.
Divide the batch size by the world size, or choose the learning rate for the global batch.
HINT|group left|mnmc_ddp_launch.md#14-one-log-and-the-end
The script ends without destroy_process_group(). With NCCL, PyTorch warns of leaked resources.
dist.destroy_process_group(), as the last line.
""".strip().split("\n")
HERE = os.path.abspath(__file__)
RANKS = "RANK SLURM_PROCID HOROVOD_RANK OMPI_COMM_WORLD_RANK PMI_RANK".split()  # by launcher
WORLDS = "WORLD_SIZE SLURM_STEP_NUM_TASKS HOROVOD_SIZE OMPI_COMM_WORLD_SIZE PMI_SIZE".split()
SENDS = "send recv isend irecv batch_isend_irecv".split()
COMBINING = "all_reduce reduce all_gather gather all_gather_into_tensor reduce_scatter_tensor"
COMBINING = [*COMBINING.split(), "all_gather_object", "gather_object", *SENDS]
SPREADING = "broadcast scatter broadcast_object_list barrier".split()
HOROVOD = "allreduce allreduce_ allgather allgather_object broadcast_parameters broadcast_object"
REDUCING = "all_reduce allreduce allreduce_".split()
EXCHANGES = {*COMBINING, *HOROVOD.split()[:4]}  # what adds up results
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"}
CHECKED = {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33}  # steps whose weights and gradients are compared
MOST = 200_000  # samples of a pass that are compared
STYLES = {"ERROR": "bold red", "WARN": "yellow", "HINT": "cyan"}
LOSSES = "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss binary_cross_entropy"
LOSSES = [*LOSSES.split(), "binary_cross_entropy_with_logits"]
NUMBER = re.compile(r"(?<![\w.])\d+\.(\d{2,})(?:e([-+]\d+))?(?![\w.])")
LINGER = 10  # seconds that a rank waits for the others' records, once all have been told to stop


# 1. What each rank records


class Run:
    """What this process is doing, and what it has recorded."""

    def __init__(self, settings):
        self.settings, self.folder = settings, Path(settings["folder"])
        script = settings["script"]
        self.root = os.path.join(os.path.dirname(os.path.abspath(script or "x")), "")
        self.rank = next((int(os.environ[name]) for name in RANKS if name in os.environ), None)
        self.joins = self.rank is not None  # a rank, or a process that is becoming one
        self.seen = time.monotonic()  # of the last sign of progress
        self.waiting = None  # the collective that this rank is in
        self.modules = []  # whose forward is running, outermost first
        self.opening = self.current = None  # pass that is being started; of the last batch
        self.trained, self.done = set(), 0  # loaders of training passes; how many have ended
        self.inputs_due = self.evaluation_due = True  # to be recorded with the next forward
        self.step = self.nested = self.loose = 0  # optimizer steps; steps in steps; without loader
        self.forwards, self.sync = 0, True  # of DDP, since the last step; whether it averages
        self.begun, self.dropout, self.cleared = False, False, {}
        self.backwards, self.caller = 0, None  # that are running; where the last one was called
        self.model_weight = None  # the smallest one of the model that computes the loss
        self.norms = {}  # each BatchNorm, its forwards, and those that backward() runs again
        self.equal = False  # from the first pass on in which all ranks get equal samples
        self.cut = False  # whether the loader that was asked last ended before its time
        self.short = False  # whether the last training pass ended before its time
        self.ended = threading.Lock()  # taken by the first who writes the record
        names = "passes steps evaluations collectives files loose kinds losses printed faults"
        self.record = {name: [] for name in names.split()} | {"flags": {}, "model": {}}

    def progress(self):
        self.seen = time.monotonic()

    def kind(self, name):
        """Notes a kind of parallelism."""
        if name not in self.record["kinds"]:
            self.record["kinds"].append(name)

    def work(self):
        """Counts a backward or a step: a pass with some is a training pass."""
        self.progress()
        self.begun = True
        if self.rank and not (self.record.get("group") or "horovod.torch" in sys.modules):
            self.enough()  # a script for one device: one of its copies is enough
        if self.current:
            self.current["work"] += 1

    def limit(self, loader):
        """How many batches a pass over this loader has at most."""
        equal = self.done >= self.settings["passes"] and str(identity(loader)) in self.trained
        return 2 if equal else self.settings["batches"]

    def enough(self):
        """Ends the script: all has been seen."""
        self.record["cut"] = True
        raise SystemExit(0)


run = None  # the only Run of this process


def instead_of(owner, name):
    """A decorator: the function replaces owner.name, which it gets as its first argument."""

    def decorate(function):
        old = getattr(owner, name)
        new = functools.wraps(old)(lambda *args, **options: function(old, *args, **options))
        setattr(owner, name, new)
        replaced[id(old)] = new
        return new

    return decorate


replaced = {}  # what came instead of functions, by their ids


def replace_imported():
    """Replaces what a module of the user got by `from torch.distributed import all_reduce`: in a
    spawned process, it was imported before.
    """
    for module in [*sys.modules.values()]:
        if str(getattr(module, "__file__", None)).startswith(run.root):
            for name, value in [*vars(module).items()]:
                if id(value) in replaced and module.__file__ != HERE:
                    setattr(module, name, replaced[id(value)])


def guarded(function):
    """A decorator of what only records: an error in it is the audit's, and never the script's."""

    @functools.wraps(function)
    def call(*args, **options):
        try:
            return function(*args, **options)
        except Exception as error:
            text = f"{function.__name__}() of audit.py failed: {type(error).__name__}: {error}"[
                :200
            ]
            if text not in run.record["faults"]:
                run.record["faults"].append(text)

    return call


def place(frame, number=None):
    """A frame's line, if it is in the user's own files."""
    name = os.path.abspath(frame.f_code.co_filename)
    if name.startswith(run.root) and "site-packages" not in name and name != HERE:
        return f"{os.path.relpath(name, run.root)}:{number or frame.f_lineno}"
    return None


def line(frame=None):
    """The innermost line of the user's own files on a stack; None without any."""
    frame = frame or sys._getframe(1)
    while frame and not place(frame):
        frame = frame.f_back
    return frame and place(frame)


def stack():
    """All lines of the user's own files on the stack."""
    return str([place(frame) for frame, _ in traceback.walk_stack(None) if place(frame)])


def local(tensor):
    """This rank's part of a tensor: no checksum may start a collective."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def checksum(tensor):
    """Of a tensor's bytes; for a shard, behind its place in the whole tensor. None without any."""
    import torch

    if tensor.is_meta or "Flat" in type(tensor).__name__:
        return None
    data = local(tensor.detach()).cpu().reshape(-1).contiguous().view(torch.uint8)
    number = zlib.crc32(data.numpy())
    if hasattr(tensor, "to_local") and not all(p.is_replicate() for p in tensor.placements):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = tensor.device_mesh, tensor.placements
        return f"{compute_local_shape_and_global_offset(tensor.shape, mesh, placements)} {number}"
    return number


def rows(batch):
    """The checksum of each sample of a batch, by its first tensor with two dimensions or more."""
    import torch

    found, todo = [], [batch]
    while todo:
        value = todo.pop(0)
        if isinstance(value, torch.Tensor) and value.dim() and not value.is_meta:
            found.append(local(value.detach()))
        elif isinstance(value, (list, tuple, dict)):
            todo += value.values() if isinstance(value, dict) else value
    found.sort(key=lambda tensor: tensor.dim() < 2)  # stable
    return [checksum(row) for row in found[0].cpu()] if found else []


def unpack(dataset, indices):
    """The data set that a Subset of a data set is about, and what the indices are there."""
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        indices = [dataset.indices[i] if type(i) is int else i for i in indices]
        dataset = dataset.dataset
    return dataset, [i if isinstance(i, int) else str(i) for i in indices]


def contents(dataset):
    """The first items of all lists and tensors that a data set has. It is not asked for samples,
    since these may draw random numbers.
    """
    found = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, (list, tuple)) or type(value).__name__ in ("Tensor", "ndarray"):
            with contextlib.suppress(IndexError):  # a tensor of a single number
                found[name] = f"{len(value)} {value[:8]}"
    return {name: text for name, text in found.items() if " at 0x" not in text}


def identity(loader):
    """The same for a loader that is made anew in each epoch."""
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    return [type(loader.dataset).__name__, size, type(loader.sampler).__name__]


def watch_loaders():
    from torch.utils.data import DataLoader, DistributedSampler, dataloader

    iterator_class = dataloader._BaseDataLoaderIter

    @guarded
    def open_pass(loader):
        trained, sampler = str(identity(loader)) in run.trained, loader.sampler
        if trained and run.done >= run.settings["passes"] + 2:
            run.enough()
        entry = {"line": line(), "batches": 0, "work": 0, "evals": 0, "rows": [], "inputs": []}
        data, shown = unpack(loader.dataset, [0, -1] if hasattr(loader.dataset, "indices") else [])
        entry |= {"name": identity(loader), "contents": contents(data), "part": shown}
        entry |= {"limit": run.limit(loader), "complete": False, "sampler": type(sampler).__name__}
        entry["equal"] = trained and run.done >= run.settings["passes"]
        run.equal |= entry["equal"]
        entry["indices"] = [] if loader._dataset_kind == dataloader._DatasetKind.Map else None
        if isinstance(sampler, DistributedSampler):
            entry["epoch"] = sampler.epoch
        entry["dealt"] = dealt(loader)
        run.record["passes"].append(entry)
        return entry

    def dealt(sampler):
        """Whether a DistributedSampler is somewhere in it."""
        inner = [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
        inner = [sampler for sampler in inner if sampler is not None]
        return isinstance(sampler, DistributedSampler) or any(map(dealt, inner))

    @instead_of(DataLoader, "__iter__")
    def iterate(old, loader):
        watch_horovod()
        run.opening = entry = open_pass(loader)
        iterator = old(loader)  # with workers, this already asks for indices
        run.opening, iterator.entry = None, entry
        return iterator

    @instead_of(iterator_class, "_next_index")
    def next_index(old, iterator):
        index, entry = old(iterator), run.opening or getattr(iterator, "entry", None)
        if entry and entry["indices"] is not None:
            if entry["equal"] and isinstance(index, list) and index and type(index[0]) is int:
                # Equal samples on all ranks. In the second batch, odd ranks get them in another
                # order, to tell random numbers by place from random numbers by sample.
                number, size = len(entry["indices"]), entry["name"][1]
                index = [(number * len(index) + k) % size for k in range(len(index))]
                index = index[::-1] if number % 2 and run.rank % 2 else index
            note(iterator, entry, index)
        return index

    @instead_of(iterator_class, "__next__")
    def next_batch(old, iterator):
        entry = getattr(iterator, "entry", None)
        if entry is None:
            return old(iterator)
        try:
            run.cut = entry["batches"] == entry["limit"]
            if run.cut:
                raise StopIteration
            batch = old(iterator)
        except StopIteration:
            end(iterator, entry)
            raise
        note_batch(entry, batch)
        return batch

    @guarded
    def note_batch(entry, batch):
        entry["batches"] += 1
        entry["inputs"].append([])
        run.current, run.inputs_due = entry, True
        run.progress()
        entry["rows"].append([])
        entry["rows"][-1] = rows(batch)

    @guarded
    def note(iterator, entry, index):
        index = index if isinstance(index, (list, tuple)) else [index]
        entry["indices"].append(unpack(iterator._dataset, index)[1])

    @guarded
    def end(iterator, entry):
        if entry["complete"]:
            return
        entry["complete"], run.current = True, None
        if entry["indices"] and not entry["equal"]:
            for index in iterator._sampler_iter:  # the rest of the pass, without loading it
                note(iterator, entry, index)
                if len(entry["indices"]) * len(entry["indices"][0]) > MOST:
                    break
        if entry["work"]:
            run.short = entry["batches"] == entry["limit"] != len(entry["indices"] or [])
            run.done += 1
            run.trained.add(str(entry["name"]))


def watch_steps():
    import torch
    from torch.optim import optimizer as optim

    probes = {}  # of each optimizer: its smallest weight, whose gradients are looked at
    sums = {}  # of the gradients that this rank has computed for it: since the last step, and since
    # something cleared them; and the calls of backward() that computed them

    def weights(optimizer):
        return [weight for group in optimizer.param_groups for weight in group["params"]]

    def plain(group):
        values = {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in group.items()}
        return {k: v for k, v in values.items() if isinstance(v, (int, float, str, tuple))}

    def before(optimizer, args, options):
        run.nested += 1
        if run.nested == 1:  # else the optimizer within a ZeroRedundancyOptimizer, for example
            note_before(optimizer)

    def after(optimizer, args, options):
        run.nested -= 1
        if run.nested == 0:
            note_after(optimizer)

    @guarded
    def note_before(optimizer):
        watch_horovod()
        run.work()
        run.loose += run.current is None and not run.done
        most = run.settings["batches"] * run.settings["passes"]
        if run.loose > most or run.done >= run.settings["passes"] + 2:
            run.enough()
        run.step += 1
        entry = {"step": run.step, "line": line(), "forwards": run.forwards, "sync": run.sync}
        entry["cleared"] = run.cleared.get(id(optimizer))
        own = weights(optimizer)
        if any(weight is run.model_weight for weight in own):
            probes.pop("model", None)
        elif run.step == 1 and run.model_weight is not None:
            probes["model"] = run.model_weight  # the optimizer has copies of the weights
        if "model" in probes and run.cleared.get("model") is False:
            entry["cleared"] = False
        run.record["steps"].append(entry)
        run.forwards, computed = 0, None
        if id(optimizer) in probes and probes[id(optimizer)].grad is not None:
            computed = sums.pop(id(optimizer), None)
        if run.step not in CHECKED or run.equal:
            return
        entry["sizes"] = [weight.numel() for weight in own]
        entry["before"] = [checksum(weight) for weight in own]
        entry["empty"] = all(weight.grad is None for weight in own)
        if run.step == 1:
            parts = [None if w.is_meta else local(w).flatten() for w in own]
            same = [n for n, w in enumerate(parts) if w is not None and bool((w == w[:1]).all())]
            entry["constant"] = same
        entry["grads"] = [w.grad if w.grad is None else checksum(w.grad) for w in own]
        entry["settings"] = [plain(group) for group in optimizer.param_groups]
        gpus = torch.cuda.is_initialized()
        if computed:
            grad = local(probes[id(optimizer)].grad)
            entry["final"], entry["exact"] = grad.flatten()[:512].tolist(), grad.element_size() > 2
            entry["local"] = [own.tolist() for own in computed[:2]]
            entry["parts"] = max(Counter(place for place, _ in computed[2]).values())
            entry["plain"] = all(plain for _, plain in computed[2])
        entry["random"] = checksum(torch.cuda.get_rng_state() if gpus else torch.get_rng_state())
        if any(type(value) is not int for value in entry["before"]):
            run.kind("pipeline" if any(weight.is_meta for weight in own) else "shards")
        entry["values"] = [values(own)]
        norms = run.norms.values()
        entry["norms"] = [[int(norm.num_batches_tracked), *counts] for norm, *counts in norms]
        if any(weight.is_cuda for weight in own):
            names = [socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")]
            run.record["device"] = [*names, next(str(w.device) for w in own if w.is_cuda)]

    def size(weight):
        """To choose a small weight, but not one of a few numbers."""
        return weight.numel() < 8, weight.numel()

    def values(own):
        """Of a small weight."""
        own = [local(weight.detach()).flatten() for weight in own if not weight.is_meta]
        return min(own, key=size)[:512].tolist() if own else []

    @guarded
    def note_after(optimizer):
        own, entry, run.inputs_due = weights(optimizer), run.record["steps"][-1], True
        if "before" in entry:
            entry["values"].append(values(own))
            entry["after"], entry["dropout"] = [checksum(weight) for weight in own], run.dropout
            finite = [local(w).isfinite().all() for w in own if not w.is_meta]
            entry["finite"] = bool(torch.stack(finite).all())
        run.cleared |= {id(optimizer): None, "model": None}  # not known before the next backward
        with_grad = [w for w in own if w.grad is not None and w.requires_grad]
        if with_grad and id(optimizer) not in probes:
            probe = probes[id(optimizer)] = min(with_grad, key=size)
            probe.register_hook(functools.partial(add, id(optimizer)))

    @guarded
    def add(name, gradient):
        new = local(gradient.detach()).flatten()[:512].double()
        total, kept, calls = sums.get(name, (0, 0, []))
        caller = run.caller if run.backwards else [stack(), False]
        sums[name] = [total + new, kept + new, [*calls, caller]]

    @instead_of(torch.autograd, "backward")
    def backward(old, *args, **options):
        kept = begin_backward(args[0] if args else options.get("tensors"))
        run.backwards += 1
        try:
            old(*args, **options)
        finally:
            run.backwards -= 1
        end_backward(kept or {})

    @guarded
    def begin_backward(roots):
        run.work()
        root = (roots if isinstance(roots, torch.Tensor) else roots[0]).grad_fn
        mean = getattr(root, "_saved_reduction", 0) == 1 or type(root).__name__ == "MeanBackward0"
        run.caller = [stack(), mean]
        run.inputs_due = True
        kept = {}  # gradients that are there already
        for name, weight in probes.items():
            empty = weight.grad is None or not local(weight.grad).any()
            run.cleared[name] = bool(run.cleared.get(name) or empty)
            if empty and name in sums:
                sums[name][1] = 0 * sums[name][1]
            if not run.cleared[name]:
                kept[name] = weight.grad, weight.grad._version
        return kept

    @guarded
    def end_backward(kept):
        for name, (grad, version) in kept.items():  # unchanged: it will be overwritten later
            run.cleared[name] = bool(run.cleared[name] or grad._version == version)

    optim.register_optimizer_step_pre_hook(before)
    optim.register_optimizer_step_post_hook(after)


def watch_models():
    import torch
    from torch.nn.modules import batchnorm, module
    from torch.nn.parallel import DistributedDataParallel

    @instead_of(torch, "compile")
    def compiled(old, *args, **options):
        """Hooks don't go with compiled code, and compiling takes a minute."""
        run.record["faults"].append("what torch.compile() makes of the model: it runs as it is")
        torch.compiler.set_stance("force_eager")
        return old(*args, **options)

    @instead_of(DistributedDataParallel, "__init__")
    def wrap(old, model, *args, **options):
        run.kind("ddp")
        old(model, *args, **options)

    @instead_of(DistributedDataParallel, "forward")
    def forward(old, model, *args, **options):
        run.forwards += 1
        run.sync = model.require_backward_grad_sync
        return old(model, *args, **options)

    @instead_of(torch.nn.functional, "dropout")
    def dropout(old, input, p=0.5, training=True, inplace=False):
        run.dropout |= bool(training and p)
        return old(input, p, training, inplace)

    def begins(model, args):
        if not torch.compiler.is_compiling():
            run.modules.append(model)
            note_forward(model, args)

    @guarded
    def note_forward(model, args):
        run.progress()
        if any(re.match("FSDP|FullyShard", base.__name__) for base in type(model).__mro__):
            run.kind("fsdp")
        if model.training and torch.is_grad_enabled():
            run.evaluation_due = True
            if isinstance(model, batchnorm._BatchNorm) and model.num_batches_tracked is not None:
                run.norms.setdefault(id(model), [model, 0, 0])[1 + (run.backwards > 0)] += 1
            if isinstance(model, batchnorm._BatchNorm) and "Sync" not in type(model).__name__:
                least = run.record.get("batchnorm", len(args[0]))
                run.record["batchnorm"] = min(least, len(args[0]))
            if run.inputs_due and (found := rows(args)):
                note_inputs(model, found)
        elif all(type(outer).__name__ in WRAPPERS for outer in run.modules[:-1]):
            if run.current:
                run.current["evals"] += 1
            if type(model).__name__ not in WRAPPERS and not model.training:
                note_evaluation(model)

    def note_inputs(model, found):
        run.inputs_due = False
        if not run.current:
            run.record["loose"].append([f"{run.step} {row}" for row in found])
        else:
            run.current["inputs"][-1] += found
        if run.model_weight is None:
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            run.model_weight = min(trained, key=lambda weight: weight.numel(), default=None)
        later = int(run.done > 0 or run.step >= 3)
        if later not in run.record["model"]:
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            run.record["model"][later] = [checksum(weight) for weight in trained]

    def note_evaluation(model):
        if (
            run.evaluation_due
            and run.begun
            and not run.equal
            and len(run.record["evaluations"]) < 8
        ):
            run.evaluation_due, entry = False, {"line": line(), "done": run.done}
            entry["weights"] = {name: checksum(w) for name, w in model.named_parameters()}
            entry["buffers"] = {name: checksum(b) for name, b in model.named_buffers()}
            norms = [m for m in model.modules() if getattr(m, "running_var", None) is not None]
            same = [bool((m.running_var == 1).all() and not m.running_mean.any()) for m in norms]
            entry |= {"constant": same if run.norms else [], "short": run.short}
            run.record["evaluations"].append(entry)

    def ends(model, args, output):
        if run.modules and run.modules[-1] is model:
            run.modules.pop()

    module.register_module_forward_pre_hook(begins)
    module.register_module_forward_hook(ends, always_call=True)


def collective(name, old, *args, **options):
    """A call of a collective."""
    if run.waiting:  # a part of another one
        return old(*args, **options)
    note_call(name, args, options, place(sys._getframe(2)))
    run.waiting = name
    run.progress()
    try:
        return old(*args, **options)
    finally:
        run.waiting = None
        run.progress()


@guarded
def note_call(name, args, options, direct):
    """direct: the script's line, if the call is there and not in a library."""
    import torch
    import torch.distributed as dist
    from torch.nn.modules.batchnorm import _BatchNorm

    entry = {"name": name, "line": line(), "step": run.step}
    entry["pass"] = len(run.record["passes"]) - 1
    values = [*args, *options.values()]
    groups = {value for value in values if isinstance(value, dist.ProcessGroup)}
    if direct and name in REDUCING:
        tensor = next(value for value in values if isinstance(value, torch.Tensor))
        members = [dist.get_process_group_ranks(group) for group in groups]
        entry["group"] = members[0] if members else []
        if run.modules or run.backwards:
            entry["where"] = "backward" if run.backwards else "forward"
            if run.step < 3 and tensor.any():
                entry["sum"] = checksum(tensor)
        else:
            entry["values"] = local(tensor).flatten().tolist() if tensor.numel() <= 16 else None
    inner = run.modules[-1] if run.modules else None
    if inner is not None and inner.training and not isinstance(inner, _BatchNorm):
        run.kind("forward")  # layers exchange data
    run.record["collectives"].append(entry)


def watch_collectives():
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join

    for name in [*COMBINING, *SPREADING]:
        new = instead_of(dist, name)(functools.partial(collective, name))
        if name in ("isend", "irecv"):  # P2POp compares them with these
            setattr(dist.distributed_c10d, name, new)

    @instead_of(dist, "init_process_group")
    def begin(old, *args, **options):
        run.joins, run.waiting = True, "init_process_group"
        run.progress()
        old(*args, **options)
        run.rank, run.waiting = dist.get_rank(), None
        run.record |= {"group": True, "world": dist.get_world_size()}
        run.progress()

    @instead_of(Join, "__enter__")
    def enter(old, context):
        run.kind("join")
        return old(context)


def watch_horovod():
    """The same for Horovod, once the script has imported it."""
    horovod = sys.modules.get("horovod.torch")
    for name in HOROVOD.split() if horovod and not hasattr(horovod, "audited") else []:
        instead_of(horovod, name)(functools.partial(collective, name))
        horovod.audited = True


def watch_results():
    """What evaluations compute, and which numbers are printed then."""
    import torch

    @guarded
    def note_loss(name, given, found, reduction):
        if torch.is_grad_enabled() or not run.step or run.equal:
            return
        number, where = len(given), [run.step, line(), len(run.record["passes"]) - 1]
        value = float(found.mean()) if reduction != "sum" else float(found) / max(1, number)
        if not run.record["losses"] or run.record["losses"][-1]["where"] != where:
            run.record["losses"].append({"where": where, "losses": []})
        run.record["losses"][-1]["losses"].append([value, number])

    def loss(name, old, input, target, *args, **options):
        found = old(input, target, *args, **options)
        note_loss(name, target, found, options.get("reduction", "mean"))
        return found

    @guarded
    def note_numbers(text):
        losses = run.record["losses"]
        if losses and losses[-1]["where"][0] == run.step and len(run.record["printed"]) < 1000:
            run.record["printed"] += [[run.step, m[0]] for m in NUMBER.finditer(str(text))]

    def write(old, text):
        note_numbers(text)
        return old(text)

    for name in LOSSES:
        instead_of(torch.nn.functional, name)(functools.partial(loss, name))
    for stream in (sys.stdout, sys.stderr):
        instead_of(stream, "write")(write)


def watch_the_rest():
    """Files, the flags of the script, and the processes that it starts."""
    import torch

    @guarded
    def note(file, at, what=None):
        """what: that is written, if it is known."""
        if at and isinstance(file, (str, Path)) and not str(file).startswith("/dev/"):
            parts = [what, *what.values()] if isinstance(what, dict) else []
            parts = [part for part in parts if isinstance(part, dict)]
            names = [
                re.match(r"(module|_orig_mod)\.", str(name)) for part in parts for name in part
            ]
            entry = {"path": os.path.abspath(file), "host": socket.gethostname(), "line": at}
            entry |= {"prefix": [found[0] for found in names if found][:1], "step": run.step}
            tensors = [v for part in parts for v in part.values() if isinstance(v, torch.Tensor)]
            entry["sums"] = sorted({str(checksum(tensor)) for tensor in tensors})
            run.record["files"].append(entry)

    @instead_of(torch, "save")
    def save(old, what, file, *args, **options):
        note(file, line(), what)
        return old(what, file, *args, **options)

    @instead_of(builtins, "open")
    def openly(old, file, mode="r", *args, **options):
        if "w" in mode or "x" in mode:
            note(file, place(sys._getframe(2)))
        return old(file, mode, *args, **options)

    @instead_of(argparse.ArgumentParser, "parse_known_args")
    def parse(old, parser, *args, **options):
        found = old(parser, *args, **options)
        run.record["flags"] |= {k: v for k, v in vars(found[0]).items() if type(v) is int}
        return found

    @instead_of(multiprocessing.process.BaseProcess, "__init__")
    def create(old, process, group=None, target=None, name=None, args=(), **options):
        module = getattr(target, "__module__", None) or ""
        if module == "torch.multiprocessing.spawn":
            args = (Watched(args[0], run.settings), *args[1:])
        elif callable(target) and not module.startswith(("torch.", "multiprocessing.")):
            target = Watched(target, run.settings)
        old(process, group, target, name, args, **options)


class Watched:
    """What a process that the script starts runs. It is a rank if it joins a group."""

    def __init__(self, function, settings):
        self.function, self.settings = function, settings

    def __call__(self, *args, **options):
        watch(self.settings)
        run.rank, run.joins = None, False
        record_end(functools.partial(self.function, *args, **options))


def watch(settings):
    """From now on, this process is recorded."""
    global run
    forked, run = run is not None, Run(settings)
    if not forked:
        watch_loaders()
        watch_steps()
        watch_models()
        watch_collectives()
        watch_results()
        watch_the_rest()
    replace_imported()
    threading.Thread(target=watch_for_hangs, args=[os.getppid()], daemon=True).start()


def watch_for_hangs(parent):
    """A thread: ends this rank if it hangs, or if another one does or has failed."""
    since, began, used, most = None, 0, 0, run.settings["hang"]
    thread = threading.main_thread().ident
    while True:
        time.sleep(0.1)
        if run.ended.locked():
            return
        if os.getppid() != parent or not run.folder.exists():  # the audit was interrupted
            os._exit(1)
        stack = sys._current_frames()[thread]
        now, at = time.monotonic(), [frame.f_lasti for frame, _ in traceback.walk_stack(stack)]
        if since != (run.seen, at):
            since, began, used = (run.seen, at), now, time.process_time()
        # A rank that computes gets more time. On GPUs, one that waits uses its CPU, too. One that
        # polls changes its place.
        idle, computes = now - began, time.process_time() - used > (now - began) / 10
        hangs = idle > (3 * most if computes else most) or now - run.seen > 10 * most
        if run.joins and (hangs or (run.folder / "stop").exists()):
            run.record["waits"] = {"line": line(stack), "in": run.waiting}
            (run.folder / "stop").touch()
            leave()


def record_end(function):
    """Calls a function. If that made this process a rank, writes its record, and ends it."""
    try:
        function()
        import torch.distributed as dist

        run.record["left"] = dist.is_initialized()
    except SystemExit as end:
        if end.code not in (None, 0):
            run.record["error"] = {"text": f"exit: {end.code}", "line": None}
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        traceback.print_exc()
        lines = [at for f in traceback.walk_tb(error.__traceback__) if (at := place(*f))]
        text = f"{type(error).__name__}: {error}"[:300]
        run.record["error"] = {"text": text, "line": lines[-1] if lines else None}
        strict = StopIteration in (type(error), type(error.__cause__)) or "zip() arg" in str(error)
        if run.cut and strict:
            run.record["cut"] = run.record.pop("error")["line"]
            run.record["faults"].append(f"{run.record['cut']}: needs all batches: give --batches")
    if "error" in run.record:
        (run.folder / "stop").touch()  # nobody is to wait for this rank
    if run.joins or "error" in run.record:
        leave()


def leave():
    """Writes the record, waits a moment for those of the others, and ends this process."""
    run.ended.acquire()  # and never released
    number, record = run.rank or 0, run.record
    world = next((int(os.environ[name]) for name in WORLDS if name in os.environ), 1)
    defaults = {"group": "horovod.torch" in sys.modules, "world": world, "rank": number}
    part = run.folder / f"{number}.part"
    part.write_text(json.dumps(defaults | record))
    part.replace(run.folder / f"{number}.json")
    reports, code = run.settings["reports"] and number == 0, 0
    # The others find their own hangs. Only one that was killed never writes a record.
    since, most = time.monotonic(), 10 + 3 * run.settings["hang"]
    while len([*run.folder.glob("*.json")]) < record.get("world", world) and run.folder.exists():
        stopped = (run.folder / "stop").exists()  # the others end, too, if they still can
        if time.monotonic() - since > (LINGER if stopped else most):
            break
        time.sleep(0.05)
    for process in multiprocessing.active_children():  # a loader's workers
        process.terminate()
    if reports:
        code = report(run.folder, run.settings)
        shutil.rmtree(run.folder, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# 2. What the records show


class Comparison:
    """What the ranks' records show together."""

    def __init__(self, ranks, missing):
        self.ranks, self.missing = ranks, missing
        self.findings, self.unchecked, self.recognized, self.facts = [], [], [], []
        self.kinds = {kind for rank in ranks for kind in rank["kinds"]}
        self.compare_ends()
        self.unchecked += sorted({fault for rank in ranks for fault in rank["faults"]})
        if not any(rank["group"] for rank in ranks):
            why = "the script joins no process group, so one copy of it was run, on one device"
            self.unchecked.append(f"all that compares ranks: {why}")
            self.ranks = ranks[:1]
        if not self.ranks:
            return
        self.recognize()
        checks = [self.compare_samples, self.compare_weights, self.compare_augmentation]
        checks += [self.compare_evaluations, self.compare_files]
        checks = checks if len(self.ranks) > 1 else []
        for check in [*checks, self.compare_gradients, self.compare_printed, self.look_at_each]:
            try:
                check()
            except Exception as error:  # of the audit, not of the script
                text = f"{check.__name__}() of audit.py failed: {type(error).__name__}: {error}"
                self.unchecked.append(text)

    def find(self, name, line, seen, cure=None, level=None):
        """Adds a finding; each kind once per line."""
        if any((f["kind"], f["line"]) == (name, line) for f in self.findings):
            return
        head = next(n for n, text in enumerate(KINDS) if f"|{name}|" in text)
        usual, _, page = KINDS[head].split("|")
        finding = {"level": level or usual, "kind": name, "line": line, "what": KINDS[head + 1]}
        finding |= {"seen": seen, "cure": cure or KINDS[head + 2], "page": f"docs/diffs/{page}"}
        self.findings.append(finding)

    def found(self, *names):
        return any(finding["kind"] in names for finding in self.findings)

    def compare_ends(self):
        """Crashes and hangs. A rank whose connection another one's end closed has waited for it."""
        places, said = [], []
        closed = re.compile("[Cc]onnection (closed|reset|refused)|Broken pipe")
        for rank in self.ranks:
            number, error, waits = rank["rank"], rank.get("error"), rank.get("waits")
            if error and "No module named" in error["text"]:
                return self.unchecked.append(f"{error['line']}: {error['text']}")
            if error and not closed.search(error["text"]):
                self.find("crash", error["line"], f"rank {number}: {error['text']}")
            elif error or waits:
                at = (error or waits)["line"] or "no line of the script"
                call = f", in {waits['in']}()" if waits and waits["in"] else ""
                places.append(at)
                said.append(f"rank {number} waits at {at}{call}")
            else:
                said.append(f"rank {number} {'needs no more' if rank.get('cut') else 'has ended'}")
        said += [f"rank {number} never came, or was killed" for number in self.missing]
        if self.found("crash"):
            self.findings[0]["seen"] += "".join(f"; {words}" for words in said)
        elif places or self.missing:
            self.find("hang", places[0] if places else None, "; ".join(said))
        return None

    def recognize(self):
        """Kinds of parallelism that break the rules of data parallelism by design."""
        steps = [len(rank["steps"]) for rank in self.ranks]
        sends = all({c["name"] for c in rank["collectives"]} & {*SENDS} for rank in self.ranks)
        first = [rank["steps"][0] for rank in self.ranks if rank["steps"]]
        alike = len({str(step["sizes"]) for step in first}) == 1
        self.server = sends and 0 in steps and any(steps)
        self.own = set()  # numbers of weights that differ by design
        if "forward" in self.kinds and alike:
            self.own = set(unequal([step["before"] for step in first]))
            self.own |= set(first[0]["constant"]) if self.own else set()  # nobody can tell
        shards = "shards" in self.kinds and "fsdp" not in self.kinds
        self.split = shards or "pipeline" in self.kinds or bool(self.own) or (sends and not alike)
        self.rarely = False  # whether weights are averaged only from time to time
        self.one_replica = False  # whether all ranks of a split model train on the same samples
        self.alike = False  # whether all ranks read the same samples, by design
        self.split = self.split and not self.server  # one model, its layers split over the ranks
        self.exchange = self.split or "forward" in self.kinds  # layers that exchange data
        for true, what in (
            (self.server, "a parameter server: only that rank takes steps"),
            (self.split, "one model, split over the ranks: its parts are not compared"),
            ("fsdp" in self.kinds, "FSDP: sharded weights are not compared"),
            ("join" in self.kinds, "Join: the ranks may have different numbers of batches"),
        ):
            self.recognized += [what] * bool(true)

    def compare_samples(self):
        ranks = [rank for rank in self.ranks if not (self.server and rank["steps"])]
        training = [[p for p in r["passes"] if p["work"] and not p["equal"]] for r in ranks]
        if len(ranks) < 2:
            return self.unchecked.append("samples: only one rank trains")
        if not all(training):
            return self.compare_inputs(ranks)
        first = [passes[0] for passes in training]
        one, at = first[0], first[0]["line"]
        names = {name for entry in first for name in entry["contents"]}
        other = [n for n in sorted(names) if len({p["contents"].get(n) for p in first}) > 1]
        known = all(entry["indices"] is not None for entry in first) and not other
        key = "indices" if known else "rows"
        if other and all("epoch" in entry for entry in first):
            self.find("other data", at, f"{', '.join(other)} of {one['name'][0]}: other contents")
        elif not known:
            why = "each rank has data of its own" if other else "the loader has no indices"
            self.unchecked.append(f"{at}: {why}, so only the first batches were compared")
        counts = [len(entry["indices"] or entry["rows"]) for entry in first]
        whole = all(entry["complete"] for entry in first)
        if whole and len(set(counts)) > 1 and "join" not in self.kinds:
            self.find("batches", at, f"batches of the ranks in epoch 1: {counts}")
        samples = [flat(entry[key]) for entry in first]
        if not all(samples):
            return self.unchecked.append(f"{at}: samples: the batches have no tensors")
        self.compare_sets(at, one["sampler"], samples)
        if not any(self.compare_orders(passes, key) for passes in training):
            if max(map(len, training)) < 2:
                self.unchecked.append(f"{at}: orders of later epochs: only one epoch was seen")
        sizes = [len(entry["rows"][0]) for entry in first]
        total = sizes[0] if self.split or self.alike else sum(sizes)
        self.facts.append(f"{counts[0]} steps per epoch; global batch {total}, local {sizes}")
        flags = [n for n, v in ranks[0]["flags"].items() if "batch" in n and v == sizes[0]]
        if flags and total > sizes[0]:
            self.find("local batch", at, f"{flags[0]}={sizes[0]}, but the ranks take {total}")
        given = {n: v for n, v in ranks[0]["flags"].items() if "batch" in n and v > 1}
        if given and not {total, *sizes} & {*given.values()}:
            self.find("other batch", at, f"{given}, but the ranks take {total}: {sizes}")
        if known and whole and all(entry["dealt"] for entry in first):
            size, used = one["name"][1], len(set(flat(samples)))
            if max(map(len, samples)) < MOST and size - used > max(2 * total, 0.1 * size):
                self.find("left out", at, f"{size - used:,} of {size:,} samples are on no rank")
        self.compare_sizes(at, first)
        return None

    def compare_sizes(self, at, first):
        """Whether mean losses of batches of different sizes count equally."""
        each = [[len(batch) for batch in entry["indices"] or entry["rows"]] for entry in first]
        sizes = [*itertools.zip_longest(*each, fillvalue=0)]
        uneven = [n for n, row in enumerate(sizes) if max(row) - min(row) > 1]
        plain = [step.get("plain") for rank in self.ranks for step in rank["steps"]]
        if uneven and not self.exchange and any(plain):
            text = f"batch {uneven[0] + 1} of the ranks has {[*sizes[uneven[0]]]} samples"
            self.find("unweighted batches", at, f"{text}, and each loss is their plain mean")

    def compare_sets(self, at, source, samples):
        """Which samples of an epoch, or of its first batches, several ranks train on."""
        owners = Counter(sample for own in samples for sample in set(own))
        shared, total = sum(n > 1 for n in owners.values()), len(owners)
        seen = f"{shared:,} of {total:,} samples are on several ranks ({source})"
        if self.split:  # ranks of one model read the same, those of another one other samples
            groups = {str(own): set(own) for own in samples}.values()
            self.one_replica = len(groups) == 1
            if len(groups) > 1 and (len(groups) == len(samples) or sum(map(len, groups)) > total):
                self.find("split samples", at, f"{seen}, but not in the same order")
        elif shared > 0.9 * total:
            if self.exchange:
                same = "the same samples on all ranks, whose layers exchange data"
                self.recognized.append(f"{same}: taken for parts of each sample")
                self.alike = True
            else:
                self.find("same samples", at, seen)
        elif shared > len(samples):  # fewer: a DistributedSampler fills the last batch
            again = any(len(own) - len(set(own)) > len(samples) for own in samples)
            self.find("shared samples", at, seen, level="WARN" if again else None)

    def compare_orders(self, passes, key):
        """Whether the first two epochs of a rank have the same order."""
        if len(passes) < 2 or passes[0]["name"] != passes[1]["name"] or passes[0]["batches"] < 2:
            return False
        one, two = (flat(entry[key]) for entry in passes[:2])
        length, epochs = min(len(one), len(two)), [entry.get("epoch") for entry in passes[:2]]
        if one[:length] != two[:length]:
            return False
        seen = f"{length:,} samples come in the same order"
        seen += f"; the sampler's epochs were {epochs}" if None not in epochs else ""
        plain = None in epochs or (key == "indices" and one == sorted(one))
        self.find("no shuffling" if plain else "one order", passes[0]["line"], seen)
        return True

    def compare_inputs(self, ranks):
        """The samples of a script that trains without a loader."""
        steps = min(len(rank["loose"]) for rank in ranks)
        if not steps:
            return self.unchecked.append("samples: neither a loader nor a model's inputs were seen")
        samples = [flat(rank["loose"][:steps]) for rank in ranks]
        self.unchecked.append(f"samples: no loader: the inputs of {steps} batches were compared")
        if not self.split and ranks[0]["steps"]:  # samples of one step
            self.compare_sets(ranks[0]["steps"][0]["line"], "no loader", samples)
        return None

    def compare_weights(self):
        steps, taken = [rank["steps"] for rank in self.ranks], [len(r["steps"]) for r in self.ranks]
        early = self.found("crash") or (
            self.found("hang") and not any(r.get("cut") for r in self.ranks)
        )
        usual = not (self.server or "join" in self.kinds or early)
        if len(set(taken)) > 1 and usual:
            at = next(own[0]["line"] for own in steps if own)
            self.find("steps", at, f"steps of the ranks: {taken}")
        if not all(taken):
            return self.unchecked.append("weights: not all ranks take steps")
        if len({str(own[0]["sizes"]) for own in steps}) > 1:
            return self.unchecked.append("weights: each rank's optimizer has others")
        steps = [each for each in zip(*steps, strict=False) if all("after" in s for s in each)]
        names = [n for n in steps[0][0]["settings"][0] if n != "params"] if steps else []
        later = [[s["before"] for s in each] for each in steps]
        later += [[[*e["weights"].values()] for e in each] for each in self.evaluations()]
        for each, name in itertools.product(steps, names):
            values = [s["settings"][0].get(name) for s in each]
            if len({*map(str, values)}) > 1 and not self.found("hyperparameters"):
                text = f"step {each[0]['step']}: {name} is {values}"
                self.find("hyperparameters", each[0]["line"], text)
        for number, each in enumerate(steps, start=1):
            differ = [n for n in unequal([s["after"] for s in each]) if n not in self.own]
            if differ and any(not unequal(weights) and weights[0] for weights in later[number:]):
                self.find_summed(steps)
                self.rarely = True
                return self.recognized.append("weights that are averaged only from time to time")
            if differ:
                return self.find_weights(each, len(differ))
        for each in steps:
            dropped = all(s["dropout"] for s in each) and len({s["random"] for s in each}) == 1
            if dropped and not self.exchange:
                self.find(
                    "same dropout", each[0]["line"], f"equal random states, step {each[0]['step']}"
                )
        return None

    def find_summed(self, steps):
        """Whether weights that are averaged from time to time are in truth added up."""
        for each, then in itertools.pairwise(steps):
            ends, begins = ([s["values"][n] for s in own] for n, own in ((1, each), (0, then)))
            once = all(s["step"] == t["step"] - 1 for s, t in zip(each, then, strict=True))
            if once and len({*map(str, ends)}) > 1 and len({*map(str, begins)}) == 1:
                cosine, factor, _ = alike(mean(ends), begins[0])
                if cosine > 0.99 and abs(factor / len(each) - 1) < 0.01:
                    text = f"before step {then[0]['step']}, they are {factor:.2f} times their mean"
                    return self.find("summed weights", then[0]["line"], text)
        return None

    def compare_gradients(self):
        """Whether gradients are the mean of what was computed, over ranks and parts of a batch."""
        if self.server or {"join", "fsdp"} & self.kinds:
            return
        for each in zip(*(rank["steps"] for rank in self.ranks), strict=False):
            groups = {}  # ranks that have the same gradient
            for step in each:
                if any(step.get("final", [])):
                    groups.setdefault(str(step["final"]), []).append(step)
            if any(self.look_at_gradients(group) for group in groups.values()):
                break  # the first one tells

    def look_at_gradients(self, group):
        final, size, parts = group[0]["final"], len(group), min(step["parts"] for step in group)
        at, where = group[0]["line"], f"step {group[0]['step']}, a small weight"
        total, kept = (alike(mean([step["local"][n] for step in group]), final) for n in (0, 1))
        plain = all(step["plain"] for step in group)
        if parts > 1 and kept[0] > 1 - 1e-6 and total[0] < 1 - 1e-5:
            text = f"{where}: of {parts} backward() since the last step, only the last one counts"
            return self.find("lost gradients", at, text)
        if parts > 1 and plain and total[0] > 0.99 and abs(total[1] - 1) < 0.01:
            text = f"{where}: {parts} backward() of mean losses; their gradients are added up"
            return self.find("sum of parts", at, text)
        if size == 1 or self.exchange:
            return None
        cosine, factor, error = min(total, kept, key=lambda found: (-round(found[0], 3), found[2]))
        if cosine < 0.9:
            return self.find("other gradients", at, f"{where}: cosine to the mean: {cosine:.2f}")
        if abs(factor / size - 1) < 0.01:
            level = None if plain else "HINT"
            text = f"{where}: {factor:.3f} times the mean"
            return self.find("summed gradients", at, text, level=level)
        if 3e-5 < error < 0.1 and abs(factor - 1) < 0.1 and group[0]["exact"]:
            return self.find("rounded gradients", at, f"{where}: relative error {error:.1e}")
        return None

    def find_weights(self, each, count):
        """The cause of weights that differ after a step."""
        settings, step = [step["settings"][0] for step in each], each[0]["step"]
        changed = [name for name in settings[0] if len({str(s.get(name)) for s in settings}) > 1]
        early = [c for c in self.ranks[0]["collectives"] if c["step"] < step]
        averages = next((c["line"] for c in early if c["name"] in EXCHANGES), None)
        if step > 1 and unequal([s["before"] for s in each]):
            why = "they differed already before it: something else had changed them"
            cure = "Change weights only in ways that are the same on all ranks."
        elif not unequal([step["grads"] for step in each]):
            if changed:
                values = [s.get(changed[0]) for s in settings]
                why = f"the gradients are equal, but {changed[0]} is {values}"
                cure = "Give all ranks the same hyperparameters, by flags and by schedules."
            elif unequal([step["before"] for step in each]):
                why = "the gradients are equal, but the weights differed before"
                cure = "dist.broadcast() rank 0's weights before the first step, as DDP does."
            else:
                why = "gradients and weights were equal, so the optimizers' states are not"
                cure = "When you resume, load the optimizer's state on all ranks."
        elif "ddp" not in self.kinds:
            why = f"the gradients differ, also after {averages}" if averages else ""
            why = why or "the gradients differ: nothing averages them"
            cure = "ddp_model = DistributedDataParallel(model); then train ddp_model."
        elif not each[0]["forwards"]:
            why = "DDP's forward was not called, so nothing averaged the gradients"
            cure = "Call ddp_model(inputs), not the model that it wraps."
        elif not each[0]["sync"]:
            why = "the last forward before the step was within no_sync()"
            cure = "Run the last forward and backward before a step outside of no_sync()."
        else:
            why = "DDP ran, but the gradients differ: something changed them after it averaged them"
            cure = "Change gradients only in ways that are the same on all ranks."
        moved = [{n for n in unequal([s["before"], s["after"]])} for s in each]
        if not set.intersection(*moved) and all(moved) and not self.server:
            why = "each rank changes weights that the others do not, and nothing sends them"
            cure = "dist.broadcast() each weight from the rank that has changed it, in every step."
        total = len(each[0]["after"])
        self.find(
            "weights", each[0]["line"], f"step {step}, {count} of {total} weights: {why}", cure
        )

    def compare_augmentation(self):
        """Whether random changes of equal samples are equal on all ranks."""
        passes = [[p for p in rank["passes"] if p["equal"] and p["work"]] for rank in self.ranks]
        if self.exchange:
            return None
        if any(len(own) < 2 or own[0]["batches"] < 2 for own in passes):
            return self.unchecked.append("augmentation: the script ended before, or has no loader")
        if any(entry["indices"] is None for own in passes for entry in own):
            return self.unchecked.append("augmentation: the loader has no indices")
        batches = [[[{*p["inputs"][n]} for p in own[:2]] for own in passes] for n in (0, 1)]
        random = equal_share(batches[0][0]) < 0.5  # epoch by epoch, on rank 0
        by_place, by_sample = (equal_share([own[0] for own in batch]) > 0.9 for batch in batches)
        if random and by_place and not by_sample:
            seen = "when the ranks got equal samples, their models got equal inputs"
            self.find("same augmentation", passes[0][0]["line"], f"{seen}, which change by epoch")
        return None

    def evaluations(self):
        """The evaluations that all ranks did, side by side."""
        each = zip(*(rank["evaluations"] for rank in self.ranks), strict=False)
        return [entries for entries in each if len({entry["done"] for entry in entries}) == 1]

    def compare_evaluations(self):
        self.compare_results()
        for each in self.evaluations():
            for what in ("weights", "buffers"):
                sums = [entry[what] for entry in each]
                names = [n for n in sums[0] if unequal([[s.get(n)] for s in sums])]
                if names and not (what == "weights" and self.split):
                    seen = f"{len(names)} of {len(sums[0])} differ, such as {names[0]}"
                    alone = what == "buffers" and self.found("evaluated by all")  # each its own
                    level = "HINT" if alone else None
                    if self.rarely and each[0]["short"]:
                        why = "the pass ended early, and weights are averaged from time to time"
                        return self.unchecked.append(f"{each[0]['line']}: {what}: {why}")
                    return self.find(f"other {what}", each[0]["line"], seen, level=level)
        return None

    def compare_printed(self):
        """Whether what rank 0 prints after an evaluation is the mean over all its samples."""
        groups = {}  # the same evaluation on all ranks that take part
        for rank in self.ranks:
            for entry in rank["losses"]:
                step, at, number = entry["where"]
                pairs = entry["losses"]
                groups.setdefault((step, at, number), []).append((rank, pairs))
        means = {key: formulas([pairs for _, pairs in each]) for key, each in groups.items()}
        for (step, at, number), each in groups.items():
            printed = [text for when, text in self.ranks[0]["printed"] if when == step]
            right = [found[""] for key, found in means.items() if key[0] == step]
            if any(shows(text, value) for value in right for text in printed):
                continue
            for name, value in [*means[step, at, number].items()][1:]:
                said = [text for text in printed if shows(text, value)]
                if said and not self.found("not added up"):
                    truth = formulas([pairs for _, pairs in each])[""]
                    self.find("wrong mean", at, f"it prints {said[0]}: {name}, not {truth:.9g}")
        for (_, at, number), each in groups.items():
            for rank, pairs in each:
                own = rank["passes"][number] if number >= 0 else {"rows": [], "work": 1}
                loaded, counted = sum(map(len, own["rows"])), sum(n for _, n in pairs)
                if not own["work"] and loaded and counted > loaded and counted % loaded:
                    text = f"the loader gave {loaded} samples, but {counted} have a loss"
                    self.find("padding counted", at, text)

    def compare_results(self):
        """Which samples the ranks evaluate, and whether something adds up their results."""
        self.exact = set()  # sizes of data sets that are evaluated exactly
        passes = self.ranks[0]["passes"]
        for number, one in enumerate(passes):
            same = [rank["passes"][number] for rank in self.ranks if rank["passes"][number:]]
            whole = all(p["complete"] and p["evals"] and p["line"] == one["line"] for p in same)
            late = any(entry["equal"] for entry in passes[:number])
            if one["work"] or not one["indices"] or not whole or late:
                continue
            if len(same) == len(self.ranks):
                end = next((n for n, p in enumerate(passes) if n > number and p["work"]), 10**9)
                calls = [
                    [c for c in r["collectives"] if number <= c["pass"] < end] for r in self.ranks
                ]
                calls = [[c for c in own if c["name"] in EXCHANGES] for own in calls]
                alike = len({str([p["part"], p["name"]]) for p in same}) == 1  # else shards
                self.compare_result(one, alike, [flat(p["indices"]) for p in same], calls)

    def compare_result(self, one, alike, samples, calls):
        at, total, seen = one["line"], sum(map(len, samples)), set().union(*samples)
        if self.split and self.one_replica and len({*map(str, samples)}) > 1:
            text = f"the ranks evaluate {[len(own) for own in samples]} samples, not the same ones"
            return self.find("split samples", at, text)
        size = one["name"][1] if alike else len(seen)
        if all(set(own) == seen for own in samples):
            for each in zip(*calls, strict=False):
                values = [call.get("values") for call in each]
                if any(values[0] or []) and all(v == values[0] for v in values):
                    text = "all ranks give all_reduce() " + str(
                        [float(f"{v:.6g}") for v in values[0]]
                    )
                    return self.find("counted twice", each[0]["line"], text)
            if not self.exchange:
                self.find("evaluated by all", at, f"{len(seen):,} of {size:,} samples on each rank")
        elif not any(calls):
            counts = [len(own) for own in samples]
            self.find("not added up", at, f"the ranks evaluate {counts} of {size:,} samples")
        elif len(seen) == size == total:
            self.exact.add(size)
            if "epoch" in one:
                self.find("padded evaluation", at, f"{size:,} samples on {len(samples)} ranks")
        elif size not in self.exact:  # which would be a second one, for comparison
            text = f"{size - len(seen):,} left out, {total - len(seen):,} repeated"
            self.find("uneven evaluation", at, f"of {size:,} samples, {text}")
        return None

    def compare_files(self):
        writers = {}
        for rank in self.ranks:
            for file in rank["files"]:
                lines = writers.setdefault((file["host"], file["path"]), {})
                lines[rank["rank"]] = file["line"]
        for (_, path), lines in writers.items():
            if len(lines) > 1:
                text = f"ranks {sorted(lines)} write {os.path.relpath(path)}"
                self.find("one file", next(iter(lines.values())), text)
        for rank in self.ranks:
            self.compare_saved(rank)
        self.compare_summands()
        for device, count in Counter(str(rank.get("device")) for rank in self.ranks).items():
            if count > 1 and device != "None":
                self.find("one device", None, f"{count} ranks: {device}")

    def compare_saved(self, rank):
        """Whether a file has weights that are not this rank's, as they were before training."""

        def first(rank):
            return rank["steps"][0]["before"] if rank["steps"] else []

        for other in [other for other in self.ranks if len(other["steps"]) > 1]:
            last = [step for step in other["steps"] if "after" in step][-1]["after"]
            same = other["steps"][0]["constant"]
            pairs = enumerate(zip(first(other), last, strict=False))
            moved = {str(a) for n, (a, b) in pairs if a != b and n not in same}
            moved -= {str(value) for value in first(rank)}
            for file in rank["files"]:
                if file["step"] and (stale := moved & {*file["sums"]}):
                    text = f"{len(stale)} weights that rank {other['rank']} has trained"
                    self.find("old weights", file["line"], f"rank {rank['rank']} saves {text}")

    def compare_summands(self):
        """Whether layers add up tensors that are equal on all ranks."""
        calls = {}
        for rank in self.ranks:
            for n, call in enumerate(c for c in rank["collectives"] if "where" in c):
                key = n, call["line"], call["step"], call["where"], str(call["group"])
                calls.setdefault(key, []).append(call.get("sum"))
        for (_, at, step, where, _), sums in calls.items():
            split = where == "forward" or self.own
            if split and len(sums) > 1 and sums[0] is not None and len({*sums}) == 1:
                text = (
                    f"in {where}, step {step + 1}: {len(sums)} ranks give all_reduce() equal ones"
                )
                self.find("equal summands", at, text)

    def look_at_each(self):
        for rank in self.ranks:
            self.look_at(rank)

    def look_at(self, rank):
        """What a single record shows."""
        found, steps = [], [step for step in rank["steps"] if "after" in step]
        broken = [step for step in steps if not step["finite"]]
        if broken and broken[-1] is steps[-1]:
            text = f"after step {broken[0]['step']}"
            found.append(("not finite", broken[0]["line"], text))
        for step in rank["steps"]:
            if step["cleared"] is False:
                text = f"before step {step['step']}, nothing cleared the gradients of the last step"
                found.append(("not cleared", step["line"], text))
        model, moved = rank["model"], any(s["after"] != s["before"] for s in steps[:3])
        if (moved or not steps) and any(model.get("0", [])) and model["0"] == model.get("1"):
            passed = "after some steps" if steps else "after an epoch without a step"
            text = f"{len(model['0'])} weights are what they were in the beginning, {passed}"
            found.append(("other model", steps[0]["line"] if steps else None, text))
        if steps and all(step["empty"] for step in steps):
            text = f"none of the optimizer's {len(steps[0]['sizes'])} weights ever has a gradient"
            found.append(("other model", steps[0]["line"], text))
        for file in rank["files"]:
            if file["prefix"]:
                found.append(
                    ("wrapped names", file["line"], f"they begin with {file['prefix'][0]}")
                )
        norms = [step["norms"] for step in steps]
        for one, last in zip(norms[0], norms[-1], strict=False) if len(steps) > 2 else []:
            tracked, first, again = (b - a for a, b in zip(one, last, strict=True))
            if tracked == first + again > first:
                text = f"{tracked} updates in {first} forwards"
                found.append(("statistics twice", steps[0]["line"], text))
        for entry in rank["evaluations"]:
            if entry["constant"] and all(entry["constant"]):
                text = f"all {len(entry['constant'])} layers"
                found.append(("constant statistics", entry["line"], text))
        if rank.get("batchnorm", 99) < 17:
            text = f"{rank['batchnorm']} samples"
            level = "WARN" if rank["batchnorm"] < 3 else "HINT"
            self.find("small batch", None, f"rank {rank['rank']}: {text}", level=level)
        if rank.get("left"):
            found.append(("group left", None, "the group is there at the end"))
        for name, at, text in found:
            if not self.found(name):
                self.find(name, at, f"rank {rank['rank']}: {text}")


def mean(rows):
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def alike(one, two):
    """The cosine of two vectors, how many times the first one the second is, and their relative
    distance.
    """
    dot = sum(a * b for a, b in zip(one, two, strict=True))
    square, other = sum(a * a for a in one), sum(b * b for b in two)
    if not (square * other > 0 and math.isfinite(square * other)):
        return 1.0, 1.0, 0.0  # nothing to compare
    distance = sum((a - b) ** 2 for a, b in zip(one, two, strict=True))
    return dot / (square * other) ** 0.5, dot / square, (distance / other) ** 0.5


def formulas(ranks):
    """What an evaluation's mean loss may be taken for; "" for what it is.

    ranks: of each rank, a mean loss and a number of samples per batch.
    """
    sums = [sum(value * number for value, number in pairs) for pairs in ranks]
    counts = [sum(number for _, number in pairs) for pairs in ranks]
    means = [sum(value for value, _ in pairs) for pairs in ranks]
    batches, total, size = [len(pairs) for pairs in ranks], max(1, sum(counts)), len(ranks)
    own = [a / max(1, b) for a, b in zip(sums, counts, strict=True)]
    return {
        "": sum(sums) / total,
        "the mean over rank 0's samples": own[0],
        "the mean of the ranks' means": sum(own) / size,
        "the sum of the ranks' means": sum(own),
        "the mean of the batches' means": sum(means) / sum(batches),
        "the mean of the batches' means of rank 0": means[0] / batches[0],
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
    """Places at which checksums differ between ranks. None stands for what is not compared, and
    ranks with different shards of a tensor are not.
    """
    found = []
    for n, column in enumerate(zip(*lists, strict=False)):
        shards = {}
        for value in column:
            shards.setdefault(str(value).rpartition(" ")[0], set()).add(value)
        if None not in column and any(len(values) > 1 for values in shards.values()):
            found.append(n)
    return found


def equal_share(each):
    """How many of these inputs all have, from 0 to 1."""
    return len(set.intersection(*each)) / max(1, *map(len, each))


# 3. The report, and the start


def printer():
    """A function that prints a line, in a color where rich is installed."""
    try:
        from rich.console import Console
    except ImportError:
        return lambda text, style=None: print(text, flush=True)
    console = Console(highlight=False, soft_wrap=True)
    return lambda text, style=None: console.print(text, style=style, markup=False)


def report(folder, settings):
    """Prints the findings; returns the exit code."""
    files = {int(file.stem): file for file in folder.glob("*.json")}
    ranks = [json.loads(files[number].read_text()) for number in sorted(files)]
    world = max([rank["world"] for rank in ranks], default=settings["ranks"])
    found, name = Comparison(ranks, sorted({*range(world)} - {*files})), settings["name"]
    steps = max((len(rank["steps"]) for rank in ranks), default=0)
    seconds = round(time.time() - settings["started"], 1)
    found.findings.sort(key=lambda finding: [*STYLES].index(finding["level"]))
    show = printer()
    show(f"\naudit of {name}: {world} ranks, {steps} steps, {seconds:.0f} seconds")
    for text in [*found.facts, *(f"recognized: {what}" for what in found.recognized)]:
        show(f"  {text}")
    for finding in found.findings:
        level = finding["level"]
        show(f"\n{level}  {finding['line'] or name}: {finding['what']}", STYLES[level])
        for word in ("seen", "cure", "page"):
            show(f"  {word}: {finding[word]}")
    for what in found.unchecked:
        show(f"\nNOTE: not checked: {what}")
    counts = Counter(finding["level"] for finding in found.findings)
    show("  ".join(f"{level}: {counts[level]}" for level in STYLES))
    if settings["json"]:
        keys = {"script": name, "ranks": world, "steps": steps, "seconds": seconds}
        keys |= {"findings": found.findings, "unchecked": found.unchecked}
        keys |= {"recognized": found.recognized, "facts": found.facts}
        part = Path(settings["json"] + ".part")
        part.write_text(json.dumps(keys, indent=2) + "\n")
        part.replace(settings["json"])
    return int(counts["ERROR"] > 0)


def execute(settings, flags):
    """Runs the script in this process, which is a rank, or which starts the ranks."""
    watch(settings)
    sys.argv = [settings["name"], *flags]
    sys.path[0] = run.root[:-1]
    sys.path.append(os.path.dirname(HERE))  # for processes that the script starts
    if settings["script"]:
        record_end(lambda: runpy.run_path(settings["script"], run_name="__main__"))
    else:
        record_end(lambda: runpy.run_module(settings["name"], None, "__main__", alter_sys=True))


def start(settings, flags, alone):
    """Starts the ranks on this machine, as torchrun does, or a script that starts them itself;
    waits for them. Returns the exit code.
    """
    folder = Path(tempfile.mkdtemp(prefix="audit-"))
    settings["folder"] = str(folder)
    command = [sys.executable, HERE, *([] if settings["script"] else ["-m"]), settings["name"]]
    with socket.create_server(("127.0.0.1", 0)) as server:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    shared = {"OMP_NUM_THREADS": "1", **os.environ, **shared, "AUDIT": json.dumps(settings)}
    numbers, size = range(1 if alone else settings["ranks"]), str(settings["ranks"])

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
        return report(folder, settings)
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
    add("-m", action="store_true", help="the script is the name of a module, as in python -m")
    add("script", help="the training script")
    add("flags", nargs=argparse.REMAINDER, help="its own flags")
    args = parser.parse_args()
    if "AUDIT" in os.environ:  # started by start()
        return execute(json.loads(os.environ["AUDIT"]), args.flags)
    if args.ranks < 2 or args.batches < 2 or args.passes < 1 or args.hang <= 0:
        parser.error("give at least 2 ranks, 2 batches, 1 pass, and a positive number of seconds")
    if not importlib.util.find_spec("torch"):
        parser.error(f"{sys.executable} has no PyTorch: use the Python of your training")
    if not args.m and not os.path.isfile(args.script):
        parser.error(f"{args.script}: there is no such script")
    settings = {name: getattr(args, name) for name in "ranks batches passes hang json".split()}
    settings |= {"script": not args.m and args.script, "name": args.script}
    settings |= {"started": time.time(), "reports": any(name in os.environ for name in RANKS)}
    if not settings["reports"]:
        text = "" if args.m else Path(args.script).read_text()
        alone = re.search(r"\b(spawn|start_processes|Process)\(", text)  # starts its ranks itself
        return start(settings, args.flags, alone)
    names = "MASTER_PORT TORCHELASTIC_RUN_ID SLURM_JOB_ID SLURM_STEP_ID".split()
    key = hashlib.sha256(str([os.environ.get(name) for name in names]).encode()).hexdigest()[:8]
    settings["folder"] = os.path.abspath(args.records or f".audit-{key}")
    os.makedirs(settings["folder"], exist_ok=True)
    return execute(settings, args.flags)


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(HERE)
    import audit  # not as __main__, so that other processes find its classes

    sys.exit(audit.main())
