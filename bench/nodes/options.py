"""The parser of doctor, comm and watch, and how they refuse a mistake."""

import argparse
import sys
from functools import partial
from typing import NoReturn


def refuse(command: str, message: str) -> NoReturn:
    """Ends with a user's mistake: one line that names the flag and the cure, exit code 2."""
    print(f"{command}: {message}", file=sys.stderr)
    sys.exit(2)


def make_parser(command: str, text: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"bench {command}", description=text, formatter_class=raw)
    parser.error = partial(refuse, command)
    return parser
