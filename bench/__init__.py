"""The harness: times every script of the ladder on this machine, and shows what it measured.

From a script to its row in the table; a module imports only from those above it:

ladder, script     what is known of each script; one entry makes it a case, with tests and pages
host               what this machine is
records            records.jsonl: all that a run learns, line by line
process, errors    runs a command, ends all that it started, and says why it failed
data, cases        the images, and the rows: each script at its world sizes, with its command
backends, install  what is installed, why a case can't run here, and how to get it
show/              summary.py makes the numbers from the records, by stats.py; the others show them
run/               command.py opens a folder; gate.py compares each case with oracle.py; schedule.py
                   starts the cases in blocks, where resident.py lets them take turns

Other commands are in experiments/, nodes/ (several machines) and suite.py.
"""

from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent  # the project's folder


class UserError(Exception):
    """What a user must mend: the text is one line that says what and how; exit code 2."""


def refuse(message: str) -> NoReturn:
    """Raises UserError: for a parser's `error`, which is to be one line."""
    raise UserError(message)
