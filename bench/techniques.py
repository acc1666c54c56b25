"""The techniques that the benchmark times, in groups, and what each one's gate compares.

Each is a script of techniques/, or a variable, and runs beside mnmc_ddp_launch.py at the same world
size.
"""

from typing import NamedTuple


class Technique(NamedTuple):
    """How it is started, and how its gate compares it with the oracle.

    arithmetic: what its gate computes in, "" for the case's own: "double" where other kernels or
    another order of sums round in other ways, "lossy" where it compresses gradients.
    on_gpus: the same on GPUs, if it differs there.
    gate: flags in its gate instead of `flags`, if with those it trains other numbers by design;
    EQUAL among them stands for equal shares of the batch.
    exact: flags of the oracle in its gate, after the others.
    """

    script: str
    flags: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    split: str = "strided"  # how the global batch is split
    arithmetic: str = ""
    on_gpus: str = ""
    gate: tuple[str, ...] | None = None
    exact: tuple[str, ...] = ()


EQUAL = "equal shares"
KERNELS = "kernels"  # the default group of --techniques
GROUPS = {
    KERNELS: {
        # Where a GPU has TF32, torch uses it.
        "fp32": Technique("mnmc_ddp_launch.py", variables=(("NVIDIA_TF32_OVERRIDE", "0"),)),
        "bf16": Technique("techniques/amp.py", ("--amp", "bf16"), arithmetic="bf16"),
        "fp16": Technique("techniques/amp.py", ("--amp", "fp16"), arithmetic="fp16"),
        "channels_last": Technique(
            "techniques/channels_last.py",
            arithmetic="double",
            on_gpus="fp32",  # in double torch takes none of cuDNN's kernels for this layout
        ),
        "compiled": Technique("techniques/compile.py", arithmetic="double"),
    },
    "memory": {
        "4 parts": Technique(
            "techniques/no_sync.py", ("--accum-steps", "4"), exact=("--accum-steps", "4")
        ),
        "checkpointing": Technique("techniques/activation_checkpointing.py"),
        "zero1": Technique("techniques/zero1.py"),
        "own optimizer": Technique(
            "techniques/custom_optimizer.py",
            ("--trust", "0", "--schedule", "constant"),
            arithmetic="double",  # its SGD is not fused
        ),
        "fsdp": Technique("techniques/fsdp.py", arithmetic="double"),  # nor is FSDP's
    },
    "communication": {
        "bf16 hook": Technique("techniques/comm_hooks.py", ("--hook", "bf16"), arithmetic="lossy"),
        "powersgd": Technique(
            "techniques/comm_hooks.py", ("--hook", "powersgd"), arithmetic="lossy"
        ),
        "local sgd": Technique(
            "techniques/local_sgd.py",
            ("--sync-every", "8"),
            arithmetic="double",
            gate=("--sync-every", "1"),  # then it is DDP, but for rounding
        ),
        "own ring": Technique("techniques/ring_allreduce.py"),
        "syncbn": Technique("techniques/syncbn.py", arithmetic="double", exact=("--parts", "1")),
    },
    "libraries": {
        "accelerate": Technique("techniques/accelerate_ddp.py", split="contiguous"),
        "fabric": Technique("techniques/fabric_ddp.py"),
        "deepspeed 1": Technique("techniques/deepspeed_zero.py", ("--stage", "1")),
        "deepspeed 2": Technique("techniques/deepspeed_zero.py", ("--stage", "2")),
        "deepspeed 3": Technique("techniques/deepspeed_zero.py", ("--stage", "3")),
    },
    "exactness": {
        "invariant": Technique("techniques/invariant.py", exact=("--parts", "4")),
        "uneven inputs": Technique(
            "techniques/uneven_inputs.py",
            ("--extra-images", "128"),
            exact=("--extra-images", "128"),
        ),
        # By speed measured, no two runs cut a batch alike.
        "heterogeneous": Technique(
            "techniques/heterogeneous.py", split="contiguous", gate=("--shares", EQUAL)
        ),
        "exact evaluation": Technique("techniques/distributed_eval.py"),
        "elastic": Technique("techniques/elastic.py"),
    },
}
TECHNIQUES = {name: how for group in GROUPS.values() for name, how in group.items()}
