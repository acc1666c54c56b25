"""README.md and docs/howto/start.md: mistakes, newest result, ladder, commands, machines."""

import ast
import csv
import json
import textwrap
from pathlib import Path

from bench import ROOT, records
from bench.cases import AGAIN
from bench.diffs import counts, diff
from bench.host import machine
from bench.ladder import DDP, LADDER, PLAIN
from bench.pages.logs import logged, named
from bench.show.table import markdown

DP = "snmc_dp.py"
OUTCOMES = ROOT / "docs" / "diffs" / "outcomes.json"
MISTAKES = {  # pieces of mnmc_ddp_launch.py's page: the mistake in words, the heading of the piece
    "sampler": ("`shuffle=True`, no `DistributedSampler`", "4-sharding-the-training-images"),
    "order": (
        "`set_epoch(1)` always: one order for all epochs, as without a call",
        "7-a-new-order-in-every-epoch",
    ),
    "forward": ("`model(x)`, not `ddp_model(x)`", "9-forward-through-ddp"),
    "sums": ("metrics of rank 0 only", "13-metrics-over-all-ranks"),
    "metrics": ("an all-reduce under `if rank == 0`", "10-collectives-under-if-rank--0"),
}
KINDS = {
    "silent": "were silent",
    "hang": "hung",
    "crash": "crashed",
    "no effect here": "had no effect here",
}
USE = {  # what one takes a script for
    PLAIN: "one GPU, or only a CPU",
    DP: "the fewest changes; PyTorch advises DDP",
    DDP: "**several GPUs; several machines without Slurm**",
    "mnmc_ddp_mp.py": "a launch without torchrun",
    "mnmc_ddp_slurm.py": "a cluster with Slurm: [commands](docs/howto/slurm.md)",
    "mnmc_apex.py": "old code that uses Apex",
    "mnmc_horovod.py": "a cluster with Horovod",
}
OTHERS = [  # the rows below the ladder's
    (
        "imagenet.py",
        "docs/howto/imagenet.md",
        "everything in one script; it [resumes](docs/howto/imagenet.md#resuming)",
        "a real training",
    ),
    (
        "fsdp",
        "docs/diffs/fsdp.md",
        "FSDP: shards weights, gradients, optimizer",
        "a model too large for DDP",
    ),
    ("amp", "docs/diffs/amp.md", "mixed precision", "GPUs fast in half precision"),
    ("techniques/", "techniques/README.md", "all techniques", "memory, traffic, exactness, speed"),
]
LAUNCHERS = ("python", "torchrun", "srun", "horovodrun")
TWO_NODES = """\
# two machines with 4 GPUs each: torchrun and python on HOST, then on the other one with
# --node-rank 1; horovodrun on one of them; srun where you submit jobs"""
NO_GPU = (
    "**No script has run on a GPU yet**, neither for its numbers nor for its speed. Two machines "
    "were emulated on one, by a two-node Slurm or by network namespaces."
)
ONE_GPU = (
    "**None of these used several GPUs.** So the speed of NCCL between GPUs and of DataParallel "
    "over several is not known, nor the order of the scripts on several GPUs."
)
# Further columns of a result on GPUs, where its table.csv has them: name, key, format.
ON_GPUS = [("MFU", "mfu", "{:.1%}"), ("memory, MiB", "memory_mib", "{:,.0f}")]
MEANING = {
    "MFU": "MFU is the model's FLOP/s over the GPU's peak in the case's precision",
    "memory, MiB": "memory is the peak of the tensors, summed over all processes",
}


def begin(folder: Path) -> float:
    """When a result of `run` was begun, a Unix time."""
    return min(sample.get("begin", 0) for sample in records.of(records.read(folder)[0], "sample"))


def rows_of(folder: Path) -> list[dict]:
    """The rows of a result's table.csv."""
    with open(folder / "table.csv", newline="") as file:
        return list(csv.DictReader(file))


def setting(folder: Path) -> dict:
    """What was measured where: a result's first record."""
    return records.read(folder)[0][0]


def on_gpus(folder: Path) -> bool:
    """Whether a result was measured on GPUs."""
    return bool(setting(folder)["environment"]["gpus"])


def newest(gpus: bool) -> Path | None:
    """The folder of the newest result of the whole ladder on GPUs, or on a CPU."""
    folders = [path.parent for path in logged("*/bench/table.csv")]
    return max((f for f in folders if on_gpus(f) == gpus), key=begin, default=None)


def mistakes() -> str:
    """How many mistakes of all were silent; five with DDP and what they did, by the outcomes."""
    known = json.loads(OUTCOMES.read_text())
    kinds = [outcome["kind"] for page in known.values() for outcome in page.values()]
    rows = [["mistake", "outcome", "what happened"]]
    for name, (words, heading) in MISTAKES.items():
        found = known[Path(DDP).stem][name]
        page = f"docs/diffs/{Path(DDP).stem}.md#{heading}"
        text = found["text"].split(". ")[0].removesuffix(".")
        rows.append([f"[{words}]({page})", f"**{found['kind'].upper()}**", text])
    counted = (f"{kinds.count(kind)} {words}" for kind, words in KINDS.items())
    text = (
        f"{len(kinds)} pieces of the scripts were taken back or made wrong, and run: "
        f"{', '.join(counted)}. *Silent* means: the script finished normally, but its numbers or "
        "files are wrong. Five examples, on two processes:"
    )
    return filled(text) + "\n\n" + markdown(rows)


def printed() -> str:
    """What the README's first training printed, its first epoch and its last line on accuracy."""
    (path, *_) = logged(f"*/fashion-mnist-{Path(DDP).stem}.txt")
    lines = [line.split(" seconds=")[0] + " ..." for line in path.read_text().splitlines()]
    first, *more = (line for line in lines if line.startswith("eval "))
    train = next(line for line in lines if line.startswith("train "))
    return "\n".join(["```text", train, first, "...", more[-1], "```"])


def result() -> str:
    """The newest result on GPUs with its picture, then the newest on a CPU.

    If there is none on GPUs, the CPU's with its picture.
    """
    gpu, cpu = newest(True), newest(False)
    first = gpu or cpu
    name, words = ("throughput", "images/s of each case")
    if (first / "scaling.png").exists():
        name, words = ("scaling", "speed-up by devices")
    plot = f'<img src="{named(first)}/{name}.png" width="600" alt="{words}">'
    parts = [plot, speeds(first), filled(f"Measured on {described(first)}.")]
    parts += without(rows_of(first))
    if gpu and cpu:
        again = f"**Without a GPU**, on {described(cpu)}:"
        parts += [filled(again), speeds(cpu), *without(rows_of(cpu))]
    return "\n\n".join(parts)


def filled(text: str) -> str:
    """A paragraph, in lines of a page's width."""
    return textwrap.fill(text, 100)


def speeds(folder: Path) -> str:
    """Some columns of a result's table: snsc.py, its control, and the most processes of each."""
    cases = [row for row in rows_of(folder) if row["share"] == "1" and row["status"] == "ok"]
    most = max(int(row["world"]) for row in cases)
    cases = [row for row in cases if row["script"] == PLAIN or int(row["world"]) == most]
    more = columns(folder)
    head = ["case", "devices", "images/s", "speed-up", "efficiency", "against DDP"]
    rows = [[*head, *(name for name, _, _ in more)]]
    for case in cases:
        special = {PLAIN: "1", AGAIN: f"{spanned(case, 'ratio')}, the control"}
        row = [case["case"], case["devices"], f"{float(case['images_per_second']):,.0f}"]
        row.append(special.get(case["case"], spanned(case, "ratio")))
        row.append(f"{float(case['efficiency']):.0%}" if case["efficiency"] else "")
        claim = case["ddp_claim"] if case["ddp_claim"] in ("faster", "slower") else ""
        row.append(f"{spanned(case, 'ddp_ratio')} {claim}".strip())
        row += [shape.format(float(case[key])) if case[key] else "" for _, key, shape in more]
        rows.append(row)
    return markdown(rows)


def spanned(case: dict, key: str) -> str:
    """A ratio of a result's row with its interval: "0.84 [0.81, 0.89]"."""
    middle, low, high = (case[f"{key}{end}"] for end in ("", "_low", "_high"))
    text = f"{float(middle):.2f}" if middle else ""
    return text + (f" [{float(low):.2f}, {float(high):.2f}]" if low else "")


def columns(folder: Path) -> list[tuple[str, str, str]]:
    """Those of ON_GPUS that a result has."""
    rows = rows_of(folder) if on_gpus(folder) else []
    return [column for column in ON_GPUS if any(row[column[1]] for row in rows)]


def described(folder: Path) -> str:
    """Where and what a result was measured on, and what to know of its columns."""
    first = setting(folder)
    plan, where = first["plan"], first["environment"]
    weak = plan.get("scaling") == "weak"
    batch = f"{'local' if weak else 'global'} batch {plan['batch_size']}"
    text = f"{machine(where)} with torch {where['versions']['torch']}, "
    text += f"{plan['arch']} on {first['title']}, {batch}"
    text += "" if where["gpus"] else ". A CPU does not predict the order on GPUs"
    meanings = "; ".join(MEANING[name] for name, _, _ in columns(folder))
    return f"{text}. {meanings[0].upper()}{meanings[1:]}" if meanings else text


def without(rows: list[dict]) -> list[str]:
    """A paragraph on the cases that have no speed, by reason, where there are any."""
    missing: dict[str, list[str]] = {}
    for row in rows:
        if row["share"] == "1" and row["status"] != "ok":
            missing.setdefault(row["status"], []).append(row["case"])
    told = "; ".join(f"{' and '.join(names)} ({why})" for why, names in missing.items())
    return [filled(f"Not measured: {told}.")] if told else []


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
    rows = [["script", "what it is", "take it for", "diff"]]
    for script in LADDER:
        link = size(script.parent, script.path) if script.parent else ""
        rows.append([f"[{script.path}]({script.path})", script.adds, USE[script.path], link])
    rows += [[f"[{name}]({page})", what, use, ""] for name, page, what, use in OTHERS]
    return markdown(rows)


def measured() -> str:
    """The machines that have results in logs/; then what none has shown."""
    machines = {}
    for path in logged("*/*/records.jsonl"):
        where = setting(path.parent)["environment"]
        machines.setdefault(path.parent.parent, []).append(where)
    told = []
    for found in machines.values():
        where = max(found, key=lambda where: len(where["gpus"]))
        told.append(f"{machine(where)} with torch {where['versions']['torch']}")
    text = f"[Results](docs/evidence/results.md) so far are of: {'; '.join(told)}."
    return filled(" ".join(filter(None, [text, unseen()])))


def unseen() -> str:
    """What no result in logs/ shows of GPUs, in sentences; "" where there is nothing."""
    folders = [path.parent for path in logged("*/*/table.csv") if on_gpus(path.parent)]
    rows = [row for folder in folders for row in rows_of(folder) if row["status"] == "ok"]
    if not rows:
        return NO_GPU
    several = {row["script"] for row in rows if int(row["world"]) > 1}
    seen, where = several or {row["script"] for row in rows}, "several GPUs" if several else "a GPU"
    missing = [s.path for s in LADDER if s.path not in (PLAIN, *seen)]
    parts = [] if several else [ONE_GPU]
    parts += [f"Not measured on {where}: {' and '.join(missing)}."] if missing else []
    return " ".join(parts)
