"""What was measured of techniques: techniques/README.md, docs/techniques/, docs/diffs/."""

import ast
import statistics
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from bench import ROOT
from bench.host import machine
from bench.ladder import DDP, SCRIPTS, in_group
from bench.show.summary import timed, title
from bench.show.table import BETWEEN, Column, cells, markdown, ratio
from bench.show.verdict import counted, listed
from docs.make.logs import lines_of, logged, named, paragraph, runs
from mistakes.diff import counts, diff


def scripts() -> str:
    """Each script, the first line of its docstring, and its diff, linked to its page."""
    rows = [["script", "", "diff"]]
    for path in sorted((ROOT / "techniques").glob("*.py")):
        what = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0].rstrip(".")
        page = f"../docs/diffs/{path.stem}.md"
        link = f"[its page]({page})"
        if script := SCRIPTS.get(f"techniques/{path.name}"):
            added, removed = counts(diff(script.parent, script.path))
            link = f"[+{added} -{removed}]({page}) from {script.parent}"
        rows.append([f"[{path.name}]({path.name})", what, link])
    return markdown(rows)


def costs(group: str) -> str:
    """What each timed technique of a group costs, beside DDP: a table for each result."""
    parts = []
    for run in runs("techniques*"):
        rows = [row for row in timed(run.rows) if row["technique"] in in_group(group)]
        ddp = [row for row in timed(run.rows) if row["script"] == DDP and not row["technique"]]
        if rows and ddp:
            where = f"{title(run.known)} ([table](../../{named(run.folder)}/table.md), "
            where += "[columns](../reference/benchmark.md#the-columns))"
            parts.append(f"{where}:\n\n{markdown(cells([ddp[0], *rows], against(ddp[0])))}")
    return "\n\n".join(parts)


def against(ddp: dict) -> list[Column]:
    """The columns of a table of costs. ddp: the row of DDP."""
    other = f"relative to DDP on {counted(ddp['world'], 'rank')}"
    return [
        Column("technique", "", lambda row: row["technique"] or "DDP"),
        Column("script", "", lambda row: link(Path(row["script"]).stem)),
        Column(f"images/s {other}", "", ratio("ddp_ratio")),
        Column(f"memory {other}", "", lambda row: f"{row['memory_mib'] / ddp['memory_mib']:.2f}"),
        *BETWEEN,
    ]


def link(name: str) -> str:
    """A link from docs/techniques/ to the page of a script."""
    return f"[{name}](../diffs/{name}.md)"


# The results of `bench effects`. A repeat is the records of one of the runs that differ in
# nothing but their seed or number.

Number = Callable[[list[dict]], float]  # made of a repeat


def measured(name: str) -> Iterator[tuple[str, list[dict]]]:
    """Of each machine that has an effect: what it is, with a link, and the records."""
    for path in logged(f"*/effects/{name}.jsonl"):
        setting, *known = lines_of(path)
        where = f"{machine(setting['environment'])}, torch {known[0]['torch']}"
        yield f"{where} ([log](../../{named(path)}))", known


def repeats(known: list[dict], name: str) -> list[list[dict]]:
    """The repeats of the run with this name."""
    found: dict[int, list[dict]] = {}
    for r in known:
        if r["run"] == name:
            found.setdefault(r["number"] if "number" in r else r["seed"], []).append(r)
    return [*found.values()]


def spread(values: Iterable[float], shape: str) -> str:
    """The mean, then the minimum and the maximum, where they differ."""
    values = [*values]
    mean, least, most = (
        f"{value:{shape}}" for value in (statistics.mean(values), min(values), max(values))
    )
    return mean if least == most else f"{mean} ({least} to {most})"


def table(
    where: str, known: list[dict], names: dict[str, str], columns: dict[str, tuple[Number, str]]
) -> str:
    """A row for each run, with its words in names; a column for each number, with its format."""
    rows = [["", *columns]]
    for name, words in names.items():
        found = repeats(known, name)
        texts = [spread(map(number, found), shape) for number, shape in columns.values()]
        rows.append([words, *texts])
    about = f"The mean of {len(found)} runs, with the minimum and the maximum; {where}:"
    return f"{paragraph(about)}\n\n{markdown(rows)}"


def tables(effect: str, *rest) -> str:
    """The tables of all machines; rest: names and columns, as `table` takes them."""
    return "\n\n".join(table(*found, *rest) for found in measured(effect))


def megabytes(repeat: list[dict]) -> float:
    """How much was all-reduced."""
    return sum(r.get("all_reduce_bytes", 0) for r in repeat if r["event"] == "train") / 1e6


def last(event: str, name: str, epoch: int | None = None) -> Number:
    """A field of the last line of an event, in an epoch or in all."""

    def number(repeat: list[dict]) -> float:
        lines = [r for r in repeat if r["event"] == event and epoch in (None, r.get("epoch"))]
        return lines[-1][name]

    return number


TRAINED = {
    "MB all-reduced": (megabytes, ".0f"),
    "training loss, last 39 steps": (last("train", "loss"), ".3f"),
    "test loss": (last("eval", "loss"), ".3f"),
    "test accuracy": (last("eval", "accuracy"), ".1%"),
}


def hooks() -> str:
    """docs/diffs/comm_hooks.md's."""
    names = {"own": "`--hook own`, which does what DDP does"}
    names |= {name: f"`--hook {name}`" for name in ("bf16", "powersgd")}
    return tables("losses", names, TRAINED)


def averaging() -> str:
    """docs/diffs/local_sgd.md's."""
    names = {"own": "`comm_hooks.py --hook own`, which does what DDP does"}
    names |= {f"every {k}": f"`--sync-every {k}`" for k in (4, 16, 78)}
    return tables("losses", names, TRAINED)


def staleness() -> str:
    """docs/diffs/parameter_server.md's."""

    def ages(repeat: list[dict]) -> list[int]:
        found = (pair for r in repeat for pair in r.get("staleness", {}).items())
        return [int(age) for age, times in found for _ in range(times)] or [0]

    names = {f"{how} x{k}": f"`{how}`, {k} workers" for k in (2, 4) for how in ("sync", "async")}
    names["fresh x4"] = "1 worker, as many updates as `async` with 4 workers"
    columns = {
        "mean staleness": (lambda repeat: statistics.mean(ages(repeat)), ".1f"),
        "largest staleness": (lambda repeat: max(ages(repeat)), ".0f"),
        "training loss, end of epoch 1": (last("train", "loss", 1), ".3f"),
        "training loss, end of epoch 2": (last("train", "loss", 2), ".3f"),
        "test accuracy": (last("eval", "accuracy"), ".1%"),
    }
    return tables("stale", names, columns)


def ring() -> str:
    """docs/diffs/ring_allreduce.md's."""
    own, other = last("check", "ring_seconds"), last("check", "all_reduce_seconds")
    columns = {
        "ring_all_reduce, ms": (lambda repeat: 1000 * own(repeat), ".0f"),
        "dist.all_reduce, ms": (lambda repeat: 1000 * other(repeat), ".0f"),
        "ratio": (lambda repeat: own(repeat) / other(repeat), ".2f"),
    }
    return tables("ring", {f"x{k}": f"{k} processes" for k in (2, 3)}, columns)


def peaks() -> str:
    """docs/techniques/memory.md's."""
    parts = []
    for where, known in measured("memory"):
        found = {r["run"]: r["peak_memory_mib"] for r in known if r["event"] == "end"}
        ddp = found.pop("mnmc_ddp_launch")
        rows = [["", "peak of rank 0, MiB", "less than DDP, MiB"], ["DDP", f"{ddp:,.0f}", ""]]
        for name, peak in found.items():
            rows.append([f"[{name}](../diffs/{name}.md)", f"{peak:,.0f}", f"{ddp - peak:,.0f}"])
        parts += [f"{where}:", markdown(rows)]
    return "\n\n".join(parts)


def uneven() -> str:
    """docs/diffs/heterogeneous.md's."""

    def speed(repeat: list[dict]) -> float:
        steps = [r for r in repeat if r["event"] == "train"][1:]
        return sum(r["images"] for r in steps) / sum(r["seconds"] for r in steps)

    names = {name: name for name in ("equal shares", "by speed")}
    columns = {
        "local batch of rank 0": (lambda repeat: repeat[0]["local_batches"][0], ".0f"),
        "local batch of rank 1": (lambda repeat: repeat[0]["local_batches"][1], ".0f"),
        "images/s": (speed, ".0f"),
    }
    parts = []
    for where, known in measured("heterogeneous"):
        equal, faster = (statistics.mean(map(speed, repeats(known, name))) for name in names)
        end = f"Equal shares take {faster / equal:.2f} times as long as shares by speed. "
        end += "The formula predicts 1.5."
        parts += [table(where, known, names, columns), end]
    return "\n\n".join(parts)


def digests() -> str:
    """docs/diffs/invariant.md's."""
    parts = []
    for where, known in measured("invariant"):
        found = {}
        for size in sorted({r["processes"] for r in known}):
            mine = [r for r in known if r["processes"] == size]
            found[str(size)] = [(r["digest"], r["loss"]) for r in mine if "digest" in r]
            steps = sum(r["event"] == "train" for r in mine)
            arch, batch = mine[0]["arch"], mine[0]["batch_size"]
        one, *others = found.values()
        alike = "equal" if all(other == one for other in others) else "NOT all equal"
        words = f"We trained {arch} with {listed([*found])} processes, for {steps} steps with a "
        words += f"global batch of {batch}, on {where}. After every step and every evaluation, the "
        words += f"digests of these runs are {alike}. "
        different = len({digest for digest, _ in one})
        words += f"In each run, {'all' if different == steps else different} of the {steps} steps "
        words += "have different digests."
        parts.append(paragraph(words))
    return "\n\n".join(parts)


def restarts() -> str:
    """docs/diffs/elastic.md's, from tests/kills.py."""
    parts = []
    for path in logged("*/effects/restarts.jsonl"):
        known = lines_of(path)
        starts = [0, *(r["starts"] for r in known)]  # how often they had met, at each kill
        early = sum(a == b for a, b in pairwise(starts))
        words = f"On {path.parent.parent.name} ([log](../../{named(path)})): "
        words += f"all {len(known)} killed ranks were replaced; {early} were killed before the "
        words += "restarted ranks had formed a process group. The losses and accuracies exactly "
        words += "equal the losses and accuracies of an uninterrupted run."
        parts.append(paragraph(words))
    return "\n\n".join(parts)
