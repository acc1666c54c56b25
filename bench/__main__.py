"""python -m bench COMMAND: times the scripts, and makes tables, plots and pages of it.

run times every case and shows the table; table, plot and report make theirs again from the records.
"""

import argparse
import datetime
import errno
import os
import signal
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

from bench import extras, records
from bench.cases import PLAIN, Case, alone, cases, techniques, worlds
from bench.environment import collect, differences, gpus, machine
from bench.launch import OWNER, ROOT, end, others, sweep

ONE_PROCESS = ("snsc.py", "snmc_dp.py")


def fail(message: str) -> None:
    """A user's mistake: one line that names the flag and the cure, exit code 2."""
    print(f"bench: {message}", file=sys.stderr)
    sys.exit(2)


def positive(kind):
    """An argparse type: a number of this kind above 0."""

    def number(text: str):
        if not (value := kind(text)) > 0:
            raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
        return value

    number.__name__ = kind.__name__
    return number


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.error = fail
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="time every case, then table and plots")
    run.error = fail
    add = run.add_argument
    add("--quick", action="store_true", help="rougher, within 3 minutes on two cores")
    add("--budget", type=positive(float), help="minutes; 12, --fresh 30, --quick 2.95")
    add("--rounds", type=positive(int), help="at most; 1,000, or 15 with --fresh")
    add("--precise", action="store_true", help="short turns of started cases: the default")
    add("--fresh", action="store_true", help="a start in every round: the default on several GPUs")
    add("--launches", type=positive(int), help="starts of each case that stays started, at most; 5")
    add("--only", help="cases by a part of their names, with commas: launch,mp")
    add("--techniques", action="store_true", help="of DDP, in place of the launchers")
    add("--world", help="world sizes, with commas; 1, 2, 4, ... up to the GPUs, 1,2 on a CPU")
    add("--dataset", choices=["cifar10", "fashion-mnist", "imagenet", "synthetic"])
    add("--data", type=Path, help="folder of the data set; data")
    add("--arch", default="resnet18", help="any classification model of torchvision")
    add("--batch-size", type=positive(int), help="global; 256 a GPU, imagenet 64")
    add("--workers", type=int, help="loader workers in all, for imagenet; 4 a GPU")
    add("--price", type=positive(float), help="of this machine, an hour: adds a column of costs")
    add("--seed", type=int, default=0, help="of the order of the cases, and the scripts' own")
    add("--out", type=Path, help="a new folder for the result; logs/runs/DATE-TIME")
    add("--resume", type=Path, metavar="DIR", help="go on with the rounds of this folder")
    add("--with", dest="extras", help=f"set up what is missing: {','.join(extras.NAMES)}")
    add("--list", action="store_true", help="show the cases and what keeps them from running")
    for name, text in (
        ("table", "make table.md and table.csv"),
        ("plot", "make the plots"),
        ("report", "make report.html"),
    ):
        sub = commands.add_parser(name, help=f"{text} again from a folder's records")
        sub.error = fail
        sub.add_argument("folder", type=Path)
    sub = commands.add_parser("compare", help="of two results, what got slower; exit code 1 if so")
    sub.error = fail
    sub.add_argument("old", type=Path)
    sub.add_argument("new", type=Path)
    sub.add_argument("--tolerance", type=positive(float), default=0.05, help="a share; 0.05")
    sub.add_argument(
        "--absolute", action="store_true", help="judge images/s, not the ratio to snsc"
    )
    sub = commands.add_parser("merge", help="several machines' results side by side")
    sub.error = fail
    sub.add_argument("folders", type=Path, nargs="+")
    sub.add_argument("--out", type=Path, help="a file for it, in Markdown")
    for name, text in (
        ("list", "show the cases"),
        ("doctor", "show what was found on this machine"),
        ("peers", "compare with the loops of the ancestors"),
        ("readme", "write the generated parts of README.md and docs/results.md"),
        ("pieces", "measure and write the pages of docs/ladder/ again"),
    ):
        commands.add_parser(name, help=text)
    return parser.parse_args(argv)


def sizes(text: str | None) -> list[int]:
    """--world as numbers."""
    if text is None:
        return worlds()
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        fail(f"--world {text}: give numbers from 1 up, with commas: 1,2,4")
    return found


def chosen(args: argparse.Namespace) -> list[Case]:
    """The cases that --world and --only ask for; the reference and its control always.

    Of each world size one rank alone, too, where there is time for it.
    """
    rows = cases(sizes(args.world))
    if args.quick and args.world is None:
        most = max(worlds())
        rows = [case for case in rows if case.world == most or case.script in ONE_PROCESS]
    if args.techniques:
        most = max(case.world for case in rows)
        rows = [c for c in rows if c.script == PLAIN or c.name == f"mnmc_ddp_launch.py x{most}"]
        rows += techniques(most)
    if args.only:
        parts = args.only.split(",")
        for part in parts:
            if not any(part in case.name for case in rows):
                fail(f"--only {part}: no case is named so, --list shows them")
        rows = [c for c in rows if c.script == PLAIN or any(part in c.name for part in parts)]
    return rows if args.quick else [*rows, *alone(rows)]


def show_cases(rows: list[Case]) -> None:
    """The cases, each with what keeps it from running here."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"cases on {machine(collect())}")
    for column in ("case", "launcher", "world size", "here"):
        table.add_column(column, overflow="fold")
    for case in rows:
        table.add_row(case.name, case.launcher, str(case.world), case.missing() or "runs")
    Console().print(table)


def show_result(folder: Path) -> None:
    """Writes the table and the plots of a folder, and prints the table."""
    from rich.console import Console
    from rich.table import Table

    from bench import plot, report
    from bench import table as tables

    heading, frame, remarks = tables.write(folder)
    paths = [*plot.write(folder), report.write(folder)]
    frame = frame[[name for name in frame.columns if name in tables.NARROW]]
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=heading)
    for column in frame.columns:
        table.add_column(column, justify="left" if column == "case" else "right", overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*map(str, row))
    console.print(table)
    for line in remarks:
        console.print(line, highlight=False)
    written = ", ".join([records.NAME, "table.md", "table.csv", *(path.name for path in paths)])
    console.print(f"{folder}: {written}", highlight=False)


def run(args: argparse.Namespace) -> int:
    """The run command; returns the exit code."""
    from bench import data
    from bench.run import LAUNCHES, Plan

    rows = chosen(args)
    names = args.extras.split(",") if args.extras else []
    if unknown := set(names) - set(extras.NAMES):
        fail(f"--with {unknown.pop()}: give some of {','.join(extras.NAMES)}")
    if args.list:
        show_cases(rows)
        return 0
    workers = 4 * max(1, len(gpus())) if args.workers is None else args.workers
    if workers < 0:
        fail(f"--workers {workers}: give 0 or more")
    if args.precise and args.fresh:
        fail("--precise, --fresh: give one of them")
    if args.precise and len(gpus()) > 1:  # while it sleeps, its all-reduce keeps a GPU at work
        fail("--precise: for one GPU or none, set CUDA_VISIBLE_DEVICES or leave it out")
    # snsc.py computes the whole global batch on one GPU, so photos get a smaller one.
    batch = args.batch_size or (64 if args.dataset == "imagenet" else 256) * max(1, len(gpus()))
    for case in rows:
        if batch % case.world:
            fail(f"--batch-size {batch}: give a multiple of the world size {case.world}")
        if args.dataset == "imagenet" and workers % case.world:  # else some ranks have fewer
            fail(f"--workers {workers}: give a multiple of the world size {case.world}")
    if args.data and not args.data.is_dir():
        fail(f"--data {args.data}: there is no such folder")
    folder = args.resume or args.out
    folder = folder or ROOT / "logs" / "runs" / f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    if args.resume:
        records.mend(folder)
    known = records.read(folder)[0] if args.resume else []
    if not args.resume and (folder / records.NAME).exists():
        fail(f"--out {folder}: holds a result, name a new folder or go on with --resume")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError
    except OSError:
        fail(f"--out {folder}: cannot be written, name another folder")
    if left := sweep():
        print(f"ended {left} processes that an earlier run had left", file=sys.stderr)
    for other in others():
        print(f"process {other} measures here, too: each makes the other slower", file=sys.stderr)
    dataset, where, words = data.choose(args.dataset, args.data)
    precise = args.precise or (len(gpus()) < 2 and not args.fresh)
    plan = Plan(
        dataset=dataset,
        data=str(where),
        batch_size=batch,
        workers=workers,
        arch=args.arch,
        seed=args.seed,
        quick=args.quick,
        budget=60 * (args.budget or (2.95 if args.quick else 12 if precise else 30)),
        rounds=args.rounds or (1000 if precise else 15),
        precise=precise,
        launches=args.launches or (1 if args.quick or not precise else LAUNCHES),
        price=args.price,
    )
    stack = ExitStack()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with stack:
        extras.provide(names, stack, lambda line: print(line, file=sys.stderr))
        return measure(args, plan, rows, folder, words, known)


def measure(args, plan, rows: list[Case], folder: Path, words: str, known: list[dict]) -> int:
    """Gates, rounds, table and plots; returns the exit code."""
    from bench.run import Failed, Runner, settings

    setting = settings(plan, rows, words, collect())
    if args.resume:
        free = dict.fromkeys(("budget", "rounds", "launches", "price"))
        differs = differences(known[0]["plan"] | free, setting["plan"] | free)
        differs += differences(known[0]["environment"], setting["environment"])
        if [c["name"] for c in known[0]["cases"]] != [c.name for c in rows]:
            differs.append("cases")
        if differs:
            fail(f"--resume {folder}: start a new run, this one differs: {'; '.join(differs)}")
    else:
        records.append(folder, "setting", **setting)
    with Progress(plan) as progress:
        runner = Runner(plan, rows, folder, progress)
        try:
            runner.skips()
            runner.rounds(runner.gates())
            code = 0
        except Failed as error:
            print(f"bench: {error}", file=sys.stderr)
            code = 1
        except KeyboardInterrupt:
            end(OWNER)
            print("bench: interrupted; go on later with --resume", file=sys.stderr)
            code = 130
        finally:
            end(OWNER)
    if records.of(records.read(folder)[0], "sample"):
        show_result(folder)
    return code


class Progress:
    """What is running: a bar on a terminal, else a line a launch."""

    def __init__(self, plan):
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}")
        self.bar = Bar(*columns, console=console, transient=True, refresh_per_second=2)
        self.terminal, self.total, self.turns = console.is_terminal, plan.rounds, plan.precise
        self.task = self.bar.add_task("set-up", total=self.total, left="")

    def __enter__(self):
        if self.terminal:
            self.bar.start()
        return self

    def __exit__(self, *_):
        self.bar.stop()

    def __call__(self, text: str, number: int = 1, share: float = 0.0, left: float | None = None):
        """text: which case and round; left: seconds of the budget."""
        rest = "" if left is None else f"{max(0, left) / 60:.1f} min left"
        done = number - 1 + share
        if not self.terminal and (self.turns and share):
            return  # a line a round is enough where a turn takes a second
        if self.terminal:
            self.bar.update(self.task, description=text, completed=done, left=rest)
        else:
            print(f"{text}, {rest}" if rest else text, file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    if argv[:1] == ["peers"]:  # has a parser of its own
        from bench.peers import main as peers

        return peers(argv[1:])
    if argv[:1] == ["readme"]:
        from bench.readme import main as readme

        return readme(argv[1:])
    if argv[:1] == ["pieces"]:
        from bench.pieces import main as pieces

        return pieces(argv[1:])
    args = parse(argv)
    try:
        if args.command == "run":
            return run(args)
        if args.command == "list":
            show_cases(cases(worlds()))
        elif args.command == "doctor":
            from rich import print_json

            print_json(data=collect())
        elif args.command in ("compare", "merge"):
            from bench import compare

            return getattr(compare, args.command)(args)
        else:
            import_module(f"bench.{args.command}").write(args.folder)
    except (records.BadRecords, records.NotWritten) as error:
        fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        fail(f"{error.filename}: {error.strerror}: free some, then make the table again")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
