"""A page of docs/diffs/: the pieces that its markers cut a diff into, and the runs without them.

The page names its pair of scripts in `<!-- diff OLD NEW -->`. A piece of their diff stands between
`<!-- piece NAME: ANCHOR -->` and `<!-- end NAME -->`: it begins at the next changed line that has
ANCHOR in it, and ends where the next piece begins, so that the pieces are the whole diff. Further
lines of a marker are options; those of the diff marker hold for all pieces:

    instead: CODE   a line to run instead of the piece's new ones; without any, the old ones come
                    back. `instead:` with nothing behind it stands for no line
    with: NAME      take this other piece back, too
    skip: WHY       there is nothing to run; hide: WHY, and nothing to show. WHY is for editors
    flags: ...      for the script and the oracle
    own: ...        for the script only
    processes: N    instead of two
    parts: N        of the oracle, as is split: contiguous
    within: X       losses at most this far from the oracle's, relatively, count as equal
    env: NAME=VALUE
    limit: SECONDS
    save: no
    kill: STEP      rank 1 is killed in this step of epoch 1, and torchrun starts all ranks again
"""

import ast
import hashlib
import re
import shlex
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import ROOT, UserError
from bench.ladder import SCRIPTS
from mistakes.trials import FLAGS, Trial

OPTIONS = {"instead", "with", "skip", "flags", "own", "parts", "split", "within", "env", "limit"}
OPTIONS |= {"save", "kill", "hide", "processes"}
NUMBERS = dict.fromkeys(["processes", "parts", "limit", "kill"], r" *\d+")
NUMBERS["within"] = r" *0\.\d+"
SPLITS = "strided", "contiguous"
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

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def in_oneflow(self) -> bool:
        """Whether its new script runs in OneFlow's environment, which has no torch."""
        return self.new in SCRIPTS and SCRIPTS[self.new].launcher == "oneflow"

    def mutated(self, name: str) -> str:
        """The new script with a piece taken back."""
        taken = [name, *self.pieces[name].options.get("with", [])]
        owner = {n: self.pieces[each] for each in taken for n in self.pieces[each].lines}
        kept = []
        for number, line in enumerate(self.lines):
            piece = owner.get(number)
            if piece and piece.instead is not None:
                if number == place(piece, self.lines):
                    kept += piece.instead
            elif line[0] != ("+" if piece else "-"):
                kept.append(line[1:])
        return "\n".join(kept) + "\n"

    def whole(self) -> str:
        """The new script."""
        return "\n".join(line[1:] for line in self.lines if line[0] != "-") + "\n"

    def trial(self, name: str) -> Trial:
        """The run without a piece."""
        piece = self.pieces[name]
        known = SCRIPTS.get(self.new)
        usual = 2 if known is None or known.processes else 1
        processes = int(piece.one("processes", str(usual)))
        return Trial(
            self.new,
            self.mutated(name),
            processes,
            int(piece.one("parts", str(processes))),
            tuple(word for line in piece.options.get("flags", []) for word in shlex.split(line)),
            tuple(word for line in piece.options.get("own", []) for word in shlex.split(line)),
            tuple(tuple(line.split("=", 1)) for line in piece.options.get("env", [])),
            float(piece.one("limit", "25")),
            piece.one("save") != "no",
            float(piece.one("within", "0")),
            piece.one("split", SPLITS[0]),
            int(piece.one("kill", "0")),
        )


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
        if name == "split" and value.strip() not in SPLITS:
            raise BadPage(f"{where}: {line}: give {' or '.join(SPLITS)}")
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
        for key in ("flags", "own", "env"):  # the last one wins, so the page's come first
            if key in shared:
                own[key] = shared[key] + own.get(key, [])
        pieces[name] = Piece(name, anchor.strip(), shared | own)
    if len(pieces) != text.count("<!-- piece "):
        raise BadPage("a piece has no end")
    for piece in pieces.values():
        if unknown := set(piece.options.get("with", [])) - set(pieces):
            raise BadPage(f"piece {piece.name}: with {unknown.pop()}: there is no such piece")
    scripts = [root / head[1], root / head[2]]
    for script in scripts:
        if not script.exists():
            raise BadPage(f"{script.name}: there is no such script")
    lines = aligned(*scripts)
    cut(lines, list(pieces.values()))
    return Page(path, text, head[1], head[2], lines, pieces)


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
