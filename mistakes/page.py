"""A page of docs/diffs/: the pieces that its markers cut a diff into, and the runs without them.

The page names its pair of scripts in `<!-- diff OLD NEW -->`. A piece of their diff stands between
`<!-- piece NAME: ANCHOR -->` and `<!-- end NAME -->`: it begins at the next changed line that has
ANCHOR in it, and ends where the next piece begins, so that the pieces are the whole diff.

Further lines of a marker are options. Four of them write nearly every page:

    instead: CODE   a line to run instead of the piece's new ones; without any, the old ones come
                    back. `instead:` with nothing behind it stands for no line
    flags: ...      for the script, and for the oracle as far as it knows them
    skip: WHY       there is nothing to run
    hide: WHY       and nothing to show; WHY is for editors

and four are for what is rare:

    within: X       losses at most this far from the oracle's, relatively, count as equal
    save: no        the script does not save: what it saves are other weights, or no file
    limit: SECONDS  to be patient with a start that only waits, before a run counts as hanging
    kill: STEP      rank 1 is killed in this step of epoch 1, and torchrun starts all ranks again

Options of the diff marker hold for all pieces. How many processes run, what the oracle splits and
which model is trained are the script's fields in bench/ladder.py.
"""

import ast
import hashlib
import re
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import ROOT, UserError
from bench.ladder import Script, script_of
from mistakes.trials import FLAGS, Trial

OPTIONS = {"instead", "flags", "skip", "hide", "within", "save", "limit", "kill"}
NUMBERS = {"limit": r" *\d+", "kill": r" *\d+", "within": r" *0\.\d+"}
# The oracle's flags: it gets these of a trial.
ORACLE = set(re.findall(r'^ *add\("(--[\w-]+)"', (ROOT / "bench/oracle.py").read_text(), re.M))
BLOCK = re.compile(r"(<!-- piece (.*?)-->\n)(.*?)(<!-- end ([^\n]*?) -->)", re.S)


class BadPage(UserError):
    """A mistake in a page, in one line."""


@dataclass
class Piece:
    """A part of a diff."""

    name: str
    anchor: str
    options: dict[str, list[str]]
    lines: list[int] = field(default_factory=list)  # its changed lines, by their numbers

    @property
    def instead(self) -> list[str] | None:
        """The code to run instead; None for the old code."""
        code = self.options.get("instead")
        return [] if code and not any(code) else code

    def one(self, option: str, default: str = "") -> str:
        """The last value of an option."""
        return self.options.get(option, [default])[-1]


@dataclass
class Page:
    """A page of docs/diffs/, with its pair of scripts aligned line by line."""

    path: Path
    text: str
    old: str
    new: str
    lines: list[str]  # of both, as `diff -u` has them: " ", "-" or "+", then the line
    pieces: dict[str, Piece]
    options: dict[str, list[str]]  # of all pieces

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def script(self) -> Script:
        """The new script."""
        return script_of(self.new)

    @property
    def flags(self) -> list[str]:
        """The flags of all its runs."""
        known = self.script
        given = shlex.split(" ".join(self.options.get("flags", [])))
        return ["--arch", known.arch, *given] if known.arch else given

    def mutated(self, name: str) -> str:
        """The new script with a piece taken back."""
        piece, kept = self.pieces[name], []
        for number, line in enumerate(self.lines):
            mine = number in piece.lines
            if mine and piece.instead is not None:
                if number == place(piece, self.lines):
                    kept += piece.instead
            elif line[0] != ("+" if mine else "-"):
                kept.append(line[1:])
        return "\n".join(kept) + "\n"

    def whole(self) -> str:
        """The new script."""
        return "\n".join(line[1:] for line in self.lines if line[0] != "-") + "\n"

    def trial(self, name: str) -> Trial:
        """The run without a piece."""
        piece, known = self.pieces[name], self.script
        processes = known.ranks if known.processes else 1
        flags, own = divided(shlex.split(" ".join(piece.options.get("flags", []))))
        if known.arch:
            flags = ("--arch", known.arch, *flags)
        return Trial(
            self.new,
            self.mutated(name),
            processes,
            ("--parts", str(processes), "--split", known.split, *known.oracle),
            flags,
            own,
            float(piece.one("limit", "25")),
            piece.one("save") != "no",
            float(piece.one("within", "0")),
            int(piece.one("kill", "0")),
        )


def divided(words: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A script's flags: those that the oracle knows, and the script's own."""
    found: dict[bool, tuple[str, ...]] = {True: (), False: ()}
    known = True
    for word in words:
        known = word in ORACLE if word.startswith("--") else known
        found[known] += (word,)
    return found[True], found[False]


def place(piece: Piece, lines: list[str]) -> int:
    """Where the code that is run instead of a piece goes: to its first new line of code."""
    new = [n for n in piece.lines if lines[n][0] == "+"]
    return next((n for n in new if not lines[n][1:].strip().startswith("#")), piece.lines[0])


def aligned(old: Path, new: Path) -> list[str]:
    """`diff -u` with all the lines that do not change, and without its head."""
    command = ["diff", "-U", "1000000", old, new]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 1:
        raise BadPage(done.stderr.strip() or f"{old.name} and {new.name} are equal")
    return done.stdout.splitlines()[3:]


def cut(lines: list[str], pieces: list[Piece]) -> None:
    """Gives each piece its changed lines. Raises BadPage where an anchor does not fit."""
    changed = [number for number, line in enumerate(lines) if line[0] in "+-"]
    starts, at = [], 0
    for piece in pieces:
        hits = [k for k, number in enumerate(changed) if piece.anchor in lines[number]]
        start = next((k for k in hits if k >= at), None)
        if start is None:
            why = "comes before the piece above it" if hits else "is in no changed line"
            raise BadPage(f"piece {piece.name}: its anchor {piece.anchor!r} {why}")
        starts.append(start)
        at = start + 1
    if not pieces or starts[0]:
        raise BadPage(f"no piece has the first changed line: {lines[changed[0]]}")
    for piece, start, end in zip(pieces, starts, [*starts[1:], len(changed)], strict=True):
        piece.lines = changed[start:end]


def options(lines: list[str], where: str) -> dict[str, list[str]]:
    """The options of a marker: a list of values for each."""
    found: dict[str, list[str]] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if name not in OPTIONS or not colon:
            raise BadPage(f"{where}: {line!r} is none of the options {', '.join(sorted(OPTIONS))}")
        if name in NUMBERS and not re.fullmatch(NUMBERS[name], value):
            raise BadPage(f"{where}: {line}: give a number")
        found.setdefault(name, []).append(value.removeprefix(" ").rstrip())
    return found


def parse(path: Path, root: Path = ROOT) -> Page:
    """A page, its pieces cut. Raises BadPage."""
    text = path.read_text()
    head = re.search(r"<!-- diff (\S+) (\S+)\s*(.*?)-->", text, re.S)
    if not head:
        raise BadPage("it has no <!-- diff OLD NEW -->")
    shared = options(head[3].strip().splitlines(), "diff")
    pieces: dict[str, Piece] = {}
    for _, marker, _, _, end in BLOCK.findall(text):
        first, *more = marker.strip(" ").splitlines()
        name, colon, anchor = first.partition(": ")
        if name != end or not colon or name in pieces:
            raise BadPage(f"piece {name}: give it an anchor, a name of its own, and an end")
        own = options(more, f"piece {name}")
        if "flags" in shared:  # the last one wins, so the page's come first
            own["flags"] = shared["flags"] + own.get("flags", [])
        pieces[name] = Piece(name, anchor.strip(), shared | own)
    if len(pieces) != text.count("<!-- piece "):
        raise BadPage("a piece has no end")
    scripts = [root / head[1], root / head[2]]
    for script in scripts:
        if not script.exists():
            raise BadPage(f"{script.name}: there is no such script")
    lines = aligned(*scripts)
    cut(lines, list(pieces.values()))
    return Page(path, text, head[1], head[2], lines, pieces, shared)


def essence(text: str) -> str:
    """A script without comments, docstrings, layout and the help texts of its flags."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node):
            node.body[:1] = [] if node.body[1:] else [ast.Pass()]
        if isinstance(node, ast.keyword) and node.arg == "help":
            node.value = ast.Constant("")
    return ast.unparse(tree)


def fingerprint(trial: Trial) -> str:
    """What a trial's outcome depends on, as a short hash."""
    rest = replace(trial, text=essence(trial.text), limit=Trial.limit)
    return hashlib.sha256(repr((rest, *FLAGS[:-1])).encode()).hexdigest()[:12]
