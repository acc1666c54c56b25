"""README.md's parts, and the parts of other pages that come from scripts, diffs and outcomes."""

import ast
import io
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from bench import ROOT, records
from bench.cases import AGAIN
from bench.experiments import plan as planner
from bench.host import machine
from bench.ladder import DDP, LADDER, PLAIN, SCRIPTS
from bench.show.claims import CPU
from bench.show.summary import Run, timed, title
from bench.show.table import FEW, cells, markdown
from docs.make.diff import counts, diff
from docs.make.logs import Made, named, paragraph, runs
from mistakes.outcomes import FOLDER, read, told
from mistakes.page import parse
from mistakes.verdicts import shown as shown_kind

DP = "snmc_dp.py"
NAME = Path(DDP).stem
MISTAKES = {  # pieces of mnmc_ddp_launch.py's page: the mistake in words, the heading of the piece
    "sampler": ("`shuffle=True`, no `DistributedSampler`", "4-sharding-the-training-images"),
    "order": (
        "`set_epoch(1)` in every epoch: all epochs have the same order",
        "7-a-new-order-in-every-epoch",
    ),
    "forward": ("`model(x)`, not `ddp_model(x)`", "9-forward-through-ddp"),
    "sums": ("metrics without an all-reduce", "13-metrics-over-all-ranks"),
    "metrics": ("an all-reduce under `if rank == 0`", "10-collectives-under-if-rank--0"),
}
KINDS = {
    "silent": "were silent",
    "NaN": "became NaN",
    "hang": "hung",
    "crash": "crashed",
    "no effect here": "had no effect",
}
USE = {  # what a script is for
    PLAIN: "one GPU, or only a CPU",
    DP: "the fewest changes; PyTorch recommends DDP",
    DDP: "**several GPUs; several machines without Slurm**",
    "mnmc_ddp_mp.py": "a launch without torchrun",
    "mnmc_ddp_slurm.py": "a cluster with Slurm: [commands](docs/howto/slurm.md)",
    "mnmc_apex.py": "old code that uses Apex",
    "mnmc_horovod.py": "a cluster with Horovod",
}
OTHERS = [  # the rows below the ladder's
    (
        "imagenet.py",
        "[a complete training script](docs/howto/imagenet.md) that "
        "[resumes](docs/howto/imagenet.md#resuming)",
        "a long training",
    ),
    (
        "techniques/fsdp.py",
        "FSDP: shards weights, gradients, optimizer",
        "a model too large for DDP",
    ),
    ("techniques/amp.py", "mixed precision", "GPUs that are faster in half precision"),
]
ALL = ["[techniques/](techniques/README.md)", "all techniques", "memory, traffic, exactness, speed"]
LAUNCHERS = ("python", "torchrun", "srun", "horovodrun")
TWO_NODES = """\
# two machines with 4 GPUs each: run torchrun and python on HOST, and with --node-rank 1 on the
# other machine; run horovodrun on one of them, and srun where you submit jobs"""


def mistakes() -> str:
    """How many mistakes of all were silent; five with DDP and what they did, by the outcomes."""
    known = read(FOLDER)
    kinds = [outcome["kind"] for page in known.values() for outcome in page.values()]
    rows = [["mistake", "outcome", "what happened"]]
    for name, (words, heading) in MISTAKES.items():
        found = known[NAME][name]
        page = f"docs/diffs/{NAME}.md#{heading}"
        text = found["text"].split(". ")[0].removesuffix(".")
        rows.append([f"[{words}]({page})", shown_kind(found["kind"]), text])
    *counted, last = (f"{kinds.count(kind)} {words}" for kind, words in KINDS.items())
    text = (
        f"For these pages, we took {len(kinds)} pieces of right code away, one in each run, or put "
        f"a typical mistake there. Of the runs, {', '.join(counted)}, and {last}. *Silent* means: "
        "the script finished normally, but its numbers or files are wrong, that is, different "
        "from the oracle beyond rounding, even if the loss is lower. Five examples, on two ranks:"
    )
    return paragraph(text) + "\n\n" + markdown(rows)


def newest(gpus: bool) -> Run | None:
    """The newest result of the whole ladder on GPUs, or on a CPU; else of --quick."""
    found = [run for run in runs("bench") if bool(run.gpus) == gpus]
    found = found or [run for run in runs("bench-quick") if bool(run.gpus) == gpus]
    return max(found, key=lambda run: records.of(run.every, "sample")[0]["begin"], default=None)


def result() -> str:
    """The newest result on GPUs with its picture, then the newest on a CPU.

    If there is none on GPUs, the CPU's with its picture.
    """
    gpu, cpu = newest(True), newest(False)
    first = gpu or cpu
    plot = named(first.folder) + "/throughput.png"
    parts = [f'<img src="{plot}" width="600" alt="images/s of each case">', *shown(first)]
    if gpu and cpu:
        parts += ["**Without a GPU**:", *shown(cpu)]
    return "\n\n".join(parts)


def shown(run: Run) -> list[str]:
    """A result: snsc.py, its control, and DDP on the most devices; where it was measured."""
    rows = timed(run.rows)
    most = max(row["world"] for row in rows)
    wanted = (PLAIN, AGAIN, f"{DDP} x{most}")
    rows = [row for row in rows if row["case"] in wanted]
    about = f"Measured: {title(run.known)}." + ("" if run.gpus else f" {CPU}")
    less = ("peak memory, MiB", "against DDP xN")
    narrow = [column for column in FEW if column.name not in less]
    return [markdown(cells(rows, narrow)), paragraph(about)]


def commands(script: str) -> tuple[str, str]:
    """How a script's docstring starts it on one node and on two; "" where it does not."""
    text = ast.get_docstring(ast.parse((ROOT / script).read_text())).split("\n\n")[1]
    one, _, two = text.partition("On two machines")
    starts = [
        [line for line in part.splitlines() if line.split(" ")[0] in LAUNCHERS]
        for part in (one, two)
    ]
    return tuple(lines[0] if lines else "" for lines in starts)


def how() -> str:
    """The commands of the ladder."""
    one, two = zip(*(commands(script.path) for script in LADDER), strict=True)
    lines = ["# one node, here with 4 GPUs", *one, "", TWO_NODES]
    return "\n".join(["```bash", *lines, *filter(None, two), "```"])


def size(old: str, new: str) -> str:
    """How many lines a diff adds and removes, linked to its page."""
    added, removed = counts(diff(old, new))
    return f"[+{added} -{removed}](docs/diffs/{Path(new).stem}.md) of {old}"


def ladder() -> str:
    """The ladder as a table, with the scripts beyond it."""
    rows = [(script.path, script.adds, USE[script.path]) for script in LADDER]
    table = [["script", "what it is", "use it for", "diff"]]
    for path, what, use in rows + OTHERS:
        parent = SCRIPTS[path].parent if path in SCRIPTS else None
        table.append([f"[{path}]({path})", what, use, size(parent, path) if parent else ""])
    return markdown([*table, [*ALL, ""]])


def measured() -> str:
    """The machines whose speeds are in logs/."""
    machines: dict[Path, list[Run]] = {}
    for run in runs("*"):
        machines.setdefault(run.folder.parent, []).append(run)
    told = []
    for found in machines.values():
        where = max(found, key=lambda run: len(run.gpus)).known[0]["environment"]
        told.append(machine(where))
    return paragraph(f"[All speeds](docs/evidence/results.md) are from: {'; '.join(told)}.")


def scripts() -> str:
    """The techniques: the first line of each docstring, and the diff, linked to its page."""
    rows = [["script", "", "diff"]]
    for path in sorted((ROOT / "techniques").glob("*.py")):
        what = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0].rstrip(".")
        page = f"../docs/diffs/{path.stem}.md"
        link = f"[its page]({page})"
        if script := SCRIPTS.get(f"techniques/{path.name}"):
            added, removed = counts(diff(script.parent, script.path))
            link = f"[+{added} -{removed}]({page})"
            link += f" from {script.parent}" if script.parent != DDP else ""
        rows.append([f"[{path.name}]({path.name})", what, link])
    return markdown(rows)


def outcome(piece: str) -> str:
    """What the page of DDP's whole diff says of a piece."""
    page = parse(FOLDER / f"{NAME}.md")
    return told(page, page.pieces[piece], read(FOLDER)[NAME][piece])


def plan(flags: str, start: str = "") -> str:
    """A command that plans a large training, and what it prints: the lines that start so."""
    with redirect_stdout(io.StringIO()) as printed:
        planner.main(flags.split())
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    shown = "\n".join(line for line in lines if line and line.startswith(start))
    return f"```bash\npython -m bench plan {flags}\n```\n\n```text\n{shown}\n```"


LARGE_GPUS = "--params 7e9 --gpus 8 --memory 80"
SMALL_GPUS = "--params 7e9 --gpus 8 --memory 24 --batch 4"
PIECES = ("who", "group", "batch", "sampler", "order", "forward", "sums", "buffers", "metrics")
PARTS = [
    Made("README.md", "mistakes", mistakes),
    Made("README.md", "ladder", ladder),
    Made("README.md", "result", result),
    Made("README.md", "measured", measured),
    Made("docs/howto/start.md", "commands", how),
    Made("docs/learn/map.md", "answer", partial(plan, SMALL_GPUS, "The simplest")),
    Made("docs/learn/map.md", "plan", partial(plan, LARGE_GPUS)),
    Made("techniques/README.md", "scripts", scripts),
    *(Made("docs/learn/ddp.md", piece, partial(outcome, piece)) for piece in PIECES),
]
