"""What torch pretends, where sitecustomize.py asks for GPUs that are not here."""

import contextlib
import functools
import os
import resource
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset
from torch.utils.weak import WeakIdKeyDictionary

NAME, MEMORY = "Pretended GPU", 80 * 2**30
CPU = -1  # in a tensor's note; one without a note was made by C++, and nobody knows where it is
GET_DEVICE, IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__
MOVES = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu)
# What may be given tensors of several devices; __getitem__ only indices on the CPU.
MIXES = {
    torch.Tensor.copy_,
    torch.Tensor.__getitem__,
    torch.Tensor.__setitem__,
    torch.Tensor.data.__set__,
    torch.Tensor.grad.__set__,
    torch.Tensor.backward,
    torch.autograd.backward,
    torch._has_compatible_shallow_copy_type,
}
EXCHANGES = "all_reduce reduce broadcast all_gather all_gather_into_tensor reduce_scatter_tensor"
EXCHANGES += " gather scatter send recv all_to_all_single"
notes = WeakIdKeyDictionary()  # by tensor; an attribute would be saved with it
here = SimpleNamespace(gpu=0, count=0, nccl=False, gloo=())  # this process: its current GPU ...


def noted(tensor) -> int | None:
    """The number of a tensor's GPU, CPU, or None."""
    return notes.get(tensor)


def note(tensor, where: int) -> None:
    notes[tensor] = where


def number(device) -> int:
    """A device, in any of torch's ways to name one, as a note has it; refuses what is not there."""
    if isinstance(device, int):
        found = device
    else:
        device = torch.device(device)
        if device.type != "cuda":
            return CPU
        found = here.gpu if device.index is None else device.index
    if found >= here.count:
        raise RuntimeError(f"CUDA error: invalid device ordinal: {found} of {here.count}")
    return found


def is_device(value) -> bool:
    return isinstance(value, torch.device | str)


class Pretend(TorchFunctionMode):
    """Between Python and torch: knows of each tensor which GPU it is said to be on."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (GET_DEVICE, IS_CUDA):
            where = noted(args[0])
            on = where is not None and where != CPU
            if func is IS_CUDA:
                return on
            return torch.device("cuda", where) if on else func(*args)
        if func in MOVES:
            return self.move(func, args, kwargs)
        return self.call(func, args, kwargs)

    def call(self, func, args, kwargs):
        """Any other function: checked before, its results noted behind it."""
        given = kwargs.get("device")
        if given is not None:
            kwargs["device"] = "cpu"
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        where = self.place(func, inputs) if given is None else number(given)
        if func is torch.Tensor.numpy and where not in (None, CPU):
            raise TypeError(f"can't convert cuda:{where} device type tensor to numpy")
        result = func(*args, **kwargs)
        if func in (torch.Tensor.data.__set__, torch.Tensor.grad.__set__):
            if isinstance(args[1], torch.Tensor) and noted(args[1]) is not None:
                note(args[0], noted(args[1]))
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and where is not None:
                if given is not None or noted(tensor) is None:
                    note(tensor, where)
        return result

    @staticmethod
    def place(func, inputs) -> int | None:
        """Where the results are; refuses inputs of two devices."""
        numbers = {noted(x) for x in inputs[1:]} - {None, CPU}
        indexed = func is torch.Tensor.__getitem__ and noted(inputs[0]) == CPU and numbers
        if func in MIXES and not indexed:
            return noted(inputs[0]) if inputs else None
        known = {noted(x) for x in inputs if (x.dim() or indexed) and noted(x) is not None}
        if len(known) > 1:
            names = " and ".join("cpu" if x == CPU else f"cuda:{x}" for x in sorted(known))
            name = getattr(func, "__name__", func)
            raise RuntimeError(f"{name}: all tensors must be on one device, found {names}")
        gpus = [noted(x) for x in inputs if noted(x) not in (None, CPU)]
        if gpus:
            return gpus[0]
        return None if any(noted(x) is None for x in inputs) else CPU

    @staticmethod
    def told(tensor) -> str:
        """A tensor's device by its note."""
        where = noted(tensor)
        return "cpu" if where in (None, CPU) else f"cuda:{where}"

    @staticmethod
    def move(func, args, kwargs):
        """Tensor.to, .cuda and .cpu: a copy, where the device is another."""
        tensor, *args = args
        if any(str(word) == "meta" for word in args):
            return func(tensor, *args, **kwargs)
        result, wanted = tensor, CPU
        if func is torch.Tensor.cuda:
            wanted = args[0] if args else kwargs.get("device", here.gpu)
        elif func is torch.Tensor.to:
            wanted = kwargs.pop("device", None)
            if args and isinstance(args[0], torch.Tensor):
                wanted, args[0] = torch.device(Pretend.told(args[0])), args[0].dtype
            elif args and (args[0] is None or is_device(args[0])):
                wanted, args[0] = args[0], "cpu"
            result = func(tensor, *args, **kwargs) if args or kwargs else tensor
        if wanted is None:
            where = noted(tensor)
        else:
            where = CPU if wanted in (CPU, "cpu") else number(wanted)
        if result is tensor and where != noted(tensor):
            if noted(tensor) is None and where == CPU:
                return tensor
            result = tensor.clone(memory_format=torch.preserve_format)
        if where is not None:
            note(result, where)
        return result


def pretend(count: int) -> None:
    """Makes torch have so many GPUs, or those of them that CUDA_VISIBLE_DEVICES shows."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        count = 0 if shown in ("", "-1") else min(count, len(shown.split(",")))
    here.count = count
    if not count:
        return
    pretend_cuda()
    pretend_nccl()
    pretend_others()
    Pretend().__enter__()  # of this thread; the workers of a loader inherit it
    backward = torch.autograd._engine_run_backward

    def with_hooks(*args, **kwargs):  # while a function runs, the mode is off
        with Pretend():
            return backward(*args, **kwargs)

    torch.autograd._engine_run_backward = with_hooks


def pretend_cuda() -> None:
    """torch.cuda, as far as programs ask it."""

    def set_device(device):
        here.gpu = number(device)

    def properties(device=None):
        return SimpleNamespace(
            name=NAME,
            major=9,
            minor=0,
            total_memory=MEMORY,
            multi_processor_count=132,
            uuid="00000000-0000-0000-0000-000000000000",
        )

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @contextlib.contextmanager
    def device(wanted):
        before, here.gpu = here.gpu, number(wanted)
        yield
        here.gpu = before

    class Event:
        def __init__(self, *args, **kwargs): ...
        def record(self, *args): ...
        def wait(self, *args): ...
        def synchronize(self): ...
        def query(self):
            return True

    class Stream(Event):
        stream_id, device_index, device_type = 0, 0, 1

        def wait_stream(self, other): ...
        def wait_event(self, event): ...
        def record_event(self, event=None):
            return event or Event()

        def __enter__(self):
            return self

        def __exit__(self, *args): ...

    def doing(what):  # a function of its own for each name, or torch's compiler takes offence
        return lambda *args, **kwargs: what()

    found = {
        "is_available": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "device_count": lambda: here.count,
        "current_device": lambda: here.gpu,
        "set_device": set_device,
        "device": device,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": properties,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
    }
    memory = "max_memory_allocated max_memory_reserved memory_allocated memory_reserved"
    quiet = "synchronize empty_cache reset_peak_memory_stats manual_seed manual_seed_all init"
    found |= {name: doing(peak) for name in memory.split()}
    found |= {name: doing(lambda: None) for name in [*quiet.split(), "set_rng_state"]}
    for name, value in found.items():
        setattr(torch.cuda, name, value)
    # By default, optimizers update all weights at once on a GPU, and one by one on a CPU.
    optimizers = sys.modules["torch.optim.optimizer"]
    optimizers._get_foreach_kernels_supported_devices = lambda: ["cuda", "cpu"]
    torch.accelerator.current_device_index = lambda: here.gpu
    torch.accelerator.set_device_index = set_device


def pretend_nccl() -> None:
    """torch.distributed with NCCL, which Gloo stands in for."""
    init, new_group, exchanges = dist.init_process_group, dist.new_group, dist.batch_isend_irecv
    backend, wrapped = dist.get_backend, torch.nn.parallel.DistributedDataParallel.__init__

    @functools.wraps(init)
    def begin(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        init("gloo" if backend and "nccl" in backend else backend, *args, **kwargs)
        here.nccl = backend == "nccl"

    @functools.cache
    def meet():  # NCCL's processes find each other before their first exchange
        mine = (os.uname().nodename, os.environ.get("CUDA_VISIBLE_DEVICES"), here.gpu)
        all_of_them = [None] * dist.get_world_size()
        dist.all_gather_object(all_of_them, mine)
        if all_of_them.count(mine) > 1:
            raise dist.DistBackendError(f"Duplicate GPU detected: two ranks on {mine[2]}")

    @functools.wraps(new_group)
    def group(*args, backend=None, **kwargs):
        found = new_group(*args, backend="gloo", **kwargs)
        if backend == "gloo":
            here.gloo += (found,)
        return found

    def checked(exchange):
        @functools.wraps(exchange)
        def then(*args, **kwargs):
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if here.nccl and kwargs.get("group") not in here.gloo:
                meet()
                if any(noted(x) == CPU for x in tensors):
                    raise RuntimeError("No backend type associated with device type cpu")
            return exchange(*args, **kwargs)

        return then

    @functools.wraps(exchanges)
    def many(operations):
        for operation in operations:
            checked(lambda tensor, group: None)(operation.tensor, group=operation.group)
        return exchanges(operations)

    def wrap(self, module, *args, **kwargs):
        if here.nccl:
            meet()
        wrapped(self, module, *args, **kwargs)

    dist.init_process_group, dist.new_group, dist.batch_isend_irecv = begin, group, many
    dist.get_backend = lambda group=None: "nccl" if here.nccl and not group else backend(group)
    torch.nn.parallel.DistributedDataParallel.__init__ = wrap
    for name in EXCHANGES.split():
        setattr(dist, name, checked(getattr(dist, name)))


def pretend_others() -> None:
    """Autocast, data sets, loading, DataParallel, compiling; the optimizer's table of devices."""
    autocast, load, keep = torch.autocast.__init__, torch.load, TensorDataset.__init__

    def begin(self, device_type, *args, **kwargs):
        autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    def loaded(file, map_location=None, **kwargs):
        found = load(file, "cpu", **kwargs)
        where = CPU if map_location is None else number(map_location)
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                note(tensor, where)
        return found

    def kept(self, *tensors):  # C++ may have read them from a file
        for tensor in tensors:
            note(tensor, CPU if noted(tensor) is None else noted(tensor))
        keep(self, *tensors)

    torch.autocast.__init__, torch.load, TensorDataset.__init__ = begin, loaded, kept
    make = torch.nn.Parameter.__new__

    def parameter(cls, data=None, *args, **kwargs):
        found = make(cls, data, *args, **kwargs)
        if data is not None and noted(data) is not None:
            note(found, noted(data))
        return found

    torch.nn.Parameter.__new__ = parameter
    swap = torch.utils.swap_tensors

    def swapped(one, other):  # it refuses tensors with weak references, and the notes have some
        where = [notes.pop(tensor, None) for tensor in (one, other)]
        swap(one, other)
        for tensor, found in ((one, where[1]), (other, where[0])):
            if found is not None:
                note(tensor, found)

    torch.utils.swap_tensors = swapped
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.pin_memory = pinned
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    checks["default"] = lambda x: {"shape": x.shape, "dtype": x.dtype}  # C++ made x: no note
    torch.compile = lambda model=None, **kwargs: model or (lambda model: model)
    torch.nn.DataParallel.__init__ = data_parallel
    torch.nn.DataParallel.forward = in_parts
    grouped = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    def by_device(lists, with_indices=False):
        found = {}
        for (_, kind), (tensors, indices) in grouped(lists, with_indices).items():
            places = [tensor.device for tensor in tensors[0]]
            for device in dict.fromkeys(places):
                mine = [k for k, place in enumerate(places) if place == device]
                chosen = [[each[k] for k in mine] if each else each for each in tensors]
                found[device, kind] = chosen, [indices[k] for k in mine if indices]
        return found

    torch.optim.Optimizer._group_tensors_by_device_and_dtype = staticmethod(by_device)


def pinned(tensor, device=None):
    """Tensor.pin_memory; also in a loader's thread, where the mode is not."""
    if noted(tensor) not in (None, CPU):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor': only CPU tensors can be")
    return tensor


def data_parallel(self, module):
    """nn.DataParallel's, on all GPUs."""
    torch.nn.Module.__init__(self)
    self.module = module
    for tensor in (*module.parameters(), *module.buffers()):
        if noted(tensor) != 0:
            raise RuntimeError("module must have its parameters and buffers on device cuda:0")


def in_parts(self, images):
    """Its forward: a part for each GPU. BatchNorm's averages are those of the first part."""
    first, *others = images.chunk(here.count)
    found = [self.module(first)]
    for part in others:
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        found.append(torch.func.functional_call(self.module, buffers, (part,)))
    return torch.cat(found)
