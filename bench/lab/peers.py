"""python -m bench peers: our loop against the ancestors', and against the bare device work.

Two comparisons, each in one interleaved run whose cases compute in turn (run/resident.py), in
random order within a round, with ours run twice as a control:

peers     mnmc_ddp_launch.py against loops that work as distribuuuu's tutorial and tczhangzhi's do
          (bench/lab/loops.py), one process per GPU, or two on a CPU.
overhead  snsc.py, data in memory, against the same step on one batch that stays on the device:
          no data, no augmentation, no sums. Both write a log line every quarter of a slice.

Each case is started several times, and the rounds are divided among its starts: part of what a
process costs is decided when it starts, such as the layout of its memory. On two CPU cores, page
faults then take 15% of the time, or nothing. A start of all cases is a block, and gives one number.

Wall seconds, from the records, end when the slowest process is done; CPU seconds are those of all
processes. The ratio is the geometric mean over blocks of the
ratio within each round, with its interval by Student's t over the blocks, at the level that all
ratios of a comparison share (stats.py): 1.10 means that the other needs 1.10 times our
time.
"""

import argparse
import csv
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from bench import ROOT, stats
from bench.cases import PROBE
from bench.data import enlarge
from bench.host import Host, look, machine
from bench.process import Failed, environment, heed_signals, sweep
from bench.run.resident import Resident

SECTIONS = {"peers": "mnmc_ddp_launch.py", "overhead": "snsc.py"}  # and the script that is "ours"
MANNERS = ["distribuuuu", "tczhangzhi"]
PARTS = [f"distribuuuu without {part}" for part in ("loader", "sync", "optimizer")]
PARTS += ["tczhangzhi without sync"]
ORDER = ["ours", "ours again", "bare", *MANNERS, *PARTS]  # of the rows
WINDOWS = 4  # log lines in a slice
CLOCKS = ("wall", "cpu")
COLUMNS = ["section", "batch_size", "case", "blocks", "rounds", "images_per_second"]
COLUMNS += [f"{clock}_{x}" for clock in CLOCKS for x in ("ratio", "low", "high")]
COLUMNS += ["claim"]


def fail(message: str) -> NoReturn:
    """A user's mistake: one line that names the flag and the cure, exit code 2."""
    print(f"bench peers: {message}", file=sys.stderr)
    sys.exit(2)


def positive(text: str) -> int:
    """An argparse type."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return number


def parse_args(argv):
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench peers", description=__doc__.split("\n")[0])
    parser.error, add = fail, parser.add_argument
    sets = ["fashion-mnist", "cifar10", "imagenet"]
    add("--only", choices=SECTIONS, help="one of the two comparisons [both]")
    add("--parts", action="store_true", help="also the ancestors' loops without one part each")
    add("--dataset", choices=sets, default="fashion-mnist", help="[%(default)s]")
    add("--data", type=Path, default=ROOT / "data", help="its folder [the repository's data]")
    add("--image-size", type=positive, default=32, help="pixels per side [%(default)s]")
    add("--batch-size", type=positive, nargs="+", default=[256], help="global [256]")
    add("--world", type=positive, help="processes [one per GPU, or 2 on a CPU]")
    add("--rounds", type=positive, help="[40, 3 with --quick]")
    text = "steps in a slice [8 on a CPU, 100 on a GPU, 4 with --quick]"
    add("--steps", type=positive, help=text)
    add("--threads", type=positive, help="CPU threads per process [cores / processes]")
    add("--launches", type=positive, help="starts of each case [10, 1 with --quick]")
    add("--quick", action="store_true", help="a look: too few starts for a claim")
    add("--seed", type=int, default=0, help="of the order, the data and the weights [0]")
    add("--out", type=Path, help="folder [logs/runs/peers-DATE]")
    return parser.parse_args(argv)


def complete(args, host: Host) -> None:
    """The flags that follow from the machine and from others; fails where they do not fit."""
    args.world = args.world or len(host.gpus) or 2
    args.rounds = args.rounds or (3 if args.quick else 40)
    args.launches = args.launches or (1 if args.quick else 10)
    args.steps = args.steps or (4 if args.quick else 100 if host.gpus else 8)
    args.out = args.out or ROOT / "logs" / "runs" / time.strftime("peers-%Y%m%d-%H%M%S")
    if args.steps % WINDOWS:
        fail(f"--steps {args.steps}: give a multiple of {WINDOWS}, the log lines of a slice")
    for size in args.batch_size:
        if size % args.world:
            fail(f"--batch-size {size}: give a multiple of {args.world} processes")
    records = args.out / "peers.jsonl"
    if records.exists() and records.stat().st_size:
        fail(f"--out {args.out}: there is a result already, name another folder")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        records.touch()
    except OSError as error:
        fail(f"--out {args.out}: {error.strerror}, name a folder that you may write to")


def enough(args) -> int:
    """Training images, so that an epoch holds some whole slices: three, each with the window before
    it, which holds the sleep. What is left of an epoch and holds none is run for nothing.
    """
    return max(60_000, max(50, 4 * args.steps) * max(args.batch_size))


def cases(section, args, batch_size, data):
    """Names and commands; every case gets the same data, batch, learning rate and log interval."""
    flags = ["--dataset", args.dataset, "--data", data, "--batch-size", batch_size]
    flags += ["--seed", args.seed, "--image-size", args.image_size]
    flags += ["--log-every", args.steps // WINDOWS, "--epochs", 10**6]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", args.world]
    loops, ours = Path(__file__).with_name("loops.py"), [ROOT / PROBE, ROOT / SECTIONS[section]]
    names = {"ours": ours, "ours again": ours}
    if section == "overhead":
        launcher = []
        names["bare"] = [loops, "--manner", "bare"]
    else:
        names |= {manner: [loops, "--manner", manner] for manner in MANNERS}
        for name in PARTS if args.parts else []:
            manner, part = name.split(" without ")
            names[name] = [*names[manner], "--without", part]
    return {
        name: [str(x) for x in (sys.executable, *launcher, *script, *flags)]
        for name, script in names.items()
    }


def measure(args, host, section, batch_size, data, append):
    """Runs the rounds of one comparison, and appends every slice as it is done."""
    world = args.world if section == "peers" else 1
    threads = args.threads or max(1, host.cores // world)
    env = environment(threads)
    commands = cases(section, args, batch_size, data)
    order = random.Random(args.seed)
    about, words = {"section": section, "batch_size": batch_size}, f"{section}, batch {batch_size}"
    # With several GPUs one case at a time: a stopped process's collective keeps its GPU busy.
    alone = len(host.gpus) > 1
    with tempfile.TemporaryDirectory() as logs, Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(words, total=args.rounds)

        def start(name, until):
            case = until.enter_context(Resident(name, commands[name], Path(logs), env))
            append("start", case=name, threads=threads, **about, record=case.start)
            return case

        for rounds in np.array_split(range(1, args.rounds + 1), min(args.launches, args.rounds)):
            with ExitStack() as stack:
                ready = {} if alone else {name: start(name, stack) for name in commands}
                for number in rounds.tolist():
                    names = order.sample(list(commands), len(commands))
                    for turn, name in enumerate(names, start=1):
                        with ExitStack() as until:
                            case = ready.get(name) or start(name, until)
                            done = case.slice(args.steps, within_epoch=True)
                        done |= {"load": os.getloadavg()[0]}
                        del done["windows"]
                        append("slice", round=number, turn=turn, case=name, **about, **done)
                    bar.advance(task)


def rates(records: list[dict]) -> dict[tuple, dict[str, dict]]:
    """Images/s of every slice, by section and batch, and clock and case, then by block and round.

    A start of a case is a block; where none is recorded, each round is one.
    """
    found: dict[tuple, dict] = {}
    starts: dict[tuple, int] = {}
    for record in records:
        if record["kind"] not in ("start", "slice"):
            continue
        group = (record["section"], record["batch_size"])
        which = (*group, record["case"])
        if record["kind"] == "start":
            starts[which] = starts.get(which, 0) + 1
            continue
        block = starts.get(which, record["round"])
        for clock, key in zip(CLOCKS, ("seconds", "cpu_seconds"), strict=True):
            if record[key]:  # a slice may be too short for the kernel's accounts
                blocks = found.setdefault(group, {}).setdefault((clock, record["case"]), {})
                turns = blocks.setdefault(block, {})
                turns[record["round"]] = record["images"] / record[key]
    return found


def tabulate(records: list[dict]) -> list[dict]:
    """A row a case: ratios to ours by block, as dicts with the keys COLUMNS."""
    rows = []
    for (section, size), speeds in rates(records).items():
        cases = sorted({case for _, case in speeds}, key=ORDER.index)
        claims = len(CLOCKS) * (len(cases) - 1)
        ours = {clock: speeds.get((clock, "ours"), {}) for clock in CLOCKS}
        control = stats.interval(stats.paired(ours["wall"], speeds.get(("wall", "ours again"), {})))
        for case in cases:
            wall = speeds["wall", case]
            row = {"section": section, "batch_size": size, "case": case, "blocks": len(wall)}
            row["rounds"] = sum(map(len, wall.values()))
            row["images_per_second"] = stats.interval(stats.logarithms(wall))[0]
            for clock in CLOCKS:
                logs = stats.paired(ours[clock], speeds.get((clock, case), {}))
                ratio = stats.interval(logs, claims) or (None, None, None)
                row |= zip((f"{clock}_{x}" for x in ("ratio", "low", "high")), ratio, strict=True)
            ratio = tuple(row[f"wall_{x}"] for x in ("ratio", "low", "high"))
            said = ratio[0] is not None and not case.startswith("ours")
            row["claim"] = stats.claim(ratio, control) if said else ""
            rows.append(row)
    return rows


def span(values: list[float | None], text: str = "{:.3f}") -> str:
    """A number and its interval, where it has one; "" where there is no number."""
    middle, *ends = ("" if x is None else text.format(x) for x in values)
    return f"{middle} [{ends[0]}, {ends[1]}]" if all(ends) else middle


def cells(row: dict) -> list[str]:
    """A row as people read it."""
    shown = ["1", "1"]
    if row["case"] != "ours":
        shown = [span([row[f"{clock}_{x}"] for x in ("ratio", "low", "high")]) for clock in CLOCKS]
    words = {"faster": "ours is faster", "slower": "ours is slower"}
    last = words.get(row["claim"], row["claim"])
    return [row["case"], f"{row['images_per_second']:.0f}", *shown, last]


HEAD = ["case", "images/s", "wall / ours", "CPU / ours", ""]
NOTES = {
    "peers": "Ours: mnmc_ddp_launch.py, {world} processes. Ours again is the control: its "
    "deviation shows the noise.",
    "overhead": "Ours: snsc.py. The overhead of its loop is 1 / ratio - 1: {overhead}",
}


def overhead(row: dict) -> str:
    """Seconds of ours over the bare step's, less 1, by both clocks, in percent."""
    parts = []
    for clock, word in (("wall", "wall"), ("cpu", "CPU")):
        values = [row[f"{clock}_{x}"] for x in ("ratio", "high", "low")]
        shares = [None if x is None else 100 / x - 100 for x in values]
        parts.append(f"{span(shares, '{:.1f}%')} of the {word} time")
    return ", ".join(parts) + "."


def write(args, records: list[dict], console: Console) -> None:
    """The table on the terminal, peers.csv and peers.md."""
    rows = tabulate(records)
    if not rows:
        return
    setting = records[0]
    with open(args.out / "peers.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    kinds = setting["environment"]["versions"]
    lines = ["# Our training loop against the ancestors'", ""]
    about = [machine(setting["environment"]), f"torch {kinds.get('torch', '?')}", "resnet18"]
    about += [setting["data"], f"{args.steps} steps a slice", f"order seed {args.seed}"]
    lines.append("; ".join(about) + ".")
    for section, size in dict.fromkeys((row["section"], row["batch_size"]) for row in rows):
        mine = [row for row in rows if (row["section"], row["batch_size"]) == (section, size)]
        counts = f"{mine[0]['rounds']} rounds in {mine[0]['blocks']} blocks"
        title = f"{section}, global batch {size}, {counts}"
        table = Table(*(Column(name, no_wrap=name != "case") for name in HEAD), title=title)
        lines += ["", f"## {title}", "", f"| {' | '.join(HEAD)} |", "|---|" + "---:|" * 3 + "---|"]
        for row in mine:
            table.add_row(*cells(row))
            lines.append(f"| {' | '.join(cells(row))} |")
        bare = [overhead(row) for row in mine if row["case"] == "bare"]
        note = NOTES[section].format(world=args.world, overhead="".join(bare))
        lines += ["", note]
        console.print(table)
        console.print(note)
    (args.out / "peers.md").write_text("\n".join(lines) + "\n")
    console.print(f"{args.out}: peers.jsonl, peers.csv, peers.md")


def within(path: Path) -> str:
    """A path as a record holds it: from the project's folder on, or its last part."""
    path = path.resolve()
    return path.relative_to(ROOT).as_posix() if ROOT in path.parents else path.name


def main(argv: list[str]) -> int:
    """The command; 2 for a case that cannot run, 130 after Ctrl-C (what was measured is kept)."""
    args, host = parse_args(argv), look()
    complete(args, host)
    records, code = [], 0

    def append(kind, **fields):
        records.append({"kind": kind, **fields})
        with open(args.out / "peers.jsonl", "a") as file:
            file.write(json.dumps(records[-1], default=within) + "\n")

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    heed_signals()  # so that the cases end, too
    try:
        sweep()
        with tempfile.TemporaryDirectory() as folder:
            data, words = args.data.resolve(), args.dataset
            if args.dataset == "fashion-mnist":
                try:
                    times = enlarge(data, Path(folder), enough(args))
                except OSError as error:
                    fail(f"--data {args.data}: no intact fashion-mnist there: {error}")
                data, words = Path(folder), f"{words} (its training images {times} times over)"
            words += f", {args.image_size} x {args.image_size}"
            append("setting", flags=vars(args), data=words, environment=host.record())
            for section in [args.only] if args.only else SECTIONS:
                for size in args.batch_size:
                    measure(args, host, section, size, data, append)
    except Failed as failure:
        append("failure", reason=str(failure))
        print(f"bench peers: {failure}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        append("stop", reason="interrupted")
        code = 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    write(args, records, Console())
    return code
