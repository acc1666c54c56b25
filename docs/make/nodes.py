"""Tables of docs/howto/predict.md: predictions of `bench predict` beside what was measured.

Those of two hosts are in logs/*/predict/hosts.jsonl, written by tests/predicted.py; those of
published tables are made here, of bench/nodes/published.csv.
"""

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
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
    """A row for each prediction and the run after it. ratio: to one host's speed, measured."""
    keys = ["network", "arch", "batch", "start"]
    lines = pd.DataFrame(lines_of(path))
    guesses, runs = (lines[lines["kind"] == kind] for kind in ("prediction", "measured"))
    guesses = guesses.drop(columns=["kind", "together"])
    found = guesses.merge(runs[[*keys, "together", "time"]], on=keys, suffixes=("", "_after"))
    assert (found["time"] < found["time_after"]).all()
    found["single"] = found["alone"].map(fmean)
    found["error"] = found["images_per_second"] / found["together"] - 1
    found["inside"] = found["together"].between(found["low"], found["high"])
    found["ratio"], found["guess"] = found["together"] / found["single"], 2 * found["efficiency"]
    return found


def hosts(path: Path) -> Iterator[Piece]:
    """By network and model: over local batches and starts."""
    found, rows = starts(path), []
    for (network, arch), mine in found.groupby(["network", "arch"]):
        rows.append([network, arch, str(len(mine)), f"{median(mine['error']):+.0%}"])
        rows[-1] += [f"{mine['error'].min():+.0%} to {mine['error'].max():+.0%}"]
        rows[-1] += [f"{mine['inside'].sum()} of {len(mine)}"]
    names = ["network", "model", "predictions", "median error", "errors", "inside the interval"]
    yield paragraph(
        f"""The two hosts are namespaces on two cores which other programs used, too: the load was
        {found["load"].min():.0f} to {found["load"].max():.0f}
        ({link(path.with_name("report.md"), "all predictions")}):"""
    )
    yield pd.DataFrame(rows, columns=names)


def every_start(path: Path) -> Iterator[Piece]:
    """A row a start. Ratios are to the mean speed of one host beside the other."""
    rows = []
    keys = ["network", "arch", "batch", "start"]
    for x in starts(path).sort_values(keys).to_dict("records"):
        numbers = [x["single"], x["images_per_second"], x["low"], x["high"], x["together"]]
        alone, guess, low, high, both = (f"{number:.4g}" for number in numbers)
        rows.append([x["network"], x["arch"], str(x["batch"]), str(x["start"]), alone, guess])
        rows[-1] += [f"{low} to {high}", both, f"{x['error']:+.0%}", f"{x['guess']:.2f}"]
        rows[-1] += [f"{x['ratio']:.2f}", "" if x["inside"] else "outside", f"{x['load']:.0f}"]
    names = ["network", "model", "local batch", "start", "one host, images/s"]
    names += ["predicted, images/s", "interval", "measured", "error", "predicted ratio"]
    yield pd.DataFrame(rows, columns=[*names, "measured ratio", "", "load"])


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
