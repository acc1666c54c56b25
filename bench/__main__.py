"""python -m bench COMMAND: times the scripts, and makes tables, plots and pages of it.

run times every case and shows the table; table makes it again from the records.
"""

import argparse
import errno
import shlex
import sys
from importlib import import_module
from pathlib import Path

from bench import UserError
from bench.options import add_flags, positive

# Commands with a parser of their own: where they are, and what they do.
OWN_PARSER = {
    "effects": ("experiments.effects", "measure what techniques change beside the speed"),
    "launchers": ("experiments.launchers", "measure what launchers do when a rank fails"),
    "loader": ("experiments.loader", "measure how fast imagenet.py gets its images"),
    "comm": ("nodes.comm", "measure the collectives of these ranks: latency and bandwidth"),
    "predict": ("nodes.predict", "what this training would reach on N GPUs or machines"),
    "plan": ("experiments.plan", "what of a model fits on GPUs, and what each technique sends"),
    "throughput": ("experiments.throughput", "measure one device's steps without data and logs"),
    "watch": ("nodes.watch", "run a command; when it hangs, say which rank waits where"),
    "suite": ("suite", "everything that is measured of a machine, in order of worth"),
}


def fail(message: str) -> None:
    """Ends with a user's mistake: one line that names the flag and the cure, exit code 2."""
    print(f"bench: {message}", file=sys.stderr)
    sys.exit(2)


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line: its command and flags."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.error = fail
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, text: str):
        sub = commands.add_parser(name, help=text)
        sub.error = fail
        return sub

    add_flags(command("run", "time every case, then table and plots"))
    add = command("table", "make table, plots and page again from a folder's records").add_argument
    add("folder", type=Path)
    add = command("compare", "of two results, what got slower; exit code 1 if so").add_argument
    add("old", type=Path)
    add("new", type=Path)
    add("--tolerance", type=positive(float), default=0.05, help="a share; 0.05")
    add("--absolute", action="store_true", help="judge images/s, not the ratio to snsc")
    add("--anyway", action="store_true", help="even of different plans")
    command("doctor", "show what this machine has; on several, check them before a run")
    for name, (_, text) in OWN_PARSER.items():
        command(name, text)
    if not argv:
        parser.print_help()
    return parser.parse_args(argv)


def call(args: argparse.Namespace, typed: str) -> int:
    """Does what the command line says; returns the exit code. Raises UserError."""
    if args.command == "run":
        from bench.run.command import command

        return command(args, typed)
    if args.command is None:  # the help was all that could be done
        return 2
    if args.command == "compare":
        from bench.show.compare import compare

        return compare(args)
    from bench.show import terminal

    if args.command == "table":
        terminal.print_result(args.folder)
    else:
        terminal.doctor()
    return 0


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        if argv[:1] == ["doctor"]:
            from bench.nodes import doctor

            if doctor.several(argv[1:]):
                return doctor.main(argv[1:])
        if argv[:1] and argv[0] in OWN_PARSER:
            return import_module(f"bench.{OWN_PARSER[argv[0]][0]}").main(argv[1:])
        return call(parse(argv), shlex.join(["python", "-m", "bench", *argv]))
    except UserError as error:
        fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        fail(f"{error.filename}: {error.strerror}: free some, then make the table again")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
