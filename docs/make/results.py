"""docs/evidence/results.md: every result in logs/."""

import json
from pathlib import Path
from statistics import median

from bench import records
from bench.show.table import markdown
from docs.make.logs import lines_of, logged, named

PLOT = "ratios"  # shown, not only linked


def shown(folder: Path, brief: bool = False) -> str:
    """A result of `run`: its sentence, table, notes and plots; brief: without table and notes."""
    where = f"../../{named(folder)}"
    text = (folder / "table.md").read_text().strip()
    parts = [f"### {folder.parent.name}/{folder.name}"]
    parts += text.split("\n\n")[:2] if brief else [text]
    plots = sorted(path.stem for path in folder.glob("*.png"))
    if PLOT in plots and not brief:
        plots.remove(PLOT)
        parts.append(f"![images/s against snsc.py and against DDP]({where}/{PLOT}.png)")
    others = ", ".join(f"[{name}]({where}/{name}.png)" for name in plots)
    parts.append(f"{'Plots' if brief else 'More plots'}: {others}.")
    files = ["table.md", "table.csv", "table-all.md", records.NAME]
    there = ", ".join(f"[{name}]({where}/{name})" for name in files if (folder / name).is_file())
    parts.append(f"Its files: {there}.")
    return "\n\n".join(parts)


def speed() -> str:
    """Every result of the ladder."""
    folders = [path.parent for path in logged("*/*/table.md")]
    other = ("techniques", "ancestors")
    return "\n\n".join(shown(path) for path in folders if not path.name.startswith(other))


def techniques() -> str:
    """Every result of the techniques, briefly: docs/techniques/ has their ratios."""
    return "\n\n".join(shown(path.parent, True) for path in logged("*/techniques*/table.md"))


def accuracy() -> str:
    """The last epoch of each machine's transcripts, computed from their records."""
    tables: dict[str, list] = {}
    for path in logged("*/*.jsonl"):
        if path.with_suffix(".txt").exists() and (row := trained(path)):
            tables.setdefault(path.parent.name, []).append(row)
    head = ["images", "script", "processes", "training, last epoch", "test"]
    return "\n\n".join(f"### {name}\n\n{markdown([head, *rows])}" for name, rows in tables.items())


def trained(path: Path) -> list[str] | None:
    """A transcript's row; None for a training that has evaluated nothing."""
    known = [json.loads(line) for line in path.read_text().splitlines()]
    start, evals = known[0], [r for r in known if r["event"] == "eval"]
    if not evals:
        return None
    last = [r for r in known if r["event"] == "train" and r["epoch"] == evals[-1]["epoch"]]
    training = sum(r["accuracy"] * r["images"] for r in last) / sum(r["images"] for r in last)
    images = start["dataset"]
    images = Path(start["data"]).name if images == "imagenet" else images
    script = f"[{start['script']}.py](../../{named(path.with_suffix('.txt'))})"
    row = [images, script, str(start.get("world_size", 1)), f"{training:.2%}"]
    return [*row, f"{evals[-1]['accuracy']:.2%}"]


def ancestors() -> str:
    """Our loop against the ancestors'."""
    return "\n\n".join(shown(path.parent) for path in logged("*/ancestors*/table.md"))


def checked() -> str:
    """Every script on each machine with GPUs, for 20 steps: how far from the oracle."""
    parts = []
    for path in logged("*/scripts.jsonl"):
        rows = [["script, technique", "losses", "change of the weights", "outcome"]]
        lines = [*{line["case"]: line for line in lines_of(path)}.values()]  # the last of each
        for line in lines:
            name = line["case"].split(" x")[0]
            if line["script"] not in name:
                name = f"{line['script']}, {name}"
            if why := line.get("skipped") or line["reason"]:
                kind = "not run: " if "skipped" in line else "failed: "
                rows.append([name, "", "", kind + why])
                continue
            pairs = zip(line["losses"], line["oracle_losses"], strict=True)
            first = next((k for k, (a, b) in enumerate(pairs) if a != b), len(line["losses"]))
            losses = f"the first {first} equal" if first else f"{line['distance']:.0e} off"
            if first == len(line["losses"]):
                losses = f"all {first} equal"
            update = max(line["update"])
            rows.append([name, losses, f"{update:.0e} off" if update else "equal", "passed"])
        equal = sum(row[1].startswith("all") for row in rows)
        passed = sum(row[3] == "passed" for row in rows)
        text = f"{passed} of {len(lines)} passed; the losses of {equal} are equal bit for bit."
        parts.append(f"### {path.parent.name}/scripts\n\n{text}\n\n{markdown(rows)}")
    return "\n\n".join(parts)


def throughput() -> str:
    """One device's bare steps, by how it computes: medians over turns, and their range."""
    parts = []
    for path in logged("*/throughput.jsonl"):
        rows = [["model", "pixels", "batch", "computed in", "images/s", "MFU", "memory, MiB"]]
        lines = [line for line in lines_of(path) if "failed" not in line]
        for size, way in dict.fromkeys((line["size"], line["way"]) for line in lines):
            turns = [line for line in lines if (line["size"], line["way"]) == (size, way)]
            speeds = [line["images_per_second"] for line in turns]
            speed = f"{median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
            share, most = turns[0]["mfu"], turns[0]["peak_memory_mib"]
            share = f"{median(line['mfu'] for line in turns):.0%}" if share else ""
            row = [*size.split(":"), way.replace("+", ", "), speed, share]
            rows.append([*row, f"{most:,.0f}" if most else ""])
        where = f"{lines[0]['device_name']}, torch {lines[0]['torch']}"
        parts.append(f"### {path.parent.name}/throughput\n\n{where}:\n\n{markdown(rows)}")
    return "\n\n".join(parts)
