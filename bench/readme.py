"""Writes the generated parts of README.md again: diffs, their sizes, and measured figures.

    python -m bench readme           writes them
    python -m bench readme --check   exit code 1 where README.md differs from what it would write

A part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. The figures come from logs/,
a folder a machine: transcripts (NAME.txt, NAME.jsonl), results of `run`, and peers/.
"""

import json
import re
import sys
from pathlib import Path

from bench.diffs import PAIRS, counts, diff
from bench.launch import ROOT
from bench.table import replace

LOGS = ROOT / "logs"
ADDS = {
    "snsc.py": "nothing: one process, one device",
    "snmc_dp.py": "`nn.DataParallel`: one process splits each batch over the GPUs",
    "mnmc_ddp_launch.py": "`DistributedDataParallel`, one process a device, by `torchrun`",
    "mnmc_ddp_mp.py": "the same, started by `torch.multiprocessing.spawn`",
    "mnmc_ddp_slurm.py": "the same, started by Slurm's `srun`",
    "mnmc_apex.py": "Apex: `amp` and `apex.parallel.DistributedDataParallel`",
    "mnmc_horovod.py": "Horovod: `DistributedOptimizer`, by `horovodrun`",
}
TECHNIQUES = {
    "techniques/grad_accum.py": "gradient accumulation: the numbers of W processes on one, exactly",
    "techniques/amp.py": "`torch.amp`: mixed precision, `--amp bf16` or `--amp fp16`",
    "techniques/channels_last.py": "channels last in memory, as fast convolutions read them",
    "techniques/compile.py": "`torch.compile`: one kernel where eager mode starts many",
}
ONE_NODE = {
    "snsc.py": "python snsc.py",
    "snmc_dp.py": "python snmc_dp.py",
    "mnmc_ddp_launch.py": "torchrun --nproc-per-node 4 mnmc_ddp_launch.py",
    "mnmc_ddp_mp.py": "python mnmc_ddp_mp.py --nproc-per-node 4",
    "mnmc_ddp_slurm.py": "srun -K -N 1 -n 4 --gpus-per-node 4 python mnmc_ddp_slurm.py",
    "mnmc_apex.py": "torchrun --nproc-per-node 4 mnmc_apex.py",
    "mnmc_horovod.py": "horovodrun -np 4 python mnmc_horovod.py",
}
RDZV = "--nnodes 2 --node-rank 0 --master-addr HOST"
SEVERAL = {
    "mnmc_ddp_launch.py": f"torchrun {RDZV} --nproc-per-node 4 mnmc_ddp_launch.py",
    "mnmc_ddp_mp.py": "python mnmc_ddp_mp.py --nproc-per-node 4 --nnodes 2 --node-rank 0 "
    "--init-method tcp://HOST:29500",
    "mnmc_ddp_slurm.py": "srun -K -N 2 -n 8 --gpus-per-node 4 python mnmc_ddp_slurm.py",
    "mnmc_apex.py": f"torchrun {RDZV} --nproc-per-node 4 mnmc_apex.py",
    "mnmc_horovod.py": "horovodrun -np 8 -H HOST1:4,HOST2:4 python mnmc_horovod.py",
}


def ladder() -> str:
    """The ladder as a table."""
    lines = ["| script | what it adds | lines | compared with | one node | several nodes |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    before = {new: old for old, new, *_ in PAIRS}
    for script, adds in ADDS.items():
        length = len((ROOT / script).read_text().splitlines())
        changed = ""
        if script in before:
            added, removed = counts(diff(before[script], script))
            changed = f"[+{added} -{removed}](#{anchor(script)}) `{before[script]}`"
        several = f"`{SEVERAL[script]}`" if script in SEVERAL else ""
        row = [
            f"[`{script}`]({script})",
            adds,
            str(length),
            changed,
            f"`{ONE_NODE[script]}`",
            several,
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def anchor(script: str) -> str:
    """Where the diff to a script stands in the README."""
    return "diff-" + Path(script).stem.replace("_", "-")


def techniques() -> str:
    """The techniques as a table."""
    lines = ["| script | what it does | its diff |", "| --- | --- | --- |"]
    for old, new, *_ in PAIRS:
        if new in TECHNIQUES:
            added, removed = counts(diff(old, new))
            changed = f"[+{added} -{removed}](#{anchor(new)}) `{old}`"
            lines.append(f"| [`{new}`]({new}) | {TECHNIQUES[new]} | {changed} |")
    return "\n".join(lines)


def diffs() -> str:
    """Every diff of the ladder and its techniques, folded."""
    parts = []
    for old, new, *_ in PAIRS:
        text = diff(old, new)
        added, removed = counts(text)
        head = f"<code>{old}</code> to <code>{new}</code>: +{added} -{removed}"
        parts.append(f'<details id="{anchor(new)}"><summary>{head}</summary>\n')
        parts.append(f"```diff\n{text}```\n\n</details>\n")
    return "\n".join(parts).rstrip()


def accuracy() -> str:
    """The last epoch of each transcript in logs/, computed from its records."""
    heads = ["machine", "images", "script", "processes", "training accuracy, last epoch", "test"]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for path in sorted(LOGS.glob("*/*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        evals = [r for r in records if r["event"] == "eval"]
        last = [r for r in records if r["event"] == "train" and r["epoch"] == evals[-1]["epoch"]]
        hits = sum(r["accuracy"] * r["images"] for r in last)
        training = hits / sum(r["images"] for r in last)
        name = f"[{records[0]['script']}.py]({path.with_suffix('.txt').relative_to(ROOT)})"
        images = records[0]["dataset"].replace("imagenet", records[0]["data"])
        row = [path.parent.name, images, name, str(records[0]["world_size"])]
        lines.append(f"| {' | '.join(row)} | {training:.2%} | {evals[-1]['accuracy']:.2%} |")
    return "\n".join(lines)


def results() -> str:
    """Each machine's speed tables and three of the plots, as bench/ wrote them."""
    parts = []
    for path in sorted(LOGS.glob("*/*/table.md")):
        folder = path.parent.relative_to(ROOT)
        parts.append(f"#### {path.parent.parent.name}: {folder.name}\n\n{path.read_text()}")
        names = ["throughput", "ratios"]
        names += ["scaling"] if folder.name != "techniques" else []  # those have one world size
        parts.append("\n".join(f"![{name}]({folder}/{name}.png)" for name in names) + "\n")
    return "\n".join(parts).rstrip()


def demoted(text: str) -> str:
    """Markdown with its headings three levels down, to stand within a section of the README."""
    return re.sub("^#", "####", text.rstrip(), flags=re.M)


def peers() -> str:
    """Each machine's comparison with the ancestors' loops."""
    paths = [*sorted(LOGS.glob("*/peers/peers.md")), *sorted(LOGS.glob("*/overhead/peers.md"))]
    return "\n\n".join(
        f"Machine: {p.parent.parent.name}\n\n{demoted(p.read_text())}" for p in paths
    )


PARTS = {"ladder": ladder, "techniques": techniques, "diffs": diffs}
PARTS |= {"accuracy": accuracy, "results": results, "peers": peers}


def render(text: str) -> str:
    """The README with every generated part made anew.

    Raises ValueError where one is missing.
    """
    for name, make in PARTS.items():
        pattern = re.compile(f"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.S)
        body = make()
        text, found = pattern.subn(lambda m, body=body: f"{m[1]}\n{body}\n\n{m[2]}", text)
        if found != 1:
            raise ValueError(f"README.md has {found} parts named {name}, it must have one")
    return text


def main(argv: list[str]) -> int:
    """Writes or checks README.md; returns the exit code."""
    path = ROOT / "README.md"
    old = path.read_text()
    new = render(old)
    if argv == ["--check"]:
        if old != new:
            print("README.md is not up to date: python -m bench readme", file=sys.stderr)
        return int(old != new)
    if argv:
        print(f"bench readme: {argv[0]}: no such flag, only --check", file=sys.stderr)
        return 2
    replace(path, new)
    return 0
