"""README.md: the newest result, the commands, the ladder, and which machines have results."""

import ast
import csv
import textwrap
from pathlib import Path

from bench import ROOT
from bench.cases import AGAIN, PLAIN
from bench.diffs import PAIRS, counts, diff
from bench.host import machine
from bench.readme.logs import logged, text_table
from bench.results import records

DP, DDP = "snmc_dp.py", "mnmc_ddp_launch.py"
ADDS = {
    PLAIN: "nothing: one process on one device",
    DP: "DataParallel: one process, all GPUs",
    DDP: "DDP: one process for each GPU",
    "mnmc_ddp_mp.py": "the same, started by `python`",
    "mnmc_ddp_slurm.py": "the same, started by Slurm",
    "mnmc_apex.py": "Apex: half precision, its own DDP",
    "mnmc_horovod.py": "Horovod in place of DDP",
}
LAUNCHERS = ("python", "torchrun", "srun", "horovodrun")
HOLDS = {  # what a folder of a machine's results has, in words
    "bench": "the ladder",
    "fresh": "the ladder, started afresh in every round",
    "techniques*": "the techniques",
    "effects": "what else techniques do",
    "peers": "the ancestors' loops",
    "overhead": "the overhead of our loop",
    "imagenet": "imagenet.py",
}
TWO_NODES = """\
# two nodes with 4 GPUs each: this on the one called HOST, and the same with --node-rank 1 on the
# other one; with Slurm and Horovod once, on any of them"""
NO_GPU = (
    "**None of these has a GPU.** So nobody has seen here how NCCL, DataParallel over several "
    "GPUs, Apex and TF32 do, and in which order GPUs would rank the scripts."
)


def begin(folder: Path) -> float:
    """When a result of `run` was begun, a Unix time."""
    return min(sample.get("begin", 0) for sample in records.of(records.read(folder)[0], "sample"))


def newest() -> Path:
    """The folder of the newest result of the whole ladder."""
    return max((path.parent for path in logged("*/bench/table.csv")), key=begin)


def result() -> str:
    """The newest result: its first plot, some columns of its table, and where it was measured."""
    folder = newest()
    with open(folder / "table.csv", newline="") as file:
        cases = [row for row in csv.DictReader(file) if row["share"] == "1"]
    rows, missing = [["case", "images/s", "against snsc.py", "claim"]], {}
    for case in cases:
        if case["status"] != "ok":
            missing.setdefault(case["status"], []).append(case["case"])
            continue
        middle, low, high = (case[f"ratio{end}"] for end in ("", "_low", "_high"))
        ratio = f"{float(middle):.2f}" if middle else ""
        ratio += f" [{float(low):.2f}, {float(high):.2f}]" if low else ""
        special = {PLAIN: "the reference", AGAIN: "the control"}
        claim = special.get(case["case"], case["claim"])
        rows.append([case["case"], f"{float(case['images_per_second']):,.0f}", ratio, claim])
    known = records.read(folder)[0]
    plan, where = known[0]["plan"], known[0]["environment"]
    last = f"Measured on {machine(where)} with torch {where['versions']['torch']}, "
    last += f"{plan['arch']} on {known[0]['title']}, global batch {plan['batch_size']}"
    last += "." if where["gpus"] else "; a CPU does not predict the order on GPUs."
    lines = [f"Without a speed: {' and '.join(n)} ({why})." for why, n in missing.items()]
    plot = f'<img src="{folder.relative_to(ROOT)}/throughput.png" width="600" '
    plot += 'alt="images/s of each case">'
    parts = [plot, text_table(rows), *(textwrap.fill(line, 100) for line in [last, *lines])]
    return "\n\n".join(parts)


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
    one, two = zip(*map(commands, ADDS), strict=True)
    lines = ["# one node, here with 4 GPUs", *one, "", TWO_NODES]
    return "\n".join(["```bash", *lines, *filter(None, two), "```"])


def size(old: str, new: str, page: str) -> str:
    """How many lines a diff adds and removes, linked to its page."""
    added, removed = counts(diff(old, new))
    return f"[+{added} -{removed}][{page.removeprefix('mnmc_')}] from {old}"


def ladder() -> str:
    """The ladder as a table, and what its links lead to."""
    before = {new: old for old, new, *_ in reversed(PAIRS)}
    pages, rows = [], [["script", "what it adds", "diff"]]
    for script, adds in ADDS.items():
        page = Path(script).stem
        link = size(before[script], script, page) if script in before else ""
        pages += [page] if link else []
        rows.append([f"[{script}]", adds, link])
        if script == DDP:
            rows.append([f"[{DDP}]", "in place of DataParallel", size(DP, DDP, "dp_to_ddp")])
    links = [f"[{script}]: {script}" for script in ADDS]
    pages.append("dp_to_ddp")
    links += [f"[{page.removeprefix('mnmc_')}]: docs/ladder/{page}.md" for page in pages]
    return text_table(rows) + "\n\n" + "\n".join(links)


def measured() -> str:
    """The machines that have results in logs/, and of what."""
    lines, gpus = [], False
    for place in sorted({path.parent.parent for path in logged("*/*/records.jsonl")}):
        folders = sorted(place.glob("*/records.jsonl"))
        where = records.read(folders[0].parent)[0][0]["environment"]
        gpus = gpus or bool(where["gpus"])
        held = [words for name, words in HOLDS.items() if any(place.glob(name))]
        held += ["accuracy"] if [*place.glob("*.jsonl")] else []
        line = f"- {machine(where)}, torch {where['versions']['torch']}: {', '.join(held)}"
        lines.append(textwrap.fill(line, 100, subsequent_indent="  "))
    return "\n".join([*lines, *([] if gpus else ["", textwrap.fill(NO_GPU, 100)])])
