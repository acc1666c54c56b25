"""Tables of docs/howto/predict.md: predictions of `bench predict` beside what was measured.

Those of two hosts are in logs/*/predict/hosts.jsonl, written by tests/predicted.py; those of
published tables are made here, of bench/nodes/published.csv.
"""

import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, geometric_mean

import pandas as pd

from bench import ROOT
from bench.nodes import predict
from bench.show.table import markdown
from docs.make.logs import Made, Part, Piece, lines_of, link, paragraph

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
SHARE = 0.9  # of the published speeds that should be in their intervals
ERRORS = [k / 200 for k in range(1, 61)]  # those that are tried: 0.5% to 30%


# --- published tables: from one rank and the smallest other number of ranks, all others


@cache
def cases() -> list[dict]:
    """Each prediction: its source, table, ranks, and what was published; args: of predict.fitted;
    needs: the least error with which that is in the interval.
    """
    found = []
    for table, mine in pd.read_csv(PUBLISHED).groupby("table", sort=False):
        speeds = dict(zip(mine["ranks"], mine["speed"], strict=True))
        known, *others = sorted(speeds)[1:]
        source = next(words for words, begin in SOURCES.items() if table.startswith(begin))
        for ranks in others:
            args = speeds[1], known, speeds[known], ranks, int(mine["per_node"].iloc[0])
            row = {"source": source, "table": table, "known": known, "ranks": ranks}
            row |= {"args": args, "measured": speeds[ranks], "needs": ERRORS[-1]}
            for error in ERRORS:
                _, low, high = predict.fitted(*args, error)
                if low <= speeds[ranks] <= high:
                    row["needs"] = error
                    break
            found.append(row)
    return found


def calibrated(rows: list[dict]) -> float:
    """The least error with which SHARE of these speeds, and of one more, are in the intervals."""
    needs = sorted(row["needs"] for row in rows)
    return needs[math.ceil(SHARE * (len(needs) + 1)) - 1]


def published() -> Iterator[dict]:
    """Each prediction, its interval by the error that all tables but its own give."""
    for row in cases():
        error = calibrated([other for other in cases() if other["table"] != row["table"]])
        middle, low, high = predict.fitted(*row["args"], error)
        row = row | {"predicted": middle, "low": low, "high": high}
        row["error"] = middle / row["measured"] - 1
        yield row | {"inside": low <= row["measured"] <= high}


def by_source() -> pd.DataFrame:
    """Of each source: its tables and predictions, and how many of them are close and inside."""
    rows = pd.DataFrame(published())
    rows["off"] = rows["error"].abs()
    rows["close"] = rows["off"] <= CLOSE
    found = rows.groupby("source").agg(
        tables=("table", "nunique"),
        predictions=("table", "size"),
        close=("close", "sum"),
        inside=("inside", "sum"),
        worst=("off", "max"),
    )
    return found.loc[[*SOURCES]]


def sources() -> str:
    """The table of the page."""
    head = ["", "tables", "predictions", "within 7%", "inside the interval", "worst error"]
    rows = by_source().itertuples()
    return markdown([head, *([*map(str, row[:-1]), f"{row.worst:.0%}"] for row in rows)])


def every_published() -> str:
    """The table of the report."""
    rows = [["table", "ranks", "predicted", "interval", "published", "error", ""]]
    for x in published():
        middle, low, high, known = (
            f"{x[key]:,.0f}" for key in ("predicted", "low", "high", "measured")
        )
        row = [x["table"], f"{x['known']} → {x['ranks']}", middle, f"{low} to {high}", known]
        rows.append([*row, f"{x['error']:+.1%}", "" if x["inside"] else "outside"])
    return markdown(rows)


# --- two hosts of network namespaces


def starts(path: Path) -> pd.DataFrame:
    """A row for each prediction and the run after it, with means over the turns of the run. ratio:
    the speed of both hosts together to that of one in the turns around; guess: what was predicted
    of it, and error: how far that is off; again: how far the prediction by one host's speed in the
    turns around is off. drift: from one host's slowest turn to its fastest.
    """
    keys, rows = ["network", "arch", "batch", "start"], []
    found: dict[tuple, dict] = {}
    for line in lines_of(path):
        found.setdefault(tuple(line[key] for key in keys), {})[line["kind"]] = line
    for case, each in found.items():
        if "again" not in each:  # the run failed, or was cut off
            continue
        guess, run, again = each["prediction"], each["measured"], each["again"]["predictions"]
        assert guess["time"] < run["time"]
        single, scale = [fmean(turn) for turn in run["alone"]], fmean(guess["alone"])
        around = [fmean(pair) for pair in pairwise(single)]
        low, high, middle = (
            geometric_mean(x[key] / both for x, both in zip(again, run["together"], strict=True))
            for key in ("low", "high", "images_per_second")
        )
        ratio = geometric_mean(b / a for a, b in zip(around, run["together"], strict=True))
        row = dict(zip(keys, case, strict=True)) | {"load": guess["load"], "ratio": ratio}
        row |= {name: guess[key] / scale for name, key in RATIOS.items()}
        row |= {"error": row["guess"] / ratio - 1, "inside": row["low"] <= ratio <= row["high"]}
        row |= {"again": middle - 1, "inside_again": low <= 1 <= high}
        rows.append(row | {"drift": max(single) / min(single) - 1})
    return pd.DataFrame(rows)


RATIOS = {"guess": "images_per_second", "low": "low", "high": "high"}


def hosts(path: Path) -> Iterator[Piece]:
    """By network and model: over local batches and starts."""
    found, rows = starts(path), []
    for (network, arch), mine in found.groupby(["network", "arch"]):
        rows.append([network, arch, str(len(mine))])
        for error, inside in (("error", "inside"), ("again", "inside_again")):
            off = mine[error]
            rows[-1] += [f"{off.median():+.0%} ({off.min():+.0%} to {off.max():+.0%})"]
            rows[-1] += [str(mine[inside].sum())]
    names = ["network", "model", "runs", "error", "inside", "error, by the turns around", "inside"]
    report = link(path.with_name("report.md"), "report")
    yield paragraph(
        f"""The hosts are namespaces on two cores that other programs used, too (load
        {found["load"].min():.0f} to {found["load"].max():.0f}): within two minutes, the speed of
        one host changed by a factor of {1 + found["drift"].median():.1f}, at most
        {1 + found["drift"].max():.1f}. The errors are of the ratio of both hosts together to one
        host, which took turns of seconds. In the last two columns, the prediction was made again
        from one host's speed in the turns just before and after. In advance,
        {found["inside"].sum()} of {len(found)} intervals held the measured ratio, and
        {found["inside_again"].sum()} by the turns around, where the median error is
        {found["again"].abs().median():.0%} ({report}):"""
    )
    yield pd.DataFrame(rows, columns=names)


def every_start(path: Path) -> Iterator[Piece]:
    """A row a start. Ratios are to the speed of one host beside the other."""
    rows, keys = [], ["network", "arch", "batch", "start"]
    for x in starts(path).sort_values(keys).to_dict("records"):
        rows.append([x["network"], x["arch"], str(x["batch"]), f"{x['guess']:.2f}"])
        rows[-1] += [f"{x['low']:.2f} to {x['high']:.2f}", f"{x['ratio']:.2f}"]
        rows[-1] += [f"{x['error']:+.0%}", "" if x["inside"] else "outside", f"{x['again']:+.0%}"]
        rows[-1] += ["" if x["inside_again"] else "outside"]
        rows[-1] += [f"{x['drift']:.0%}", f"{x['load']:.0f}"]
    names = ["network", "model", "local batch", "predicted ratio", "interval", "measured ratio"]
    names += ["error", "", "error, by the turns around", "", "drift of one host", "load"]
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


PAGE, REPORT = "docs/howto/predict.md", "logs/2-cores-xeon-torch2.15/predict/report.md"
PARTS = [
    Part(PAGE, "example", "predict/resnet18-1gbit.jsonl", example),
    Part(PAGE, "hosts", "predict/hosts.jsonl", hosts),
    Made(PAGE, "published", sources),
    Part(REPORT, "hosts", "predict/hosts.jsonl", every_start),
    Made(REPORT, "published", every_published),
]
