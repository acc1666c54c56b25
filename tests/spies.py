"""Spies: they run in a script's process, before the script, and tell what it does; said() reads it.

A test gives one as `prepare`, or a function of its own that calls several.
"""

import itertools
import json
import os
import pkgutil
from collections.abc import Callable, Container

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

ALWAYS = range(10**9)  # for at_calls


def said(out: str, name: str) -> list:
    """What a process has told under this name, in its order; out: what it has printed."""
    lines = [line.partition(" ") for line in out.splitlines()]
    return [json.loads(text) for word, _, text in lines if word == name]


def numbers_sent(out: str, name: str, mode: str = "train") -> list[int]:
    """After sent(): of each message by this function, how many numbers it had."""
    (messages,) = said(out, "sent")
    return [count for function, count, _ in messages[mode] if function == name]


def tell(name: str, value) -> None:
    print(name, json.dumps(value), flush=True)


def at_the_end(act: Callable) -> None:
    """Calls this before the script ends its process group."""
    end = dist.destroy_process_group

    def ended(*words):
        act()
        end(*words)

    dist.destroy_process_group = ended


def at_calls(numbers: Container[int], name: str, act: Callable) -> None:
    """Those calls of a function, counted from 1, become act(function, *words, **options).

    name: with its module, and its class if it is a method.
    """
    owner, _, attribute = name.rpartition(".")
    owner, count = pkgutil.resolve_name(owner), itertools.count(1)
    function = getattr(owner, attribute)

    def counted(*words, **options):
        if next(count) in numbers:
            return act(function, *words, **options)
        return function(*words, **options)

    setattr(owner, attribute, counted)


def cannot(code: int) -> Callable:
    """For at_calls: an error of the system instead of the call, such as errno.ENOSPC."""

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    return fail


def after_each_step(act: Callable) -> None:
    register_optimizer_step_post_hook(lambda *_: act())


def held() -> None:
    """At the end: the bytes of this process's weights, of their gradients, of the momentum.

    Of a DTensor its own part. Memory that tensors share counts once: gradients are views of DDP's
    buckets.
    """
    from torch.distributed.tensor import DTensor

    begin, made = torch.optim.Optimizer.__init__, []

    def init(self, *rest):
        made.append(self)
        begin(self, *rest)

    def size(tensors):
        own = [x.to_local() if isinstance(x, DTensor) else x for x in tensors if x is not None]
        memory = [x.untyped_storage() for x in own if not x.is_meta]
        return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())

    def tell_all():
        weights = [weight for group in made[0].param_groups for weight in group["params"]]
        # ZeroRedundancyOptimizer makes an optimizer for this rank's weights, which has the state.
        states = [value for state in made[-1].state.values() for value in state.values()]
        tell("held", [size(weights), size(weight.grad for weight in weights), size(states)])
        made.clear()

    torch.optim.Optimizer.__init__ = init
    at_the_end(tell_all)


def sent() -> None:
    """At the end: the messages that Python code began, of training and of evaluation.

    Each with the function's name, how many numbers its largest tensor has, and the ranks of its
    group, if one was given.
    """
    found, now = {"train": [], "eval": []}, ["train"]
    switch, isend, operation = torch.nn.Module.train, dist.isend, dist.P2POp

    def switched(self, training=True):  # eval() calls it, too
        now[0] = "train" if training else "eval"
        return switch(self, training)

    def note(name, tensors, group=None):
        numbers = max(x.numel() for x in tensors if torch.is_tensor(x))
        found[now[0]].append([name, numbers, group and dist.get_process_group_ranks(group)])

    def noted(name):
        call = getattr(dist, name)

        def begin(*words, group=None, **options):
            note(name, [*words, *options.values()], group)
            return call(*words, group=group, **options)

        return begin

    def exchange(call, tensor, *words, **options):
        if call is dist.isend:
            note("isend", [tensor])
            call = isend
        return operation(call, tensor, *words, **options)

    names = "all_reduce all_gather_single reduce_scatter_single isend send recv"
    for name in (names + " all_to_all_single all_gather_into_tensor").split():
        setattr(dist, name, noted(name))
    torch.nn.Module.train, dist.P2POp = switched, exchange
    at_the_end(lambda: tell("sent", found))
