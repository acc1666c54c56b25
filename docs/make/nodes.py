"""Tables of docs/howto/predict.md: predictions of `bench predict` beside what was measured.

Those of two hosts are in logs/*/predict/hosts.jsonl, written by tests/predicted.py; those of
published tables are made here, of bench/nodes/published.csv.
"""

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import NamedTuple

import pandas as pd

from bench import ROOT
from bench.nodes import predict
from bench.show.table import markdown
from docs.make.logs import Part, Piece, lines_of, link, paragraph

PUBLISHED = ROOT / "bench/nodes/published.csv"
FIRST = "DLPerf, PyTorch"
SOURCES = {  # words, and what begins the names of its tables in the file
    FIRST: "DLPerf, 8 V100 a node: ResNet-50, PyTorch, ",
    "DLPerf, other ResNet-50": "DLPerf, 8 V100 a node: ResNet-50",
    "DLPerf, BERT": "DLPerf, 8 V100 a node: BERT",
    "NVIDIA DeepLearningExamples": "DeepLearningExamples",
    "Lambda": "Lambda",
}
CLOSE = 0.07  # a prediction that is off by no more counts as close


# --- published tables: from one rank and the smallest other number of ranks, all others


def published() -> Iterator[dict]:
    """Each prediction: its source, table, ranks and interval, and what was published."""
    rows = pd.read_csv(PUBLISHED)
    for table, mine in rows.groupby("table", sort=False):
        speeds = dict(zip(mine["ranks"], mine["speed"], strict=True))
        known, *others = sorted(speeds)[1:]
        source = next(words for words, begin in SOURCES.items() if table.startswith(begin))
        for ranks in others:
            args = speeds[1], known, speeds[known], ranks, int(mine["per_node"].iloc[0])
            middle, low, high = predict.fitted(*args)
            row = {"source": source, "table": table, "known": known, "ranks": ranks}
            row |= {"predicted": middle, "low": low, "high": high, "measured": speeds[ranks]}
            row["error"] = middle / speeds[ranks] - 1
            yield row | {"inside": low <= speeds[ranks] <= high}


def by_source() -> list[dict]:
    """Of each source: its tables and predictions, and how many of them are close and inside."""
    found = []
    rows = sorted(published(), key=lambda row: [*SOURCES].index(row["source"]))
    for source, mine in groupby(rows, key=lambda row: row["source"]):
        each = [*mine]
        row = {"source": source, "tables": len({x["table"] for x in each})}
        row |= {"predictions": len(each), "inside": sum(x["inside"] for x in each)}
        row["close"] = sum(abs(x["error"]) <= CLOSE for x in each)
        found.append(row | {"worst": max(abs(x["error"]) for x in each)})
    return found


def sources() -> pd.DataFrame:
    """The table of the page."""
    names = ["tables", "predictions", "within 7%", "inside the interval", "worst error"]
    keys = ["tables", "predictions", "close", "inside"]
    rows = [[x["source"], *(str(x[k]) for k in keys), f"{x['worst']:.0%}"] for x in by_source()]
    return pd.DataFrame(rows, columns=["", *names])


def every_published() -> pd.DataFrame:
    """The table of the report."""
    rows = []
    for x in published():
        numbers = (f"{x[key]:,.0f}" for key in ("predicted", "low", "high", "measured"))
        rows.append([x["table"], f"{x['known']} → {x['ranks']}", next(numbers)])
        rows[-1] += [f"{next(numbers)} to {next(numbers)}", next(numbers), f"{x['error']:+.1%}"]
        rows[-1] += ["" if x["inside"] else "outside"]
    names = ["table", "ranks", "predicted", "interval", "published", "error", ""]
    return pd.DataFrame(rows, columns=names)


# --- two hosts of network namespaces


def starts(path: Path) -> pd.DataFrame:
    """A row for each prediction and the run after it. ratio: the speed of both hosts together, to
    the mean of a host's in the turns around it; guess: what was predicted of it; error: how far the
    guess is off. drift: from a host's slowest turn to its fastest one.
    """
    keys = ["network", "arch", "batch", "start"]
    lines = pd.DataFrame(lines_of(path))
    guesses, runs = (lines[lines["kind"] == kind] for kind in ("prediction", "measured"))
    rows = []
    for guess in guesses.to_dict("records"):
        mine = runs[(runs[keys] == [guess[key] for key in keys]).all(axis=1)]
        for run in mine.to_dict("records"):
            assert guess["time"] < run["time"]
            single = [fmean(turn) for turn in run["alone"]]
            around = [fmean(pair) for pair in pairwise(single)]
            ratio = geometric_mean(b / a for a, b in zip(around, run["together"], strict=True))
            scale = fmean(guess["alone"])
            row = {key: guess[key] for key in [*keys, "images_per_second", "load"]}
            row |= {"guess": guess["images_per_second"] / scale, "ratio": ratio}
            row |= {"low": guess["low"] / scale, "high": guess["high"] / scale}
            row |= {"together": fmean(run["together"]), "drift": max(single) / min(single) - 1}
            row |= {"error": row["guess"] / ratio - 1}
            rows.append(row | {"inside": row["low"] <= ratio <= row["high"]})
    return pd.DataFrame(rows)


def hosts(path: Path) -> Iterator[Piece]:
    """By network and model: over local batches."""
    found, rows = starts(path), []
    for (network, arch), mine in found.groupby(["network", "arch"]):
        ratios = zip(mine["batch"], mine["guess"], mine["ratio"], strict=True)
        rows.append([network, arch, ", ".join(f"{b}: {g:.2f} / {r:.2f}" for b, g, r in ratios)])
        rows[-1] += [f"{mine['error'].abs().max():.0%}", f"{mine['inside'].sum()} of {len(mine)}"]
    names = ["network", "model", "local batch: predicted / measured", "worst", "inside"]
    yield paragraph(
        f"""The hosts are namespaces on two cores that other programs used, too (load
        {found["load"].min():.0f} to {found["load"].max():.0f}): between turns of some seconds, the
        speed of one host varied by {found["drift"].median():.0%}, at most by
        {found["drift"].max():.0%}. So these are ratios: two hosts together to one host in the turns
        before and after ({link(path.with_name("report.md"), "report")}). The median error is
        {found["error"].abs().median():.0%}:"""
    )
    yield pd.DataFrame(rows, columns=names)


def every_start(path: Path) -> Iterator[Piece]:
    """A row a start. Ratios are to the speed of one host beside the other."""
    rows, keys = [], ["network", "arch", "batch", "start"]
    for x in starts(path).sort_values(keys).to_dict("records"):
        rows.append([x["network"], x["arch"], str(x["batch"]), f"{x['guess']:.2f}"])
        rows[-1] += [f"{x['low']:.2f} to {x['high']:.2f}", f"{x['ratio']:.2f}"]
        rows[-1] += [f"{x['error']:+.0%}", "" if x["inside"] else "outside"]
        rows[-1] += [f"{x['images_per_second']:.1f}", f"{x['together']:.1f}"]
        rows[-1] += [f"{x['drift']:.0%}", f"{x['load']:.0f}"]
    names = ["network", "model", "local batch", "predicted ratio", "interval", "measured ratio"]
    names += ["error", "", "predicted images/s", "measured images/s", "drift of one host", "load"]
    yield pd.DataFrame(rows, columns=names)


def example(path: Path) -> Iterator[Piece]:
    """A file of `bench predict`, and its plot."""
    rows = []
    for x in lines_of(path):
        low, high = f"{x['low']:.0f}", f"{x['high']:.0f}"
        rows.append([str(x["ranks"]), f"{x['images_per_second']:.0f}", f"{low} to {high}"])
        rows[-1] += [f"{x['efficiency']:.0%}", f"{x['ranks'] * x['efficiency']:.1f}"]
        rows[-1] += [str(x["hides_at"])]
    names = ["machines", "images/s", "interval", "efficiency", "worth, machines"]
    yield pd.DataFrame(rows, columns=[*names, "local batch that hides"])
    yield f"!{link(path.with_suffix('.png'), 'images/s against ranks: predicted and measured')}"


class Made(NamedTuple):
    """A part that is made of no file in logs/."""

    page: str
    name: str
    make: Callable[[], pd.DataFrame]

    def text(self) -> str:
        """The part as Markdown."""
        table = self.make()
        return markdown([[*table], *table.values])


PAGE, REPORT = "docs/howto/predict.md", "logs/2-cores-xeon-torch2.15/predict/report.md"
PARTS = [
    Part(PAGE, "example", "predict/resnet18-1gbit.jsonl", example),
    Part(PAGE, "hosts", "predict/hosts.jsonl", hosts),
    Made(PAGE, "published", sources),
    Part(REPORT, "hosts", "predict/hosts.jsonl", every_start),
    Made(REPORT, "published", every_published),
]
