"""python -m mistakes quiz: a script with a silent mistake that you find and repair.

python -m mistakes quiz [PAGE]       writes one into ./quiz/
python -m mistakes quiz hint         what the mistake does; once more: where it is
python -m mistakes quiz check FILE   whether your repaired script is right
"""

import json
import random
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench import UserError, process
from bench.process import Failed
from bench.records import write_whole
from mistakes.measure import pages
from mistakes.outcomes import FOLDER, read
from mistakes.page import parse
from mistakes.run import find, keep, ready, title, together
from mistakes.trials import Lab

QUIZ = Path("quiz")
ANSWER = QUIZ / ".answer.json"  # page, piece and hints given


def main(argv: list[str]) -> int:
    """The command; returns the exit code: 1 for a script that is not right. Raises UserError."""
    match argv:
        case ["hint"]:
            return hint()
        case ["check", file]:
            return check(Path(file))
        case [] | [_] if not argv or argv[0] not in ("check", "-h", "--help"):
            return ask(*argv)
    if argv in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    raise UserError("quiz: give a PAGE or nothing, hint, or check FILE")


def ask(*names: str) -> int:
    """Writes a broken script, chosen at random. Raises UserError if there is one already."""
    if ANSWER.exists():
        raise UserError(f"{QUIZ}/ has a quiz: solve it, or delete the folder for another one")
    known, found = read(FOLDER), []
    for page in map(parse, pages(FOLDER, names)):
        for name, outcome in known.get(page.name, {}).items():
            compared = outcome["kind"] in ("silent", "NaN")  # the right script is the oracle's
            if compared and name in page.pieces and not page.trial(name).missing():
                found.append((page, name))
    if not found:
        raise UserError(f"{' '.join(names) or 'quiz'}: no mistake that could be run here")
    page, name = random.choice(found)
    path = QUIZ / Path(page.new).name
    keep(path, page.mutated(name))
    write_whole(ANSWER, json.dumps({"page": page.name, "piece": name, "hints": 0}))
    print(f"{path}: one change against {page.old} is missing or wrong; the others are right.")
    print(
        f"Its first lines show how to start it. Repair it, and then:\n\n"
        f"    python -m mistakes quiz check {path}\n    python -m mistakes quiz hint"
    )
    return 0


def answer() -> dict:
    """What the quiz is about. Raises UserError."""
    if not ANSWER.exists():
        raise UserError(f"{QUIZ}/ has no quiz: python -m mistakes quiz")
    return json.loads(ANSWER.read_text())


def hint() -> int:
    """What the mistake does; the next time, also where it is."""
    known = answer()
    page, name = find(known["page"], known["piece"])
    outcome = read(FOLDER)[page.name][name]
    print(f"{outcome['kind'].upper()}: {outcome['text']}")
    if known["hints"]:
        print(title(page, name))
    write_whole(ANSWER, json.dumps(known | {"hints": known["hints"] + 1}))
    return 0


def check(path: Path) -> int:
    """Runs the reader's script as the mistake was run, and compares it with the oracle."""
    known = answer()
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    page, name = find(known["page"], known["piece"])
    trial = replace(ready(page, name), text=path.read_text())
    process.heed_signals()
    try:
        with Lab() as lab:
            runs = {"your_script": lambda: lab.outcome(trial, page.whole())}
            if not trial.in_oneflow:  # the outcome waits for it
                runs["the_oracle"] = lambda: lab.exact(trial)
            found, *_ = together(Console(), **runs)
    except Failed as failed:
        raise UserError(str(failed)) from None
    if found["kind"] != "no effect here" or found["facts"]:
        print(f"not yet: {found['kind']}: {found['text']}")
        return 1
    print(f"right: as bench/oracle.py says. It was {title(page, name)}")
    ANSWER.unlink()
    return 0
