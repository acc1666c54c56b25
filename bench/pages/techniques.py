"""What was measured of techniques: techniques/README.md, docs/techniques/, docs/diffs/."""

import ast
import csv
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

from bench import ROOT
from bench.diffs import counts, diff
from bench.host import machine
from bench.ladder import DDP, SCRIPTS, in_group
from bench.pages.logs import lines_of, logged, named, text_table


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
    return text_table(rows)


def costs(group: str) -> str:
    """Speed and memory of each timed technique of a group against DDP's.

    One table for each plan and world size.
    """
    names = in_group(group)
    tables: dict[tuple[str, str], list[list[str]]] = {}
    for path in logged("*/techniques*/table.csv"):
        with open(path, newline="") as file:
            found = [row for row in csv.DictReader(file) if row["status"] == "ok"]
        ddp = next((row for row in found if row["script"] == DDP and not row["technique"]), None)
        if ddp is None:  # without a speed of its own
            continue
        title = path.with_suffix(".md").read_text().splitlines()[0].strip("*")
        rows = [cost(row, ddp, path) for row in found if row["technique"] in names]
        tables.setdefault((title, f"DDP x{ddp['world']}"), []).extend(rows)
    parts = []
    for (title, ddp), rows in tables.items():
        if rows:
            head = ["technique", "script", f"images/s against {ddp}", "", f"memory against {ddp}"]
            parts.append(f"{title}:\n\n{text_table([head, *rows])}")
    return "\n\n".join(parts)


def cost(row: dict, ddp: dict, path: Path) -> list[str]:
    """A technique's row, from its table's and DDP's. Of few blocks there is no interval."""
    ratio, low, high = (row[f"ddp_ratio{end}"] for end in ("", "_low", "_high"))
    table = f"../../{named(path.with_suffix('.md'))}"
    name, page = row["technique"], Path(row["script"]).stem
    script = f"[{page}](../diffs/{page}.md)"
    script = "`NVIDIA_TF32_OVERRIDE=0`" if row["script"] == DDP else script
    speed = f"{float(ratio):.2f}" if ratio else ""
    speed += f" [{float(low):.2f}, {float(high):.2f}]" if low else ""
    known = row["memory_mib"] and ddp["memory_mib"]
    memory = f"{float(row['memory_mib']) / float(ddp['memory_mib']):.2f}" if known else ""
    return [f"[{name}]({table})", script, speed, row["ddp_claim"], memory]


Text = Callable[[str, list[dict]], str]  # of an effect, from words for the machine and records


def effect(name: str, text: Text) -> str:
    """The texts of all machines' results of `bench effects`."""
    parts = []
    for path in logged(f"*/effects/{name}.jsonl"):
        setting, *known = lines_of(path)
        where = machine(setting["environment"])
        log = f"[log](../../{named(path)})"
        parts.append(text(f"{where}, torch {known[0]['torch']} ({log})", known))
    return "\n\n".join(parts)


def wrapped(text: str) -> str:
    """A paragraph, in lines of a page's width."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def runs(known: list[dict], name: str) -> list[list[dict]]:
    """The records of each run with this name."""
    mine = [r for r in known if r["run"] == name]
    numbers = sorted({r.get("number", r.get("seed")) for r in mine})
    return [[r for r in mine if r.get("number", r.get("seed")) == number] for number in numbers]


def spread(values: Iterable[float], shape: str) -> str:
    """The mean, then the minimum and the maximum."""
    values = [*values]
    ends = f"{min(values):{shape}} to {max(values):{shape}}"
    return f"{statistics.mean(values):{shape}} ({ends})"


def trained(
    names: dict[str, str], head: list[str], extra: Callable[[list[dict]], list[str]]
) -> Text:
    """A text for `effect`: a table of losses and accuracy, a row for each run of these names.

    names: of the runs, with their words; head, extra: further columns, before the losses.
    """

    def text(where: str, known: list[dict]) -> str:
        rows = [["", *head, "training loss, last 39 steps", "test loss", "test accuracy"]]
        for name, words in names.items():
            if not (mine := runs(known, name)):
                continue
            last = [[r for r in run if r["event"] == "train"][-1] for run in mine]
            evals = [[r for r in run if r["event"] == "eval"][-1] for run in mine]
            row = [words, *extra(mine[0]), spread((r["loss"] for r in last), ".3f")]
            row.append(spread((r["loss"] for r in evals), ".3f"))
            rows.append([*row, spread((r["accuracy"] for r in evals), ".1%")])
        count = len({r["seed"] for r in known})
        about = f"The mean of {count} seeds, with the minimum and the maximum; {where}:"
        return f"{wrapped(about)}\n\n{text_table(rows)}"

    return text


def total(run: list[dict], name: str) -> int:
    """A sum over all lines of training."""
    return sum(r.get(name, 0) for r in run if r["event"] == "train")


def megabytes(run: list[dict]) -> str:
    """How much was all-reduced."""
    return f"{total(run, 'all_reduce_bytes') / 1e6:.0f} MB"


def hooks() -> str:
    """docs/diffs/comm_hooks.md's."""
    names = {"none": "`--hook none`, which is DDP", "own": "`--hook own`, which does what DDP does"}
    names |= {name: f"`--hook {name}`" for name in ("bf16", "powersgd")}
    text = trained(names, ["bytes all-reduced"], lambda run: [megabytes(run)])
    return effect("losses", text)


def averaging() -> str:
    """docs/diffs/local_sgd.md's."""

    def columns(run: list[dict]) -> list[str]:
        steps = max(r["step"] for r in run if r["event"] == "train")
        local = run[0]["run"].startswith("every")
        often = str(total(run, "all_reduces")) if local else f"in each of {steps} steps"
        return [often, megabytes(run)]

    names = {"none": "DDP", "own": "DDP"}
    names |= {f"every {k}": f"`--sync-every {k}`" for k in (4, 16, 78)}
    text = trained(names, ["all-reduces", "bytes all-reduced"], columns)
    return effect("losses", text)


def change(new: list[float], old: list[float], shape: str, unit: str = "") -> str:
    """How far the mean has moved, and whether the seeds show it."""
    apart = min(new) > max(old) or max(new) < min(old)
    words = "" if apart else " (no clear difference)"
    return f"{statistics.mean(new) - statistics.mean(old):+{shape}}{unit}{words}"


def staleness() -> str:
    """docs/diffs/parameter_server.md's."""

    def text(where: str, known: list[dict]) -> str:
        ends = [f"training loss, end of epoch {epoch}" for epoch in (1, 2)]
        rows, found, changes = [["", "staleness", *ends, "test accuracy, %"]], {}, []
        for name in dict.fromkeys(r["run"] for r in known):
            mine, ages = runs(known, name), Counter()
            for r in (r for r in known if r["run"] == name and r["event"] == "train"):
                ages.update({int(age): n for age, n in r.get("staleness", {}).items()})
            train = [{r["epoch"]: r["loss"] for r in run if r["event"] == "train"} for run in mine]
            evals = [[r for r in run if r["event"] == "eval"][-1] for run in mine]
            first, last = ([losses[epoch] for losses in train] for epoch in (1, 2))
            points = [100 * r["accuracy"] for r in evals]
            updates, workers = name.split(" x")
            words = f"`{updates}`, {workers} workers"
            if updates == "fresh":
                words = f"as many updates as `async`, {workers} workers, none stale"
            mean = sum(age * n for age, n in ages.items()) / (ages.total() or 1)
            cells = [f"{mean:.1f}, at most {max(ages)}" if ages else "0"]
            cells += [spread(first, ".3f"), spread(last, ".3f"), spread(points, ".1f")]
            rows.append([words, *cells])
            found[name] = last, points
            if updates != "sync":
                losses, others = found[f"sync x{workers}"]
                line = f"- {words}: training loss {change(last, losses, '.3f')}, "
                changes.append(f"{line}test accuracy {change(points, others, '.1f', ' points')}")
        about = f"The mean of {len(mine)} seeds, with the minimum and the maximum; {where}:"
        against = "Against `sync` with as many workers, after epoch 2. Where the seeds' ranges "
        against += "overlap, there is no clear difference:"
        parts = [wrapped(about), text_table(rows), wrapped(against), "\n".join(changes)]
        return "\n\n".join(parts)

    return effect("stale", text)


def digests() -> str:
    """docs/diffs/invariant.md's."""

    def text(where: str, known: list[dict]) -> str:
        found = {}
        for size in sorted({r["processes"] for r in known}):
            mine = [r for r in known if r["processes"] == size]
            found[size] = [(r["digest"], r["loss"]) for r in mine if "digest" in r]
            steps = sum(r["event"] == "train" for r in mine)
            arch, batch = mine[0]["arch"], mine[0]["batch_size"]
        one, *others = found.values()
        alike = "all equal" if all(other == one for other in others) else "NOT equal"
        words = f"{arch}, global batch {batch}, {steps} steps of {listed(found)} processes, with a "
        words += f"digest after each step and each evaluation: {alike}, {len({d for d, _ in one})} "
        words += f"different digests in each run. On {where}."
        return wrapped(words)

    return effect("invariant", text)


def listed(words: Iterable) -> str:
    """1, 2 and 4."""
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}"


def ring() -> str:
    """docs/diffs/ring_allreduce.md's."""

    def text(where: str, known: list[dict]) -> str:
        rows = [["processes", "ring_all_reduce, ms", "dist.all_reduce, ms", "ratio"]]
        for size in sorted({r["processes"] for r in known}):
            checks = [r for r in known if r["event"] == "check" and r["processes"] == size]
            own, other = ([r[f"{name}_seconds"] for r in checks] for name in ("ring", "all_reduce"))
            ratios = [a / b for a, b in zip(own, other, strict=True)]
            cells = [spread((1000 * s for s in times), ".0f") for times in (own, other)]
            rows.append([str(size), *cells, spread(ratios, ".2f")])
        size = checks[0]["tensor_bytes"] / 2**20
        about = f"A tensor of {size:.0f} MiB; the mean of {len(checks)} starts, with the minimum "
        about += f"and the maximum; {where}:"
        return f"{wrapped(about)}\n\n{text_table(rows)}"

    return effect("ring", text)


def uneven() -> str:
    """docs/diffs/heterogeneous.md's."""

    def text(where: str, known: list[dict]) -> str:
        rows, means = [["", "local batch of rank 0, rank 1", "images/s"]], {}
        for name in dict.fromkeys(r["run"] for r in known):
            mine, speeds = runs(known, name), []
            for run in mine:
                steps = [r for r in run if r["event"] == "train"][1:]
                speeds.append(sum(r["images"] for r in steps) / sum(r["seconds"] for r in steps))
            shares = zip(*(run[0]["local_batches"] for run in mine), strict=True)
            cells = [str(s[0]) if len({*s}) == 1 else f"{min(s)} to {max(s)}" for s in shares]
            rows.append([name, ", ".join(cells), spread(speeds, ".0f")])
            means[name] = statistics.mean(speeds)
        equal, faster = means.values()
        about = "Two processes, `--slow-rank 1 --slow-factor 2`; the mean of "
        about += f"{len(mine)} starts, with the minimum and the maximum; {where}:"
        end = f"So equal shares take {faster / equal:.2f} times as long; the formula says 1.5."
        return f"{wrapped(about)}\n\n{text_table(rows)}\n\n{end}"

    return effect("heterogeneous", text)


def restarts() -> str:
    """docs/diffs/elastic.md's, from tests/kills.py."""
    parts = []
    for path in logged("*/effects/restarts.jsonl"):
        known = lines_of(path)
        starts = [0, *(r["starts"] for r in known)]  # how often they had met, at each kill
        early = sum(a == b for a, b in pairwise(starts))
        words = f"On {path.parent.parent.name} ([log](../../{named(path)})): "
        words += f"{len(known)} of {len(known)} killed processes were replaced; {early} of them "
        words += "were killed before the next rendezvous. The losses and accuracies of all steps "
        words += "and evaluations equal those of a run without a kill, to the last bit."
        parts.append(wrapped(words))
    return "\n\n".join(parts)
