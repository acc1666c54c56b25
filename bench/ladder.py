"""All scripts of the ladder and of techniques/, one entry each: what the harness, the pages and the
tests know of them follows from here. To add one: its file, its entry, its page in docs/diffs/.
"""

from bench.script import DDP, Script, Timed

PLAIN = "snsc.py"
KERNELS = "kernels"  # the default group of `bench run --techniques`
EQUAL = "equal shares"  # of the batch, in the flags of a gate
# Flags of scripts, and of the oracle: it trains whole batches, micro-batches, a longer epoch.
WHOLE, MICRO, EXTRA = ("--parts", "1"), ("--micro-batches", "4"), ("--extra-images", "64")


LADDER = [
    Script(
        PLAIN,
        parent="",
        launcher="python",
        processes=False,
        adds="one process, one device",
        equality=(),
    ),
    Script(
        "snmc_dp.py",
        PLAIN,
        functions="main",
        launcher="python",
        processes=False,
        split="contiguous",
        adds="DataParallel: one process, all GPUs",
        equality=(),
    ),
    Script(
        DDP,
        PLAIN,
        functions="main load_dataset evaluate Meter log parse_args the_rest",
        adds="DDP: one process per GPU",
        timed={  # where a GPU has TF32, torch uses it
            "fp32": Timed(KERNELS, variables=(("NVIDIA_TF32_OVERRIDE", "0"),))
        },
        equality=(),
        helps=("--batch-size",),
    ),
    Script(
        "mnmc_ddp_mp.py",
        DDP,
        functions="main parse_args +run the_rest",
        launcher="python",
        adds="the same, started by `python`",
        equality=(),
    ),
    Script(
        "mnmc_ddp_slurm.py",
        DDP,
        functions="main",
        launcher="srun",
        adds="the same, started by Slurm",
        equality=(),
    ),
    Script(
        "mnmc_apex.py",
        DDP,
        functions="main Meter parse_args",
        library="apex",
        adds="Apex: half precision, its own DDP",
        pretended=False,  # they lack what Apex compiles
    ),
    Script(
        "mnmc_horovod.py",
        DDP,
        functions="main evaluate Meter log the_rest",
        launcher="horovodrun",
        library="horovod",
        adds="Horovod instead of DDP",
        pretended=False,  # no NCCL
    ),
]
TECHNIQUES = [
    Script(
        "techniques/grad_accum.py",
        PLAIN,
        functions="main parse_args",
        launcher="python",
        processes=False,
        oracle=("--split", "contiguous", "--accum-steps", "2"),
        equality=("--accum-steps", "4"),
    ),
    Script(
        "techniques/model_parallel.py",
        PLAIN,
        functions="main +split_layers",
        launcher="python",
        processes=False,
        equality=(),
    ),
    Script(
        "techniques/amp.py",
        functions="main save parse_args",
        timed={
            "bf16": Timed(KERNELS, ("--amp", "bf16"), arithmetic="bf16"),
            "fp16": Timed(KERNELS, ("--amp", "fp16"), arithmetic="fp16"),
        },
    ),
    Script(
        "techniques/channels_last.py",
        functions="main save",
        timed={
            "channels_last": Timed(
                KERNELS,
                arithmetic="double",
                on_gpus="layout",  # in double torch takes none of cuDNN's kernels for this layout
            )
        },
    ),
    Script(
        "techniques/compile.py",
        functions="main",
        timed={"compiled": Timed(KERNELS, arithmetic="double")},
    ),
    Script(
        "techniques/no_sync.py",
        functions="main parse_args",
        timed={"no_sync": Timed("memory", ("--accum-steps", "4"), exact=("--accum-steps", "4"))},
        equality=("--accum-steps", "4"),
    ),
    Script(
        "techniques/activation_checkpointing.py",
        functions="main +find_blocks +checkpoint_block",
        timed={"checkpointing": Timed("memory")},
        equality=(),
    ),
    Script(
        "techniques/optimizer_in_backward.py",
        functions="main +step_in_backward",
        timed={"step in backward": Timed("memory")},
        equality=(),
    ),
    Script("techniques/zero1.py", functions="main", timed={"zero1": Timed("memory")}, equality=()),
    Script(
        "techniques/custom_optimizer.py",
        functions="main +ShardedLARS +cosine parse_args",
        timed={
            "custom optimizer": Timed(
                "memory",
                ("--trust", "0", "--schedule", "constant"),
                arithmetic="double",  # its SGD is not fused
            )
        },
        helps=("--resume",),  # the learning rate is not the file's
    ),
    Script(
        "techniques/cpu_offload.py",
        functions="main +copy_to_host +step_on_host",
        timed={"cpu offload": Timed("memory")},
        equality=(),
    ),
    Script(
        "techniques/fsdp.py",
        functions="main +find_blocks evaluate save +gather the_rest",
        timed={"fsdp": Timed("memory", arithmetic="double")},  # its SGD is not fused
    ),
    Script(  # untimed: in two processes it is FSDP, or DDP
        "techniques/hybrid_fsdp.py",
        "techniques/fsdp.py",
        functions="main parse_args",
        ranks=4,
    ),
    Script(
        "techniques/comm_hooks.py",
        functions="main +average_hook parse_args",
        timed={
            "bf16 hook": Timed("communication", ("--hook", "bf16"), arithmetic="lossy"),
            "powersgd": Timed("communication", ("--hook", "powersgd"), arithmetic="lossy"),
        },
    ),
    Script(
        "techniques/local_sgd.py",
        functions="main +average_weights parse_args",
        timed={
            "local sgd": Timed(
                "communication",
                ("--sync-every", "8"),
                arithmetic="double",
                gate=("--sync-every", "1"),  # then it is DDP, but for rounding
                period=8,
            )
        },
    ),
    Script(
        "techniques/ring_allreduce.py",
        functions="main +average_gradients +ring_all_reduce +send_and_receive",
        timed={"ring by hand": Timed("communication")},
        equality=(),
    ),
    # Not timed: one device of its case trains nothing, so no comparison at equal devices is fair.
    Script(
        "techniques/parameter_server.py",
        functions="main evaluate +serve +push_and_pull +flatten +unflatten parse_args",
        ranks=3,
        oracle=("--parts", "2"),  # the workers
        equality=(),
        pretended=False,  # a server and two workers are three GPUs
    ),
    Script(
        "techniques/pipeline_by_hand.py",
        functions="main +split +find_layers +pipeline_step +receive evaluate save parse_args",
        timed={"pipeline by hand": Timed("model", MICRO, exact=MICRO)},
    ),
    Script(
        "techniques/pipeline.py",
        functions="main +split +find_layers evaluate save parse_args",
        timed={
            schedule: Timed("model", (*MICRO, "--schedule", schedule), exact=MICRO)
            for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble")
        },
    ),
    Script(
        "techniques/syncbn.py",
        functions="main +SumOverRanks +SyncBatchNorm +convert_sync_batchnorm evaluate",
        timed={"syncbn": Timed("communication", arithmetic="double", exact=WHOLE)},
        oracle=WHOLE,
        pretended=False,  # they lack its kernels
    ),
    Script(
        "techniques/accelerate_ddp.py",
        functions="main",
        split="contiguous",
        library="accelerate",
        timed={"accelerate": Timed("libraries")},
    ),
    Script(
        "techniques/fabric_ddp.py",
        functions="main",
        library="lightning_fabric",
        timed={"fabric": Timed("libraries")},
    ),
    Script(
        "techniques/deepspeed_zero.py",
        functions="main evaluate +whole_state save parse_args the_rest",
        library="deepspeed",
        timed={
            "deepspeed 1": Timed("libraries", ("--stage", "1")),
            "deepspeed 2": Timed("libraries", ("--stage", "2")),
            "deepspeed 3": Timed("libraries", ("--stage", "3")),
        },
        helps=("--resume",),  # the learning rate is not the file's
    ),
    Script(
        "techniques/dali.py",
        functions="main -decode load_dataset +DaliBatches +decode_and_crop +make_loader parse_args",
        library="nvidia.dali",
        helps=("--workers",),  # threads that decode
        pretended=False,  # they lack DALI's
    ),
    Script(  # untimed: its environment has no torch
        "techniques/oneflow_ddp.py",
        PLAIN,
        functions="main load_dataset decode augment evaluate Meter log save parse_args",
        launcher="oneflow",
        library="oneflow",
        helps=("--batch-size", "--save"),
        pretended=False,  # it runs without torch
    ),
    Script(
        "techniques/invariant.py",
        functions="main +sum_in_order +digest evaluate parse_args",
        timed={"invariant": Timed("exactness", exact=("--parts", "4"))},
        oracle=("--parts", "4"),
    ),
    Script(
        "techniques/uneven_inputs.py",
        functions="main +PlaceSampler +Progress evaluate parse_args",
        timed={"uneven inputs": Timed("exactness", EXTRA, exact=EXTRA)},
    ),
    Script(
        "techniques/heterogeneous.py",
        functions="main +measure +gather +divide +ShareSampler parse_args",
        split="contiguous",
        # By speed measured, no two runs cut a batch alike.
        timed={"heterogeneous": Timed("exactness", gate=("--shares", EQUAL))},
    ),
    Script(
        "techniques/distributed_eval.py",
        functions="main evaluate +mean_over_images +mean_of_means",
        timed={"exact evaluation": Timed("exactness")},
    ),
    Script(
        "techniques/elastic.py",
        functions="main +ResumableSampler save parse_args",
        timed={"elastic": Timed("exactness")},
        equality=(),
    ),
    Script(
        "techniques/tensor_parallel_by_hand.py",
        functions="main +CopyToRanks +SumOverRanks +Attention +MLP +split_dim +shard +gather"
        " +reorder +with_each evaluate Meter save",
        timed={"tensor by hand": Timed("tensor", arithmetic="double", exact=WHOLE)},
        arch="vit_tiny",
        oracle=WHOLE,
    ),
    Script(
        "techniques/tensor_parallel.py",
        "techniques/tensor_parallel_by_hand.py",
        functions="main -CopyToRanks -SumOverRanks Attention -MLP -split_dim shard gather save"
        " parse_args the_rest",
        timed={
            "tensor": Timed("tensor", arithmetic="double", exact=WHOLE),
            "sequence": Timed("tensor", ("--sequence-parallel",), arithmetic="double", exact=WHOLE),
        },
        arch="vit_tiny",
        oracle=WHOLE,
    ),
    Script(
        "techniques/parallel_2d.py",
        "techniques/tensor_parallel.py",
        functions="main +average_gradients evaluate Meter parse_args",
        timed={"data x tensor": Timed("tensor", arithmetic="double", exact=WHOLE)},
        arch="vit_tiny",
        ranks=4,
        oracle=("--parts", "2"),
    ),
    Script(  # untimed: it needs eight processes
        "techniques/parallel_3d.py",
        "techniques/parallel_2d.py",
        functions="main Attention -shard -gather -reorder -with_each +Stage evaluate Meter save"
        " parse_args",
        arch="vit_tiny",
        ranks=8,
        oracle=("--parts", "2"),
        helps=("--save",),  # a folder
        drops=("--sequence-parallel",),
        pretended=False,  # a mesh of three dimensions
    ),
    Script(
        "techniques/context_parallel.py",
        functions="main +cut_tokens +join_class_token +SumOverRanks +Attention +RingAttention"
        " +shift evaluate Meter",
        timed={"context": Timed("tensor", arithmetic="double", exact=WHOLE)},
        arch="vit_tiny",
        oracle=WHOLE,
    ),
]
# No part of the ladder, and without a gate: its loops train other numbers than ours.
FIRST, SECOND = ("--manner", "distribuuuu"), ("--manner", "tczhangzhi")
LOOPS = Script(
    "bench/ancestors.py",
    timed={
        "distribuuuu": Timed("ancestors", FIRST),
        "tczhangzhi": Timed("ancestors", SECOND),
        "bare": Timed("ancestors", ("--manner", "bare")),
        "distribuuuu without loader": Timed("parts", (*FIRST, "--without", "loader")),
        "distribuuuu without sync": Timed("parts", (*FIRST, "--without", "sync")),
        "distribuuuu without optimizer": Timed("parts", (*FIRST, "--without", "optimizer")),
        "tczhangzhi without sync": Timed("parts", (*SECOND, "--without", "sync")),
    },
)
# By path; then the rows of the tables of techniques, by name.
SCRIPTS = {script.path: script for script in [*LADDER, *TECHNIQUES]}
TIMED = {
    name: (script, how)
    for script in [*SCRIPTS.values(), LOOPS]
    for name, how in script.timed.items()
}
GROUPS = tuple(dict.fromkeys(how.group for _, how in TIMED.values()))
PAIRS = [(script.parent, script.path) for script in SCRIPTS.values() if script.parent]


def script_of(path: str) -> Script:
    """What is known of a script; of one that is not listed, what most have."""
    return SCRIPTS.get(path, Script(path))


def in_group(group: str) -> dict[str, tuple[Script, Timed]]:
    """The timed techniques of a group, by name."""
    return {name: (script, how) for name, (script, how) in TIMED.items() if how.group == group}
