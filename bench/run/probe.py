"""Runs a script of the project, and records what the script itself does not.

python bench/run/probe.py SCRIPT [flags of the script and of the probe, mixed]
python bench/run/probe.py [flags] -- PROGRAM [its flags, which may have the same names]

--log-json FILE     append every line that the script logs, as JSON with all digits; more below
--max-steps N       end the script before training step N + 1, without a last evaluation
--images N M        keep this many training and test images
--exact             kernels that give the same bits in every start, and weights in files
--double            compute in double precision what would be in single precision
--patient           ranks wait a day for each other, for a script that is stopped between its turns

Fields that --log-json adds:
all      time, in seconds since 1970
start    script, torch, device_name, world_size
train    step counts on over the epochs (epoch_step starts anew in each); data_seconds, the time
         that rank 0 waited for its loader; all_reduces and all_reduce_bytes, which Python code of
         rank 0 started, without those below 1 KiB (DDP starts its own in C++: those do not count);
         staleness, if rank 0 receives from whoever is first, as an asynchronous parameter server
         does: {updates since a worker received the weights: number of its gradients};
         loopback_bytes, which this machine has sent to itself: Gloo's messages between its ranks;
         once, first_step_seconds: until rank 0's device has done the first step
eval     data_seconds
end      peak_memory_mib of rank 0: its tensors on its GPUs after step 1, else its resident set
"""

import argparse
import ast
import inspect
import json
import math
import os
import resource
import sys
import time
import types
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

if __name__ == "__main__":  # instead of this folder, whose modules have common names
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils.data import DataLoader, TensorDataset
from torchvision import datasets

KEPT = 3  # files of weights: the oracle's first, and those after one step and after two
# fp16's scale of the loss: the usual one, 2**16, overflows at first, which skips the gate's steps.
SCALE = 2.0**4


class Done(BaseException):
    """The script has made its --max-steps. Not an Exception: a script may catch those."""


@dataclass
class Probe:
    """The flags, and what the probe has seen in this process."""

    log_json: Path | None = None
    max_steps: int | None = None
    images: list[int] = field(default_factory=list)
    exact: bool = False
    double: bool = False
    patient: bool = False
    inside: bool = False  # a loader is making a batch
    waited: float = 0.0  # seconds for a loader, since the last record
    train_loader: DataLoader | None = None  # the first that is iterated
    taken: int = 0  # batches of the train loader
    first: float | None = None  # seconds of the first step
    all_reduces: int = 0  # since the last record of training
    all_reduce_bytes: int = 0
    loopback: int = 0  # loopback_bytes() at the last record
    updates: int = 0  # of a parameter server, since all ranks had its weights
    pulled: dict[int, int] = field(default_factory=dict)  # of each worker: after which update
    staleness: Counter = field(default_factory=Counter)  # since the last record of training
    saying: tuple | None = None  # the event and fields that log() is about to print

    def prepare(self) -> None:
        """Changes torch, before the script begins."""
        watch_loaders(self)
        watch_all_reduces(self)
        watch_arrivals(self)
        if self.images:
            keep_images(self.images)
        if self.exact:
            settle()
            keep_weights()
        if self.double:
            torch.set_default_dtype(torch.float64)
            torch.Tensor.float = torch.Tensor.double
        if self.patient:
            wait_long()
        spawn = torch.multiprocessing.spawn
        settings = (self.log_json, self.max_steps, self.images, self.exact, self.double)
        settings += (self.patient,)
        torch.multiprocessing.spawn = lambda function, *arguments, **named: spawn(
            partial(spawned, settings, function), *arguments, **named
        )

    def attach(self, script: dict) -> None:
        """Records what log() prints; script: the names of its module.

        On a rank whose log() prints nothing, nothing is recorded.
        """
        # Accelerate's loader wraps another one, and takes its batches one step ahead.
        if accelerate := sys.modules.get("accelerate.data_loader"):
            watch_loaders(self, accelerate.DataLoaderShard)
        if not self.log_json or "log" not in script:
            return
        log = script["log"]

        def logged(event, /, **fields):
            self.saying = event, fields
            try:
                log(event, **fields)
            finally:
                self.saying = None

        def printed(*words, **options):
            print(*words, **options)
            if self.saying:
                self.record(*self.saying)
                self.saying = None

        script["log"], script["print"] = logged, printed

    def record(self, event: str, fields: dict) -> None:
        """Appends one line to --log-json."""
        fields = dict(fields)
        if event == "start":
            cuda = str(fields.get("device", "")).startswith("cuda")
            name = torch.cuda.get_device_name() if cuda else "cpu"
            fields = {"torch": torch.__version__, "device_name": name, "world_size": 1} | fields
            fields = {"script": Path(sys.argv[0]).stem} | fields
        if event == "train" and self.train_loader is not None:
            fields["epoch_step"] = fields["step"]
            fields["step"] += (fields["epoch"] - 1) * len(self.train_loader)
            if self.first is not None:
                fields["first_step_seconds"], self.first = self.first, None
        if event == "train" and self.all_reduces:
            fields["all_reduces"], self.all_reduces = self.all_reduces, 0
            fields["all_reduce_bytes"], self.all_reduce_bytes = self.all_reduce_bytes, 0
        if event == "train" and self.staleness:
            fields["staleness"], self.staleness = dict(sorted(self.staleness.items())), Counter()
        if event == "eval":  # for which all ranks got the same weights
            self.updates, self.pulled = 0, {}
        if event in ("train", "eval"):
            fields["data_seconds"], self.waited = self.waited, 0.0
        before, self.loopback = self.loopback, loopback_bytes()
        if event == "train" and self.loopback:
            fields["loopback_bytes"] = self.loopback - before
        if event == "end":
            fields["peak_memory_mib"] = gpus_mib() or resident_mib()
        for name, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                fields[name] = None  # JSON has no nan
        line = json.dumps({"event": event, "time": time.time(), **fields}, default=str) + "\n"
        with open(self.log_json, "ab", buffering=0) as file:  # one write: lines stay whole
            file.write(line.encode())

    def run(self, begin, script: dict) -> None:
        """Runs begin() to its end, or to --max-steps."""
        try:
            begin()
            return
        except Done:
            pass  # the exception holds all that the script has made, which goes first
        finally:
            # At exit, torch 2.11 waits 5 s for each worker of a loader that is still there.
            self.train_loader = None  # https://github.com/pytorch/pytorch/issues/81794
        if "log" in script and self.log_json:
            script["log"]("end", peak_gpu_memory_mib=torch.cuda.max_memory_allocated() / 2**20)
        if dist.is_initialized():
            dist.destroy_process_group()


def gpus_mib() -> float:
    """The most MiB that this process's tensors have had, on all of its GPUs; 0 on a CPU."""
    gpus = range(torch.cuda.device_count())
    return sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) / 2**20


def resident_mib() -> float:
    """The most memory that this process has had, in MiB. Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def loopback_bytes() -> int:
    """What this machine has sent to itself so far, by any program; 0 where nothing counts it."""
    loopback = psutil.net_io_counters(pernic=True).get("lo")
    return loopback.bytes_sent if loopback else 0


def watch_loaders(probe: Probe, kind: type = DataLoader) -> None:
    """Times what a loader's user waits for batches, and ends the script after --max-steps."""
    batches = kind.__iter__

    def timed(loader):
        if probe.inside:  # a loader that another one wraps
            yield from batches(loader)
            return
        if probe.train_loader is None:
            probe.train_loader = loader
        asked = time.perf_counter()
        iterator = batches(loader)
        while True:
            if loader is probe.train_loader and probe.taken == probe.max_steps:
                raise Done
            probe.inside = True
            batch = next(iterator, None)
            probe.inside = False
            probe.waited += time.perf_counter() - asked
            if batch is None:
                return
            probe.taken += loader is probe.train_loader
            yield batch
            if probe.taken == 1 and loader is probe.train_loader:
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
                    # cuDNN has tried algorithms with more memory than that of the one it keeps.
                    for gpu in range(torch.cuda.device_count()):
                        torch.cuda.reset_peak_memory_stats(gpu)
                probe.first = time.perf_counter() - asked
            asked = time.perf_counter()

    kind.__iter__ = timed


def watch_all_reduces(probe: Probe) -> None:
    """Counts dist.all_reduce and its bytes. A Meter's few sums do not count."""
    all_reduce = dist.all_reduce

    def counted(tensor, *arguments, **named):
        if tensor.nbytes >= 2**10:
            probe.all_reduces += 1
            probe.all_reduce_bytes += tensor.nbytes
        return all_reduce(tensor, *arguments, **named)

    dist.all_reduce = counted


def wait_long() -> None:
    """Lets all process groups wait a day for a collective, whatever the script or a library says.

    By default, Gloo waits for 30 minutes and NCCL for 10, sleep included. NCCL's watchdog then ends
    a process whose collective was in flight when it was stopped, even if the GPU has finished it.
    """
    day, start = timedelta(days=1), dist.init_process_group
    c10d = dist.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = day

    def started(*arguments, **named):
        return start(*arguments, **{**named, "timeout": day})

    dist.init_process_group = started


def watch_arrivals(probe: Probe) -> None:
    """Counts each gradient by its staleness: the updates since its worker received the weights.

    A server receives from whoever is first, makes an update, and sends that worker the weights.
    """
    recv = dist.recv

    def watched(tensor, src=None, *arguments, **named):
        sender = recv(tensor, src, *arguments, **named)
        if src is None:
            probe.staleness[probe.updates - probe.pulled.get(sender, 0)] += 1
            probe.updates += 1
            probe.pulled[sender] = probe.updates
        return sender

    dist.recv = watched


def settle() -> None:
    """Deterministic kernels, whatever the script says; a scale that leaves no step out."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn = torch.backends.cudnn
    cudnn.deterministic, cudnn.benchmark = True, False
    type(cudnn).benchmark = property(lambda self: False, lambda self, value: None)
    set_default(torch.amp.GradScaler, "init_scale", SCALE)
    if "apex" in Path(sys.argv[0]).stem:
        try:
            from apex.amp.scaler import LossScaler
        except ImportError:  # the script says so in words
            return
        set_default(LossScaler, "init_scale", SCALE)


def set_default(kind: type, name: str, new: float) -> None:
    """Gives a parameter of a class another default. Raises TypeError where there is no such one:
    then the gate would compare steps that fp16 leaves out.
    """
    function = kind.__init__
    with_default = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is not parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY
    ]
    if name not in with_default:
        raise TypeError(f"{kind.__name__} has no parameter {name} with a default")
    pairs = zip(with_default, function.__defaults__, strict=True)
    function.__defaults__ = tuple(new if each == name else old for each, old in pairs)


def keep_weights() -> None:
    """Makes torch.save write the first files as 1.npz, 2.npz ..., beside the wanted file.

    That one is there, too, as the script will look for it, and empty. Of a checkpoint, the model.
    What a library saves into memory, to send it, it still does.
    """
    number, original = count(1), torch.save

    def save(state: dict, path: Path, *arguments, **named) -> None:
        if not isinstance(path, str | os.PathLike):
            original(state, path, *arguments, **named)
            return
        Path(path).touch()
        if (n := next(number)) <= KEPT:
            weights = state.get("model", state)
            arrays = {k: v.detach().cpu() for k, v in weights.items() if v.is_floating_point()}
            halves = (torch.bfloat16, torch.float16)
            arrays = {k: v.float() if v.dtype in halves else v for k, v in arrays.items()}
            np.savez(Path(path).with_name(f"{n}.npz"), **{k: v.numpy() for k, v in arrays.items()})

    torch.save = save


def keep_images(most: list[int]) -> None:
    """Makes data sets keep this many images: the first that is made, the second.

    In memory the first images, of photographs as many from each class. The classes themselves are
    changed, since the script of a spawned process has imported them by then.
    """
    left = list(most)
    in_memory, photographs = TensorDataset.__init__, datasets.ImageFolder.__init__

    def first(self, *tensors):
        n = left.pop(0) if left else None
        in_memory(self, *(tensor[:n] for tensor in tensors))

    def spread(self, *arguments, **named):
        photographs(self, *arguments, **named)
        n = left.pop(0) if left else len(self.samples)
        self.samples = self.samples[:: max(1, len(self.samples) // n)][:n]

    TensorDataset.__init__, datasets.ImageFolder.__init__ = first, spread


def spawned(settings: tuple, function, *arguments) -> None:
    """Calls a function of the script in a process that the script has spawned."""
    probe = Probe(*settings)
    probe.prepare()
    probe.attach(function.__globals__)
    probe.run(partial(function, *arguments), function.__globals__)


def run_script(argv: list[str]) -> None:
    """Runs a script as Python itself would; argv: all that follows the probe's name."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--log-json", type=Path)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--images", type=int, nargs=2, default=[])
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--patient", action="store_true")
    end = argv.index("--") if "--" in argv else len(argv)
    mine, rest = parser.parse_known_args(argv[:end])
    sys.argv = rest + argv[end + 1 :]
    probe = Probe(**vars(mine))
    probe.prepare()

    module = types.ModuleType("__main__")
    module.__file__ = sys.argv[0]
    sys.modules["__main__"] = module
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    script = vars(module)
    tree = ast.parse(Path(sys.argv[0]).read_text(), sys.argv[0])
    # All but the last statement, `if __name__ == "__main__": ...`; then log() can be changed.
    *body, last = tree.body
    exec(compile(ast.Module(body, []), sys.argv[0], "exec"), script)
    probe.attach(script)
    probe.run(partial(exec, compile(ast.Module([last], []), sys.argv[0], "exec"), script), script)


if __name__ == "__main__":
    from bench.run.probe import run_script  # by a name that a spawned process finds, too

    run_script(sys.argv[1:])
