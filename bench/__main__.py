"""python -m bench COMMAND: times the scripts, and makes tables, plots and pages of it.

run times every case and shows the table; table, plot and report make theirs again from the records.
"""

import argparse
import errno
import sys
from importlib import import_module
from pathlib import Path

from bench import UserError, extras
from bench.ladder import GROUPS, KERNELS

# Commands with a parser of their own, and where they are.
OWN_PARSER = {"peers": "lab.peers", "readme": "pages.generated", "pieces": "pages.pieces"}
OWN_PARSER["site"] = "pages.site"


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


def add_run(commands) -> None:
    """The flags of `run`."""
    run = commands.add_parser("run", help="time every case, then table and plots")
    run.error = fail
    add = run.add_argument
    add("--quick", action="store_true", help="rougher, within 3 minutes on two cores")
    add("--budget", type=positive(float), help="minutes; 14, --fresh 60, --quick 2.95")
    add("--blocks", type=positive(int), help="at most; as many as fit into the budget")
    add("--precise", action="store_true", help="cases take short turns: the default")
    add("--fresh", action="store_true", help="one after the other: the default on several GPUs")
    add("--only", help="cases whose names contain one of these, with commas: launch,mp")
    text = f"groups of DDP techniques instead of the launchers: {','.join(GROUPS)} [{KERNELS}]"
    add("--techniques", nargs="?", const=KERNELS, help=text)
    add("--world", help="world sizes, with commas; 1, 2, 4, ... up to the GPUs, or else the cores")
    text = "on a CPU: one per process, as it would have one GPU, or all cores for all; one"
    add("--threads", choices=["one", "all"], help=text)
    add("--dataset", choices=["cifar10", "fashion-mnist", "imagenet"])
    add("--data", type=Path, help="folder of the data set; data")
    add("--arch", default="resnet18", help="any classification model of torchvision")
    add("--image-size", type=positive(int), help="pixels per side; 32, imagenet 224")
    text = "weak: constant batch per device, the default; strong: constant global batch"
    add("--scaling", choices=["weak", "strong"], help=text)
    text = "weak: per device; strong: global; 256 per device, imagenet 64"
    add("--batch-size", type=positive(int), help=text)
    add("--workers", type=int, help="processes per device that decode photographs; 4")
    add("--price", type=positive(float), help="of this machine per hour: adds a column of costs")
    add("--seed", type=int, default=0, help="of the order of the cases, and of the scripts")
    add("--out", type=Path, help="a new folder for the result; logs/runs/DATE-TIME")
    add("--resume", type=Path, metavar="DIR", help="resume the run in this folder")
    add("--with", dest="extras", help=f"set up what is missing: {','.join(extras.NAMES)}")
    add("--list", action="store_true", help="show the cases and what keeps them from running")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.error = fail
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_run(commands)
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
    sub.add_argument("--anyway", action="store_true", help="even of different plans")
    sub = commands.add_parser("merge", help="several machines' results side by side")
    sub.error = fail
    sub.add_argument("folders", type=Path, nargs="+")
    sub.add_argument("--out", type=Path, help="a file for it, in Markdown")
    for name, text in (
        ("list", "show the cases"),
        ("doctor", "show what was found on this machine"),
        ("peers", "compare with the loops of the ancestors"),
        ("readme", "write the generated parts of README.md and docs/evidence/results.md"),
        ("pieces", "measure and write the pages of docs/diffs/ again"),
        ("site", "build the pages as a site with search"),
    ):
        commands.add_parser(name, help=text)
    if not argv:
        parser.print_help()
    return parser.parse_args(argv)


def called(args: argparse.Namespace) -> int:
    """Does what the command line says; returns the exit code. Raises UserError."""
    if args.command is None:  # the help was all that could be done
        return 2
    if args.command == "run":
        from bench.run.command import command

        return command(args)
    if args.command in ("compare", "merge"):
        from bench.show import compare

        return getattr(compare, args.command)(args)
    if args.command in ("table", "plot", "report"):
        from bench.show import terminal as show

        show.again(args.command, args.folder)
        return 0
    from bench import cases
    from bench.host import look
    from bench.show import terminal as show

    host = look()
    rows = cases.cases(host, cases.worlds(host))
    if args.command == "list":
        show.cases(rows, host)
    else:
        show.doctor([*rows, *cases.techniques(host, max(cases.worlds(host)), GROUPS)], host)
    return 0


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        if argv[:1] and argv[0] in OWN_PARSER:
            return import_module(f"bench.{OWN_PARSER[argv[0]]}").main(argv[1:])
        args = parse(argv)
        args.typed = ["python", "-m", "bench", *argv]  # for the records of a run
        return called(args)
    except UserError as error:
        fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        fail(f"{error.filename}: {error.strerror}: free some, then make the table again")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
