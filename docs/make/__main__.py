"""Writes the generated parts of README.md and of pages in docs/ and techniques/, and pictures.

    python -m docs.make           writes them
    python -m docs.make --check   exit code 1 where a file differs from what it would write

A part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. The commands come from the
scripts' docstrings, the figures from logs/, a folder a machine: transcripts (NAME.txt, NAME.jsonl),
results of `run` (bench/, techniques/ ...), effects/, imagenet/.
"""

import re
import sys
from functools import partial

from bench import ROOT, UserError
from bench.records import write_whole
from docs.make import front, imagenet, learn, pictures, results, site, techniques

PARTS = {
    "README.md": {
        "mistakes": front.mistakes,
        "ladder": front.ladder,
        "result": front.result,
        "measured": front.measured,
    },
    "docs/howto/start.md": {"commands": front.how},
    "docs/learn/ddp.md": {piece: partial(learn.outcome, piece) for piece in learn.PIECES},
    "docs/learn/map.md": {"plan": learn.example},
    "docs/evidence/results.md": {
        "checked": results.checked,
        "speed": results.speed,
        "techniques": results.techniques,
        "accuracy": results.accuracy,
        "ancestors": results.ancestors,
    },
    "docs/howto/imagenet.md": {
        "kills": imagenet.kills,
        "imagenette": imagenet.imagenette,
        "speeds": imagenet.speeds,
        "loaders": imagenet.loaders,
    },
    "techniques/README.md": {"scripts": techniques.scripts},
    "docs/techniques/memory.md": {
        "peaks": techniques.peaks,
        "costs": partial(techniques.costs, "memory"),
    },
    "docs/techniques/layers.md": {
        "costs": partial(techniques.costs, "tensor"),
        "pipelines": partial(techniques.costs, "model"),
    },
    "docs/techniques/communication.md": {"costs": partial(techniques.costs, "communication")},
    "docs/techniques/correctness.md": {"costs": partial(techniques.costs, "exactness")},
    "docs/techniques/speed.md": {"costs": partial(techniques.costs, "kernels")},
    "docs/techniques/libraries.md": {"costs": partial(techniques.costs, "libraries")},
    "docs/diffs/comm_hooks.md": {"losses": techniques.hooks},
    "docs/diffs/elastic.md": {"restarts": techniques.restarts},
    "docs/diffs/heterogeneous.md": {"speed": techniques.uneven},
    "docs/diffs/invariant.md": {"digests": techniques.digests},
    "docs/diffs/local_sgd.md": {"losses": techniques.averaging},
    "docs/diffs/parameter_server.md": {"stale": techniques.staleness},
    "docs/diffs/ring_allreduce.md": {"times": techniques.ring},
}


def render(name: str, text: str) -> str:
    """A file of PARTS with every generated part made anew.

    Raises ValueError where one is missing.
    """
    for part, make in PARTS[name].items():
        pattern = re.compile(f"(<!-- begin {part} -->\n).*?(<!-- end {part} -->)", re.S)
        body = make()
        text, found = pattern.subn(lambda m, body=body: f"{m[1]}\n{body}\n\n{m[2]}", text)
        if found != 1:
            raise ValueError(f"{name} has {found} parts named {part}, it must have one")
    return text


def main(argv: list[str]) -> int:
    """Writes or checks the files, or builds the site; returns the exit code."""
    if argv[:1] == ["site"]:
        try:
            return site.main(argv[1:])
        except UserError as error:
            print(f"docs.make: {error}", file=sys.stderr)
            return 2
    if argv not in ([], ["--check"]):
        print(f"docs.make: {argv[0]}: there are only --check and site", file=sys.stderr)
        return 2
    stale = {}
    for name in PARTS:
        old = (ROOT / name).read_text()
        if (new := render(name, old)) != old:
            stale[ROOT / name] = new
    stale |= pictures.stale()
    for path, new in stale.items():
        if argv:
            print(
                f"{path.relative_to(ROOT)} is not up to date: python -m docs.make",
                file=sys.stderr,
            )
        else:
            write_whole(path, new)
    return int(bool(argv and stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
