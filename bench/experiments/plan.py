"""python -m bench plan --params 7e9 --gpus 8 --memory 80: what fits, and what is sent.

The model is a transformer; 1 GB is 10^9 bytes; every row trains the same global batch. Nothing here
is measured: the formulas and their sources are in bench/formulas.py.
"""

import sys
from argparse import Namespace
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table

from bench import UserError
from bench.formulas import BYTES, Model, all_reduced, bubble, sharded_traffic, states
from bench.options import make_parser, positive

RESERVE = 0.1  # of the memory, for what is left out below. Our choice
KINDS = {  # of split models: whether by tensors, by layers, and the stage of ZeRO
    "tensor": (True, False, 0),
    "pipeline": (False, True, 0),
    "2D: tensor, FSDP": (True, False, 3),
    "3D": (True, True, 0),
}
HARDER = "CPU offload", *KINDS  # than activation checkpointing
CHECKPOINTING = "techniques/activation_checkpointing.py"
LEFT_OUT = """\
The activations include logits in 32 bits, which tensor parallelism splits as in Megatron. A row
fits if it needs at most 90% of the memory: the rest is for what is not included, such as gradients
of logits, buffers of CUDA and NCCL, and fragmentation. Close to that limit, only a run can tell.
Sent: what a GPU sends in a step, with ring algorithms. ZeRO-1 and ZeRO-2 are as in the paper;
ZeroRedundancyOptimizer and DeepSpeed send 1.5 times as much. The first stage of a pipeline also
holds the embedding."""

MIXED = """\
Except in the row AMP, weights and gradients have 16 bits, and the state has the weights in fp32,
too, as in the ZeRO paper. The scripts here train in fp32: --precision fp32 shows their rows."""


@dataclass(frozen=True)
class Row:
    """What one GPU holds, in bytes, and sends in a step. kinds: weights, gradients, state.

    script: what shows it, in fp32, with its flags. more: what is on top for a while. pcie: to and
    from the host. note: the degrees, or the cost.
    """

    name: str
    script: str
    kinds: tuple[float, ...]
    activations: float
    sent: float
    more: float = 0
    pcie: float = 0
    note: str = ""

    @property
    def held(self) -> float:
        """Bytes on the GPU."""
        return sum(self.kinds) + self.activations + self.more

    def fits(self, memory: float) -> bool:
        """Whether this many bytes of memory are enough, without RESERVE."""
        return self.held <= (1 - RESERVE) * memory


def shown_by(degrees: tuple[int, int, int], stage: int) -> str:
    """The script of a split, with its flags; "" where there is none."""
    tensor, pipe, ranks = degrees
    if stage == 3:
        return ""
    if pipe == 1:
        flat = f"techniques/parallel_2d.py --tensor-parallel {tensor}"
        return "techniques/tensor_parallel.py" if ranks == 1 else flat
    if tensor == ranks == 1:
        return "techniques/pipeline.py"
    return f"techniques/parallel_3d.py --tensor-parallel {tensor} --pipeline-parallel {pipe}"


def split(model: Model, name: str, degrees: tuple[int, int, int], stage=0) -> Row:
    """Tensor x pipeline x data parallelism; the data parallelism is DDP, or FSDP for stage 3.

    Tensor: 4 all-reduces of s b h numbers a layer, 2 more with checkpointing (Megatron, section 3).
    Pipeline: a sequence is a micro-batch; of p stages the first holds those of p, the last that of
    one, with its logits (1F1B); each sends its output, and the gradient of its input (PTD-P). A
    replica runs its sequences in passes.
    """
    tensor, pipe, ranks = degrees
    parts, batch = tensor * pipe, 1 if pipe > 1 else model.batch
    weights, gradients, _ = model.kinds(parts=parts)
    sequences = model.batch * parts  # of a replica
    passed = (6 if model.checkpoint else 4) * model.layers / pipe
    sent = passed * all_reduced(model.numbers(sequences), tensor)
    sent += 2 * model.numbers(sequences) if pipe > 1 else 0
    if stage == 3:
        sent += sequences / batch * sharded_traffic(weights, gradients, ranks)
    else:
        sent += all_reduced(gradients, ranks)
    layers = model.layers / pipe
    first = model.activations(batch, tensor, layers * min(pipe, sequences), loss=False)
    last = model.activations(batch, tensor, layers)
    notes = [f"{n} {kind}" for n, kind in zip(degrees, ("tensor", "pipeline", "data"), strict=True)]
    note = " x ".join(text for text, n in zip(notes, degrees, strict=True) if n > 1)
    note += f", idle {bubble(pipe, sequences):.0%}" if pipe > 1 else ""
    more = 2 * weights / model.layers if stage == 3 else 0
    kinds, script = model.kinds(stage, ranks, parts), shown_by(degrees, stage)
    return Row(name, script, kinds, max(first, last), sent, more, note=note)


def rows(model: Model, gpus: int, node: int, memory: float) -> list[Row]:
    """The techniques, the simplest first. Of the splits, that over the fewest GPUs that fits."""
    n, whole, kept = model.params, model.kinds(), model.activations(model.batch)
    weights, gradients, _ = whole
    averaged = all_reduced(gradients, gpus)
    less = replace(model, checkpoint=True).activations(model.batch)
    first = "DDP" if gpus > 1 else "one GPU"
    found = [Row(first, "mnmc_ddp_launch.py" if gpus > 1 else "snsc.py", whole, kept, averaged)]
    cast = replace(model, precision="mixed").activations(model.batch)
    fp32 = tuple(states(n, BYTES[model.optimizer, "fp32"]))
    note = "fp32, and a half copy"
    sent = all_reduced(fp32[1], gpus)
    found.append(Row("AMP", "techniques/amp.py", fp32, cast, sent, 2 * n, note=note))
    name = "no_sync" if gpus > 1 else "grad_accum"
    script, note = f"techniques/{name}.py", "parts of 1 sequence"
    found.append(Row(name, script, whole, model.activations(1), averaged, note=note))
    note = "1/3 more compute"
    found.append(Row("checkpointing", CHECKPOINTING, whole, less, averaged, note=note))
    if gpus > 1:
        for stage, script in ((1, "zero1.py"), (2, "deepspeed_zero.py --stage 2")):
            kinds, script = model.kinds(stage, gpus), f"techniques/{script}"
            found.append(Row(f"ZeRO-{stage}", script, kinds, kept, averaged))
        sent, block = sharded_traffic(weights, gradients, gpus), 2 * weights / model.layers
        mine, script = model.kinds(3, gpus), "techniques/fsdp.py"
        note = "and 2 whole layers"
        found.append(Row("ZeRO-3, FSDP", script, mine, kept, sent, block, note=note))
    host, script = (weights, gradients, 0), "techniques/cpu_offload.py"
    found.append(Row("CPU offload", script, host, kept, averaged, pcie=weights + gradients))
    for name, (tensor, pipe, stage) in KINDS.items():
        ways = [
            (t, p, gpus // (t * p))
            for t in range(1, min(gpus, node) + 1)
            for p in range(1, min(gpus, model.layers) + 1)
            if (t > 1) == tensor and (p > 1) == pipe and gpus % (t * p) == 0
            if model.heads % t == 0 and (stage == 0 or gpus > t)
        ]
        ways.sort(key=lambda way: way[0] * way[1])
        tried = [split(model, name, way, stage) for way in ways]
        least = min(tried, key=lambda row: row.held, default=None)
        if row := next((row for row in tried if row.fits(memory)), least):
            found.append(row)
    return found


def simplest(model: Model, gpus: int, node: int, memory: float) -> tuple[Row, bool] | None:
    """The simplest that fits: of the techniques, and of each with checkpointing (then True)."""
    found = []
    for checkpoint in (model.checkpoint, True):
        tried = replace(model, checkpoint=checkpoint)
        for place, row in enumerate(rows(tried, gpus, node, memory)):
            if row.fits(memory):
                more = checkpoint and row.name != "checkpointing"
                found.append(((row.name in HARDER, checkpoint, place), (row, more)))
    return min(found, key=lambda each: each[0])[1] if found else None


def told(found: tuple[Row, bool] | None, named: bool) -> str:
    """A technique in words; named: with the scripts, whose precision must be that of its row."""
    if not found:
        return "nothing. Take more GPUs, a smaller --batch, or a shorter --sequence."
    row, checkpoint = found
    name = f"{row.name} ({row.note})" if row.name in KINDS else row.name
    more = " with activation checkpointing" if checkpoint else ""
    scripts = [row.script, *[CHECKPOINTING] * checkpoint] if named and row.script else []
    where = f"\n  {' and '.join(scripts)}" if scripts else ""
    return f"{name}{more}, {row.held / 1e9:.1f} GB per GPU{where}"


def recommend(model: Model, gpus: int, node: int, memory: float) -> str:
    """The simplest that fits. A script is named only for what fits in the script's precision."""
    found = simplest(model, gpus, node, memory)
    if model.precision == "fp32":
        return f"The simplest that fits: {told(found, True)}"
    text = f"The simplest that fits: {told(found, bool(found) and found[0].name == 'AMP')}"
    fp32 = simplest(replace(model, precision="fp32"), gpus, node, memory)
    return f"{text}\nIn fp32, as the scripts train: {told(fp32, True)}"


def show(model: Model, args: Namespace, console: Console) -> None:
    """Prints the table and the recommendation."""
    memory = args.memory * 1e9
    title = f"{model.params:.3g} parameters, {model.optimizer}, {model.precision}; {args.gpus} GPUs"
    title += f" of {args.memory:g} GB; GB per GPU"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("technique")
    for name in ("weights", "grads", "state", "activ.", "total", "fits", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note")
    for row in rows(model, args.gpus, args.node, memory):
        sizes = (*row.kinds, row.activations, row.held)
        note = f"PCIe {row.pcie / 1e9:.1f}" if row.pcie else row.note
        fits = "yes" if row.fits(memory) else "no"
        table.add_row(
            row.name, *(f"{size / 1e9:.1f}" for size in sizes), fits, f"{row.sent / 1e9:.1f}", note
        )
    console.print(table)
    print(recommend(model, args.gpus, args.node, memory))
    print(f"On each GPU, a step has --batch {model.batch} sequences of {model.sequence} tokens.")
    shape = f"layers {model.layers}, hidden {model.hidden}, heads {model.heads}{args.estimated}"
    print(f"Vocabulary {model.vocabulary}, {shape}.")
    print(LEFT_OUT)
    if model.precision == "mixed":
        print(MIXED)


def shaped(args: Namespace) -> Model:
    """The model of the flags; a shape that is not given is estimated from N = 12 L h^2 (Scaling).

    With neither layers nor hidden given, h = 128 L, as GPT-3 has; heads have 128 numbers. Raises
    UserError.
    """
    missing = [name for name in ("layers", "hidden", "heads") if not getattr(args, name)]
    args.estimated = f" (estimated: {', '.join(missing)})" if missing else ""
    layers = args.layers or (args.params / (12 * 128**2)) ** (1 / 3)
    if args.hidden and not args.layers:
        layers = args.params / (12 * args.hidden**2)
    layers = max(1, round(layers))
    wide = (args.params / (12 * layers)) ** 0.5
    unit = 1024 if wide >= 1024 else 128  # 8 heads of 128 numbers, or one
    hidden = args.hidden or unit * max(1, round(wide / unit))
    heads = args.heads or max(1, hidden // 128)
    if hidden % heads:
        raise UserError(f"--heads {heads}: give a divisor of {hidden}, the hidden size")
    shape = args.params, layers, hidden, heads, args.sequence, args.batch, args.vocabulary
    return Model(*shape, args.optimizer, args.precision, args.attention == "fused")


def main(argv: list[str]) -> int:
    """The command; returns its exit code. Raises UserError."""
    parser = make_parser("plan", __doc__)
    add = parser.add_argument
    add("--params", type=positive(float), required=True, help="of the model: 7e9")
    add("--gpus", type=positive(int), required=True, help="in all")
    add("--memory", type=positive(float), required=True, help="of a GPU in GB")
    add("--node", type=positive(int), default=8, help="GPUs per machine: the most for tensor [8]")
    add("--layers", type=positive(int), help="[estimated: parameters = 12 layers hidden^2]")
    add("--hidden", type=positive(int), help="[estimated: 128 times the layers]")
    add("--heads", type=positive(int), help="of attention [hidden / 128]")
    add("--sequence", type=positive(int), default=2048, help="tokens [%(default)s]")
    add("--batch", type=positive(int), default=8, help="sequences per GPU in a step [%(default)s]")
    add("--vocabulary", type=positive(int), default=32000, help="as Llama 2 [%(default)s]")
    add("--optimizer", choices=["adam", "sgd"], default="adam", help="[%(default)s]")
    add("--precision", choices=["mixed", "fp32"], default="mixed", help="[%(default)s]")
    text = "plain keeps the matrices of sequence x sequence [fused]"
    add("--attention", choices=["fused", "plain"], default="fused", help=text)
    args = parser.parse_args(argv)
    show(shaped(args), args, Console(width=None if sys.stdout.isatty() else 100))
    return 0
