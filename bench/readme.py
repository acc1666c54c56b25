"""Writes the generated parts of README.md, docs/results.md and docs/imagenet.md: sizes, commands,
measured figures.

    python -m bench readme           writes them
    python -m bench readme --check   exit code 1 where a file differs from what it would write

A part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. The commands come from the
scripts' docstrings, the figures from logs/, a folder a machine: transcripts (NAME.txt, NAME.jsonl),
results of `run` (bench/, techniques/ ...), peers/ and overhead/ of `peers`, and imagenet/.
"""

import ast
import csv
import json
import re
import statistics
import sys
import textwrap
from collections import Counter
from pathlib import Path

from bench import ROOT
from bench.cases import AGAIN, PLAIN
from bench.diffs import PAIRS, counts, diff
from bench.host import machine
from bench.measure import loader
from bench.results import records
from bench.results.table import replace

LOGS = ROOT / "logs"
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
    "techniques": "the techniques",
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
SHOWN = {"ratios": "images/s against snsc.py and against DDP", "loss": "losses, against the oracle"}


def text_table(rows: list[list[str]]) -> str:
    """A table in GitHub's Markdown; the first row names the columns, numbers go to the right."""
    head, *body = rows
    numbers = [
        all(re.fullmatch(r"[\d.,]*%?", cell) for cell in column)
        for column in zip(*body, strict=True)
    ]
    line = ["---:" if right else "---" for right in numbers]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, line, *body])


# README.md


def logged(pattern: str) -> list[Path]:
    """Files below logs/, in order; not those of logs/runs, which are a user's own."""
    return [path for path in sorted(LOGS.glob(pattern)) if LOGS / "runs" not in path.parents]


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
        held = [words for name, words in HOLDS.items() if (place / name).is_dir()]
        held += ["accuracy"] if [*place.glob("*.jsonl")] else []
        line = f"- {machine(where)}, torch {where['versions']['torch']}: {', '.join(held)}"
        lines.append(textwrap.fill(line, 100, subsequent_indent="  "))
    return "\n".join([*lines, *([] if gpus else ["", textwrap.fill(NO_GPU, 100)])])


# docs/results.md


def parsed(text: str) -> tuple[str, str, list[list[str]], list[str]]:
    """A table.md: title, sentence, rows without the line below their head, notes."""
    lines = text.splitlines()
    rows = [line[2:-2].split(" | ") for line in lines if line.startswith("| ")]
    notes = [line for line in lines if line.startswith("- ")]
    return lines[0], lines[2], [[cell.strip() for cell in r] for r in (rows[0], *rows[2:])], notes


def shown(folder: Path) -> str:
    """A result of `run`: its sentence, table, notes and plots."""
    where = f"../{folder.relative_to(ROOT)}"
    heading, sentence, rows, notes = parsed((folder / "table.md").read_text())
    parts = [f"### {folder.parent.name}/{folder.name}", heading, sentence, text_table(rows)]
    parts.append("\n".join(notes))
    plots = sorted(path.stem for path in folder.glob("*.png"))
    parts += [f"![{SHOWN[name]}]({where}/{name}.png)" for name in SHOWN if name in plots]
    others = ", ".join(f"[{name}]({where}/{name}.png)" for name in plots if name not in SHOWN)
    parts.append(f"More plots: {others}.")
    files = ["table.md", "table.csv", "table-all.md", records.NAME]
    there = ", ".join(f"[{name}]({where}/{name})" for name in files if (folder / name).is_file())
    parts.append(f"Its files: {there}.")
    return "\n\n".join(parts)


def speed() -> str:
    """Every result of the ladder."""
    folders = [path.parent for path in logged("*/*/table.md")]
    return "\n\n".join(shown(path) for path in folders if path.name != "techniques")


def techniques() -> str:
    """Every result of the techniques."""
    return "\n\n".join(shown(path.parent) for path in logged("*/techniques/table.md"))


def accuracy() -> str:
    """The last epoch of each machine's transcripts, computed from their records."""
    parts = []
    for place in sorted({path.parent for path in logged("*/*.jsonl")}):
        rows = [["images", "script", "processes", "training, last epoch", "test"]]
        rows += [row for path in sorted(place.glob("*.jsonl")) if (row := trained(path))]
        parts.append(f"### {place.name}\n\n{text_table(rows)}")
    return "\n\n".join(parts)


def trained(path: Path) -> list[str] | None:
    """A transcript's row; None for Apex on a CPU, where it does nothing."""
    known = [json.loads(line) for line in path.read_text().splitlines()]
    start, evals = known[0], [r for r in known if r["event"] == "eval"]
    if start["script"] == "mnmc_apex" and start["device_name"] == "cpu":
        return None
    last = [r for r in known if r["event"] == "train" and r["epoch"] == evals[-1]["epoch"]]
    training = sum(r["accuracy"] * r["images"] for r in last) / sum(r["images"] for r in last)
    images = start["dataset"]
    images = Path(start["data"]).name if images == "imagenet" else images
    script = f"[{start['script']}.py](../{path.with_suffix('.txt').relative_to(ROOT)})"
    row = [images, script, str(start.get("world_size", 1)), f"{training:.2%}"]
    return [*row, f"{evals[-1]['accuracy']:.2%}"]


def peers(name: str) -> str:
    """Each machine's results of `peers` in folders of this name, under headings of their own."""
    parts = []
    for path in logged(f"*/{name}/peers.md"):
        body = path.read_text().partition("\n")[2].strip()  # its title stands above all of them
        body = re.sub("^## ", "#### ", body, flags=re.M)
        parts.append(f"### {path.parent.parent.name}/{name}\n\n{body}")
    return "\n\n".join(parts)


def lines_of(path: Path) -> list[dict]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def imagenette() -> str:
    """Each machine's trainings by imagenet.py: the last epochs, and how long it all took."""
    parts = []
    for path in logged("*/imagenet/imagenette.jsonl"):
        known = lines_of(path)
        evals = [r for r in known if r["event"] == "eval"]
        rows = [["epoch", "loss", "top-1", "top-5"]]
        shown = [r for r in evals if r["epoch"] % 6 == 0]
        rows += [
            [str(r["epoch"]), f"{r['loss']:.3f}", f"{r['top1']:.1%}", f"{r['top5']:.1%}"]
            for r in shown
        ]
        seconds = known[-1]["time"] - known[0]["time"]
        speed = [r["images_per_second"] for r in known if r["event"] == "train"]
        text = f"On {path.parent.parent.name}, {evals[-1]['images']} photographs evaluated, "
        text += f"{seconds / 60:.1f} minutes in all, {statistics.median(speed):.0f} images/s in "
        text += f"training ([log](../{path.relative_to(ROOT)})):"
        parts.append(f"{textwrap.fill(text, 100)}\n\n{text_table(rows)}")
    return "\n\n".join(parts)


def loaders() -> str:
    """Each machine's results of bench.measure.loader."""
    parts = []
    for path in logged("*/imagenet/loader-*.jsonl"):
        known = lines_of(path)
        what = known[0]["photographs"]
        what = f"enlarged to {what.replace('x', ' x ')}" if what else "as they are"
        text = f"On {path.parent.parent.name}, photographs {what}, made {known[0]['image_size']} "
        text += f"pixels a side by {known[0]['workers']} processes or threads"
        rows = [["", "images/s", "of decoding alone", "of Pillow's"]]
        for row in loader.analysed(known):
            cells = [loader.cell(row[name]) for name in ("of_decoding", "of_pillow")]
            rows.append([row["name"], f"{row['images_per_second']:,.0f}", *cells])
        parts.append(f"{textwrap.fill(text, 100)}:\n\n{text_table(rows)}")
        speeds = {row["name"]: row["images_per_second"] for row in loader.analysed(known)}
        decoded, made, sent = (
            1000 * known[0]["workers"] / speeds[name]
            for name in (loader.DECODE, loader.ITEMS, loader.OURS)
        )
        text = f"So an image takes a core {decoded:.2f} ms to decode, {made - decoded:.2f} more to "
        text += f"crop, resize and flip, and {sent - made:.2f} more to be put into a batch and "
        text += "sent to the training process."
        parts.append(textwrap.fill(text, 100))
    return "\n\n".join(parts)


def kills() -> str:
    """What tests/kills.py has done on each machine."""
    parts = []
    for path in logged("*/imagenet/kills.jsonl"):
        known = lines_of(path)
        acts = Counter(r["act"] for r in known if r["act"] != "none")
        ended = sum(r["finished"] for r in known)
        listed = ", ".join(f"{count} times {act}" for act, count in acts.most_common())
        text = f"On {path.parent.parent.name}: {acts.total()} kills ({listed}); it went on from "
        text += f"each, and {ended} runs came to their end so, all equal bit for bit to one that "
        text += "was left alone"
        more = path.with_name("restarts.jsonl")
        if more.exists():
            count = len(lines_of(more))
            text += f". In one run by torchrun {count} of {count} killed processes were replaced, "
            text += "and it ended as if nothing had been"
        parts.append(textwrap.fill(f"{text}.", 100))
    return "\n\n".join(parts)


PARTS = {
    "README.md": {"result": result, "commands": how, "ladder": ladder, "measured": measured},
    "docs/results.md": {
        "speed": speed,
        "techniques": techniques,
        "accuracy": accuracy,
        "peers": lambda: peers("peers"),
        "overhead": lambda: peers("overhead"),
    },
    "docs/imagenet.md": {"kills": kills, "imagenette": imagenette, "loaders": loaders},
}


def render(name: str, text: str) -> str:
    """A file of PARTS with every generated part made anew.

    Raises ValueError where one is missing.
    """
    for part, make in PARTS[name].items():
        pattern = re.compile(f"(<!-- begin {part} -->\n).*?(<!-- end {part} -->)", re.S)
        body = make()
        text, found = pattern.subn(lambda m, body=body: f"{m[1]}\n{body}\n\n{m[2]}", text)
        if found != 1:
            raise ValueError(f"{name} has {found} parts named {part}, it must have one")
    return text


def main(argv: list[str]) -> int:
    """Writes or checks the files; returns the exit code."""
    if argv not in ([], ["--check"]):
        print(f"bench readme: {argv[0]}: no such flag, only --check", file=sys.stderr)
        return 2
    stale = {}
    for name in PARTS:
        old = (ROOT / name).read_text()
        if (new := render(name, old)) != old:
            stale[name] = new
    for name, new in stale.items():
        if argv:
            print(f"{name} is not up to date: python -m bench readme", file=sys.stderr)
        else:
            replace(ROOT / name, new)
    return int(bool(argv and stale))
