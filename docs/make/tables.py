"""Tables of pages in docs/ over files in logs/. PARTS lists them: the page, the part's name, the
files, and what is shown of each file: paragraphs (texts) and tables (frames).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import pandas as pd

from bench.experiments import loader
from bench.host import machine
from bench.ladder import DDP, in_group
from bench.show.claims import counted, listed, span
from bench.show.summary import timed, title
from bench.show.table import BETWEEN, Column, cells, markdown, ratio_cell
from docs.make.logs import Part, Piece, lines_of, link, paragraph, read_run

Number = Callable[[pd.DataFrame], float]  # made of the lines of one run


# --- bench effects: the first line of a file is about the machine, the others are its runs' lines


def effect(path: Path) -> tuple[str, pd.DataFrame]:
    """The machine, with a link to the file; and the runs' lines."""
    setting, *known = lines_of(path)
    where = f"{machine(setting['environment'])}, torch {known[0]['torch']} ({link(path)})"
    return where, pd.DataFrame(known)


def repeats(lines: pd.DataFrame, run: str) -> list[pd.DataFrame]:
    """The lines of each of the runs with this name, which differ only in their number or seed."""
    by = "number" if "number" in lines else "seed"
    return [mine for _, mine in lines[lines["run"] == run].groupby(by)]


def spread(values: list[float], form: str, middle: float | None = None) -> str:
    """The mean, or another middle, with the minimum and the maximum where they differ."""
    middle = fmean(values) if middle is None else middle
    middle, least, most = (f"{x:{form}}" for x in (middle, min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def means(names: dict[str, str], columns: dict[str, tuple[Number, str]], end=None):
    """Shows a row for each name of a run, in words; a column for each number, with its format.

    end: makes a last paragraph of the lines.
    """

    def show(path: Path) -> Iterator[Piece]:
        where, lines = effect(path)
        rows = []
        for name, words in names.items():
            found = repeats(lines, name)
            texts = [spread([*map(number, found)], form) for number, form in columns.values()]
            rows.append([words, *texts])
        about = f"The mean of {len(found)} runs, with the minimum and the maximum; {where}:"
        yield paragraph(about)
        yield pd.DataFrame(rows, columns=["", *columns])
        if end:
            yield paragraph(end(lines))

    return show


def last(event: str, field: str, epoch: int | None = None) -> Number:
    """A field of a run's last line of an event, in an epoch or in all."""

    def number(run: pd.DataFrame) -> float:
        mine = run[run["event"] == event]
        return (mine if epoch is None else mine[mine["epoch"] == epoch])[field].iloc[-1]

    return number


TRAINED = {
    "MB all-reduced": (lambda run: run["all_reduce_bytes"].sum() / 1e6, ".0f"),
    "training loss, last 39 steps": (last("train", "loss"), ".3f"),
    "test loss": (last("eval", "loss"), ".3f"),
    "test accuracy": (last("eval", "accuracy"), ".1%"),
}
HOOKS = {"own": "`--hook own`, which does what DDP does"}
HOOKS |= {name: f"`--hook {name}`" for name in ("bf16", "powersgd")}
AVERAGES = {"own": "`comm_hooks.py --hook own`, which does what DDP does"}
AVERAGES |= {f"every {k}": f"`--sync-every {k}`" for k in (4, 16, 78)}

RINGS = {f"x{k}": f"{k} processes" for k in (2, 3)}
TIMES = {
    "ring_all_reduce, ms": (lambda run: 1000 * run["ring_seconds"].max(), ".0f"),
    "dist.all_reduce, ms": (lambda run: 1000 * run["all_reduce_seconds"].max(), ".0f"),
    "ratio": (lambda run: (run["ring_seconds"] / run["all_reduce_seconds"]).max(), ".2f"),
}


def ages(run: pd.DataFrame) -> list[int]:
    """The staleness of each update of a run; 0 where none is told."""
    told = (pair for found in run["staleness"].dropna() for pair in found.items())
    return [int(age) for age, times in told for _ in range(times)] or [0]


UPDATES = {f"{how} x{k}": f"`{how}`, {k} workers" for k in (2, 4) for how in ("sync", "async")}
UPDATES["fresh x4"] = "1 worker, as many updates as `async` with 4 workers"
STALENESS = {
    "mean staleness": (lambda run: sum(ages(run)) / len(ages(run)), ".1f"),
    "largest staleness": (lambda run: max(ages(run)), ".0f"),
    "training loss, end of epoch 1": (last("train", "loss", 1), ".3f"),
    "training loss, end of epoch 2": (last("train", "loss", 2), ".3f"),
    "test accuracy": (last("eval", "accuracy"), ".1%"),
}


def speed(run: pd.DataFrame) -> float:
    """Images/s of a run's steps but for the first line, which has what happens once."""
    steps = run[run["event"] == "train"][1:]
    return steps["images"].sum() / steps["seconds"].sum()


SHARES = {name: name for name in ("equal shares", "by speed")}
SPEEDS = {
    "local batch of rank 0": (lambda run: run["local_batches"].iloc[0][0], ".0f"),
    "local batch of rank 1": (lambda run: run["local_batches"].iloc[0][1], ".0f"),
    "images/s": (speed, ".0f"),
}


def slower(lines: pd.DataFrame) -> str:
    """What equal shares cost."""
    equal, faster = (fmean(map(speed, repeats(lines, name))) for name in SHARES)
    times = f"{faster / equal:.2f} times"
    return f"Equal shares take {times} as long as shares by speed. The formula predicts 1.5."


def peaks(path: Path) -> Iterator[Piece]:
    """Each script's peak memory, beside DDP's."""
    where, lines = effect(path)
    found = lines[lines["event"] == "end"].set_index("run")["peak_memory_mib"]
    ddp = found.pop(Path(DDP).stem)
    rows = [["DDP", f"{ddp:,.0f}", ""]]
    rows += [[script(name), f"{mib:,.0f}", f"{ddp - mib:,.0f}"] for name, mib in found.items()]
    yield f"{where}:"
    yield pd.DataFrame(rows, columns=["", "peak of rank 0, MiB", "less than DDP, MiB"])


def digests(path: Path) -> Iterator[Piece]:
    """Whether runs of several sizes have equal digests and losses after every step."""
    where, lines = effect(path)
    start, hashed = lines.iloc[0], lines[lines["digest"].notna()]
    found = {
        str(size): mine[["digest", "loss"]].values.tolist()
        for size, mine in hashed.groupby("processes")
    }
    one, *others = found.values()
    alike = "equal" if all(other == one for other in others) else "NOT all equal"
    steps = (hashed["event"] == "train").sum() // len(found)
    different = len({digest for digest, _ in one})
    yield paragraph(
        f"""We trained {start["arch"]} with {listed([*found])} processes, for {steps} steps with a
        global batch of {start["batch_size"]:.0f}, on {where}. After every step and every
        evaluation, the digests of these runs are {alike}. In each run,
        {"all" if different == steps else different} of the {steps} steps have different digests."""
    )


def restarts(path: Path) -> Iterator[Piece]:
    """Ranks that were killed, and replaced by torchrun."""
    starts = [0, *(line["starts"] for line in lines_of(path))]  # met so often, at each kill
    early = sum(a == b for a, b in pairwise(starts))
    yield paragraph(
        f"""On {path.parent.parent.name} ({link(path)}): all {len(starts) - 1} killed ranks were
        replaced; {early} were killed before the restarted ranks had formed a process group. The
        losses and accuracies exactly equal the losses and accuracies of an uninterrupted run."""
    )


def kills(path: Path) -> Iterator[Piece]:
    """imagenet.py's kills; restarts.jsonl beside the file has those in one run of torchrun's."""
    known = lines_of(path)
    acts = Counter(line["act"] for line in known if line["act"] != "none")
    told = ", ".join(f"{count} times {act}" for act, count in acts.most_common())
    text = f"""On {path.parent.parent.name}: {acts.total()} kills ({told}). imagenet.py resumed
        after each kill. {sum(line["finished"] for line in known)} runs finished, all with the
        numbers of an undisturbed run, bit for bit."""
    if (more := path.with_name("restarts.jsonl")).exists():
        text = f"""{text.removesuffix(".")}. In one more run, torchrun restarted the processes after
        each of {len(lines_of(more))} kills, and this run also finished with the same numbers."""
    yield paragraph(text)


def imagenette(path: Path) -> Iterator[Piece]:
    """A training: every sixth epoch and the last one."""
    known = lines_of(path)
    evals = [line for line in known if line["event"] == "eval"]
    rate = median(line["images_per_second"] for line in known if line["event"] == "train")
    yield paragraph(
        f"""On {path.parent.parent.name}, the run took
        {(known[-1]["time"] - known[0]["time"]) / 60:.1f} minutes and trained {rate:.0f} images/s
        ({link(path)}). Evaluated on {evals[-1]["images"]} photographs:"""
    )
    shown = [line for line in evals if line["epoch"] % 6 == 0 or line is evals[-1]]
    forms = {"epoch": "{epoch}", "loss": "{loss:.3f}", "top-1": "{top1:.1%}", "top-5": "{top5:.1%}"}
    yield pd.DataFrame([{k: form.format(**line) for k, form in forms.items()} for line in shown])


NAMES = {  # in the records, and on the page
    "decode_image alone": "only decode_image",
    "imagenet.py --loader dali": "imagenet.py with DALI's loader",
}


def loaders(path: Path) -> Iterator[Piece]:
    """The ways to load images that `bench loader` compares."""
    first, *_ = known = lines_of(path)
    size = first["photographs"]
    size = f"enlarged to {size.replace('x', ' x ')} pixels" if size else "not enlarged"
    yield paragraph(
        f"""On {path.parent.parent.name}, each loader used {first["workers"]} processes or threads.
        The photographs were {size}. All rows except *only decode_image* crop and resize them to
        {first["image_size"]} x {first["image_size"]} pixels:"""
    )
    rows = []
    for row in loader.analysed(known):
        speed, ratios = row["images_per_second"], (row["of_decoding"], row["of_pillow"])
        took = f"{1000 * first['workers'] / speed:.2f}"
        name = NAMES.get(row["name"], row["name"])
        texts = [span(*ratio, digits=2) for ratio in ratios]
        rows.append([name, f"{speed:,.0f}", took, *texts])
    names = ["", "images/s", "ms of a core per image", "relative to decoding", "relative to Pillow"]
    yield pd.DataFrame(rows, columns=names)


# --- bench run


def script(name: str) -> str:
    """A link to the page of a script."""
    return f"[{name}](../diffs/{name}.md)"


def costs(group: str) -> Callable[[Path], Iterator[Piece]]:
    """Shows what each timed technique of a group costs, beside DDP."""

    def show(path: Path) -> Iterator[Piece]:
        run = read_run(path.parent)
        rows = [row for row in timed(run.rows) if row["technique"] in in_group(group)]
        ddp = [row for row in timed(run.rows) if row["script"] == DDP and not row["technique"]]
        if rows and ddp:
            columns = "[columns](../reference/benchmark.md#the-columns)"
            yield f"{title(run.known)} ({link(path.parent / 'table.md', 'table')}, {columns}):"
            yield markdown(cells([ddp[0], *rows], against(ddp[0])))

    return show


def against(ddp: dict) -> list[Column]:
    """The columns of a table of costs. ddp: the row of DDP."""
    other = f"relative to DDP on {counted(ddp['world'], 'rank')}"
    return [
        Column("technique", "", lambda row: row["technique"] or "DDP"),
        Column("script", "", lambda row: script(Path(row["script"]).stem)),
        Column(f"images/s {other}", "", ratio_cell("ddp_ratio")),
        Column(f"memory {other}", "", lambda row: f"{row['memory_mib'] / ddp['memory_mib']:.2f}"),
        *BETWEEN,
    ]


def result(path: Path) -> Iterator[Piece]:
    """A result of `bench run`: its sentence, table, notes and a plot."""
    folder = path.parent
    yield f"### {folder.parent.name}/{folder.name}"
    yield path.read_text().strip()
    if (plot := folder / "ratios.png").exists():
        yield f"!{link(plot, 'images/s against snsc.py and against DDP')}"
    yield f"Plots, records and the whole table: {link(folder, folder.name)}."


# --- bench suite


def checked(path: Path) -> Iterator[Piece]:
    """Every script for 20 steps: how far from the oracle. The last line of each case counts."""
    rows = [compared(line) for line in {r["case"]: r for r in lines_of(path)}.values()]
    names = ["script, technique", "losses", "change of the weights", "outcome"]
    table = pd.DataFrame(rows, columns=names)
    exact = table["losses"].str.startswith("all") & (table["change of the weights"] == "equal")
    passed = (table["outcome"] == "passed").sum()
    yield f"### {path.parent.name}/scripts"
    cases = ", ".join(name.split(", ")[-1] for name in table[exact][names[0]])
    text = f"{passed} of {len(table)} passed, {exact.sum()} of them equal to the last bit"
    yield paragraph(f"{text}: {cases}. The others:")
    yield table[~exact]


def compared(line: dict) -> list[str]:
    """The row of a case: its losses and its weights beside the oracle's."""
    name = line["case"].split(" x")[0]
    if line["script"] not in name:
        name = f"{line['script']}, {name}"
    if why := line.get("skipped") or line["reason"]:
        return [name, "", "", ("not run: " if "skipped" in line else "failed: ") + why]
    same = [a == b for a, b in zip(line["losses"], line["oracle_losses"], strict=True)]
    first, update = [*same, False].index(False), max(line["update"])
    losses = f"the first {first} equal" if first else f"{line['distance']:.0e} off"
    losses = f"all {first} equal" if all(same) else losses
    return [name, losses, f"{update:.0e} off" if update else "equal", "passed"]


def bare(path: Path) -> Iterator[Piece]:
    """One device's bare steps, by how it computes: medians over turns, and their range."""
    lines = pd.DataFrame(line for line in lines_of(path) if "failed" not in line)
    rows = []
    for (size, way), turns in lines.groupby(["size", "way"], sort=False):
        speeds, share = turns["images_per_second"], turns["mfu"].median()
        row = [*size.split(":"), way.replace("+", ", ")]
        row += [spread([*speeds], ",.0f", speeds.median()), str(len(speeds))]
        most = turns["peak_memory_mib"].iloc[0]
        rows.append([*row, f"{share:.0%}" if share > 0 else "", f"{most:,.0f}" if most else ""])
    yield f"### {path.parent.name}/throughput"
    yield f"{lines['device_name'][0]}, torch {lines['torch'][0]} ({link(path, 'records')}):"
    names = ["model", "pixels", "batch", "computed in", "images/s", "turns", "MFU", "memory, MiB"]
    yield pd.DataFrame(rows, columns=names)


def trained(folder: Path) -> Iterator[Piece]:
    """The last epoch of a machine's transcripts, computed from their records."""
    rows = []
    for path in sorted(folder.glob("*.txt")):
        known = lines_of(path.with_suffix(".jsonl")) if path.with_suffix(".jsonl").exists() else []
        if not (evals := [r for r in known if r["event"] == "eval"]):
            continue
        start, mine = known[0], [r for r in known if r["event"] == "train"]
        mine = [r for r in mine if r["epoch"] == evals[-1]["epoch"]]
        training = sum(r["accuracy"] * r["images"] for r in mine) / sum(r["images"] for r in mine)
        images = Path(start["data"]).name if start["dataset"] == "imagenet" else start["dataset"]
        name = link(path, f"{start['script']}.py")
        shares = f"{training:.2%}", f"{evals[-1]['accuracy']:.2%}"
        rows.append([images, name, str(start.get("world_size", 1)), *shares])
    if rows:
        yield f"### {folder.name}"
        names = ["images", "script", "processes", "training, last epoch", "test"]
        yield pd.DataFrame(rows, columns=names)


LOSSES, STALE, SHARED = "effects/losses.jsonl", "effects/stale.jsonl", "effects/heterogeneous.jsonl"
DIFFS, TECHNIQUES, TIMED = "docs/diffs", "docs/techniques", "techniques*/records.jsonl"
IMAGENET, RESULTS = "docs/howto/imagenet.md", "docs/evidence/results.md"
PARTS = [
    Part(f"{DIFFS}/comm_hooks.md", "losses", LOSSES, means(HOOKS, TRAINED)),
    Part(f"{DIFFS}/elastic.md", "restarts", "effects/restarts.jsonl", restarts),
    Part(f"{DIFFS}/heterogeneous.md", "speed", SHARED, means(SHARES, SPEEDS, slower)),
    Part(f"{DIFFS}/invariant.md", "digests", "effects/invariant.jsonl", digests),
    Part(f"{DIFFS}/local_sgd.md", "losses", LOSSES, means(AVERAGES, TRAINED)),
    Part(f"{DIFFS}/parameter_server.md", "stale", STALE, means(UPDATES, STALENESS)),
    Part(f"{DIFFS}/ring_allreduce.md", "times", "effects/ring.jsonl", means(RINGS, TIMES)),
    Part(f"{TECHNIQUES}/communication.md", "costs", TIMED, costs("communication")),
    Part(f"{TECHNIQUES}/correctness.md", "costs", TIMED, costs("exactness")),
    Part(f"{TECHNIQUES}/layers.md", "costs", TIMED, costs("tensor")),
    Part(f"{TECHNIQUES}/layers.md", "pipelines", TIMED, costs("model")),
    Part(f"{TECHNIQUES}/libraries.md", "costs", TIMED, costs("libraries")),
    Part(f"{TECHNIQUES}/memory.md", "costs", TIMED, costs("memory")),
    Part(f"{TECHNIQUES}/memory.md", "peaks", "effects/memory.jsonl", peaks),
    Part(f"{TECHNIQUES}/speed.md", "costs", TIMED, costs("kernels")),
    Part(IMAGENET, "imagenette", "imagenet/imagenette.jsonl", imagenette),
    Part(IMAGENET, "kills", "imagenet/kills.jsonl", kills),
    Part(IMAGENET, "loaders", "imagenet/loader-*.jsonl", loaders),
    Part(RESULTS, "accuracy", "", trained),
    Part(RESULTS, "ancestors", "ancestors*/table.md", result),
    Part(RESULTS, "checked", "scripts.jsonl", checked),
    Part(RESULTS, "speed", "bench*/table.md", result),
    Part(RESULTS, "speed", "fresh/table.md", result),
    Part(RESULTS, "speed", "throughput.jsonl", bare),
]
