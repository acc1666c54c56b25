"""python -m mistakes audited: runs each mistake of docs/diffs/ under audit.py, and records it.

    python -m mistakes audited --out logs/MACHINE/audit.jsonl [PAGE ...]
    python -m mistakes audited --out logs/MACHINE/audit.jsonl --right     right programs instead

A line per run: what audit.py found, and what it depends on. A run with the same audit.py, script
and flags is not made again. The silent mistakes come first. At the end, the pages are written anew,
with what was found.
"""

import argparse
import hashlib
import json
import re
import sys
import tempfile
import time
from pathlib import Path

from bench import ROOT, UserError, process, refuse
from bench.data import write_images
from bench.host import PORT, look, versions
from bench.ladder import SCRIPTS, script_of
from bench.records import write_whole
from mistakes import ranks
from mistakes.found import latest
from mistakes.measure import pages
from mistakes.outcomes import FOLDER, KINDS, measured, read, render
from mistakes.page import divided, fingerprint, parse
from mistakes.trials import Trial

AUDIT, PROGRAMS = ROOT / "audit.py", "tests/programs"  # the latter are right, in other styles
LIMIT = 600  # seconds of a run
IMAGES = (320, 101)  # five steps in an epoch, so the audit sees whole ones
# As in trials.py, but with a model that is trained in a third of the time.
FLAGS = "--dataset fashion-mnist --image-size 16 --batch-size 64 --log-every 1 --device cpu"
FLAGS += " --arch shufflenet_v2_x0_5 --data {folder}/data"
PHOTOGRAPHS = "--arch mobilenet_v3_small --image-size 64 --batch-size 16 --workers 1 --device cpu"
PHOTOGRAPHS += " --data {folder}/photographs --out out"
TRIALS = {"--images", "--epochs", "--lr"}  # a trial has them to be compared with the oracle
SPAWNS = {"mnmc_ddp_mp.py": ["--nproc-per-node", 2, "--master-port", PORT], "spawned.py": [PORT]}


def mistakes(names: list[str]) -> list[tuple[dict, Trial]]:
    """Every mistake of some pages, or of all, that has an effect: what it is, and its run."""
    found, known = [], read(FOLDER)
    for page in map(parse, pages(FOLDER, names)):
        for name in measured(page):
            kind = known.get(page.name, {}).get(name, {}).get("kind", KINDS[-1])
            what = {"page": page.name, "piece": name, "outcome": kind}
            found += [(what, page.trial(name))] if kind != KINDS[-1] else []
    return sorted(found, key=lambda job: KINDS.index(job[0]["outcome"]))  # stable


def right() -> list[tuple[dict, Trial]]:
    """The scripts of the ladder and of techniques/, imagenet.py, and programs in other styles."""
    programs = sorted(path.name for path in (ROOT / PROGRAMS).glob("*.py"))
    paths = [*SCRIPTS, "imagenet.py", *(f"{PROGRAMS}/{name}" for name in programs)]
    found = []
    for path in paths:
        known = script_of(path)
        flags = [*(["--arch", known.arch] if known.arch else []), *(known.equality or [])]
        ranks = known.ranks if known.processes else 1
        trial = Trial(path, (ROOT / path).read_text(), ranks, (), *divided(flags))
        found.append(({"page": "", "piece": path, "outcome": "right"}, trial))
    return found


def flags(trial: Trial) -> list[str]:
    """The script's own; `{folder}` stands for the folder with the images."""
    if trial.script.startswith(PROGRAMS):
        return []
    if trial.script == "imagenet.py":
        return PHOTOGRAPHS.split()
    number, given = 0, {}  # the words of each flag, its own name first
    for word in (*trial.flags, *trial.own):
        number += word.startswith("--")
        given.setdefault(number, []).append(word)
    kept = [word for words in given.values() if words[0] not in TRIALS for word in words]
    return [*FLAGS.split(), *kept, *(["--save", "weights"] if trial.save else [])]


def run(trial: Trial, words: list[str], folder: Path) -> process.Finished:
    """Runs the audit of the script in a folder, where it writes found.json."""
    script, case = Path(trial.script).name, trial.case()
    audit = [AUDIT, "--json", "found.json"]
    if own := SPAWNS.get(script):
        command = [sys.executable, *audit, script, *words, *own]
        return process.run(command, LIMIT, process.environment(1), folder)
    command = [*audit, "--records", "records", script, *words]
    if case.launcher != "horovodrun":
        return ranks.run(max(2, trial.processes), command, LIMIT, folder)
    launcher = case.command()
    launcher = launcher[: launcher.index(sys.executable) + 1]
    return process.run([*launcher, *command], LIMIT, process.environment(1), folder)


def images(folder: Path) -> None:
    """Writes the images of all runs: the first ones of the embedded set, and some as JPEG files."""
    from torchvision import datasets

    write_images(folder / "data", *IMAGES)
    for part, train, count in (("train", True, 128), ("val", False, 51)):
        data = datasets.FashionMNIST(folder / "data", train)
        for number in range(count):
            picture, label = data[number]
            path = folder / "photographs" / part / str(label) / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.resize((80, 80)).save(path)


def audited(trial: Trial, words: list[str], folder: Path) -> dict:
    """Runs a script under the audit; returns what that found, or the reason why it found nothing.

    folder: has the images.
    """
    if reason := "no PyTorch" if trial.in_oneflow else trial.missing():
        return {"reason": reason}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        (Path(place) / Path(trial.script).name).write_text(trial.text)
        words = [word.format(folder=folder) for word in words]
        begun = time.monotonic()
        done = run(trial, words, Path(place))
        found = {"seconds": round(time.monotonic() - begun, 1), "exit": done.code}
        report = Path(place) / "found.json"
        if not report.exists():
            reason = f"no result within {LIMIT} s" if done.timed_out else done.last_line
            return found | {"reason": reason.replace(str(folder), "")}
        report = json.loads(report.read_text())
    return found | {
        "unchecked": report["unchecked"],
        "findings": [*map(short, report["findings"])],
    }


def short(given: dict) -> dict:
    """What a record has of a finding; its step is the first one that its text names, or None."""
    step = re.search(r"\bstep (\d+)", given["seen"])
    kept = {name: given[name] for name in ("level", "kind", "line")}
    return kept | {"text": given["seen"], "step": step and int(step[1])}


def show(names: list[str]) -> None:
    """Writes the pages with what the records say of their pieces."""
    known = read(FOLDER)
    for page in map(parse, pages(FOLDER, names)):
        if (text := render(page, known.get(page.name, {}))) != page.text:
            write_whole(page.path, text)


def main(argv: list[str]) -> int:
    """The command; returns the exit code. Raises UserError."""
    parser = argparse.ArgumentParser(
        prog="mistakes audited", description=__doc__.partition("\n")[0]
    )
    parser.error = refuse
    parser.add_argument("names", nargs="*", metavar="PAGE", help="some pages [all]")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the records")
    parser.add_argument("--silent", action="store_true", help="only silent mistakes")
    parser.add_argument("--right", action="store_true", help="right programs instead")
    args = parser.parse_args(argv)
    known = latest(args.out)
    about = {"audit": hashlib.sha256(AUDIT.read_bytes()).hexdigest()[:12]}
    other = any(record["audit"] != about["audit"] for record in known.values())
    if other and (args.names or args.silent or args.right):  # what is written drops all others
        text = "is of another audit.py: leave out PAGE, --silent and --right at first"
        raise UserError(f"--out {args.out}: {text}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    process.heed_signals()
    host = look()
    where = {"torch": versions()["torch"], "cpu": host.cpu, "cores": host.cores}
    with tempfile.TemporaryDirectory() as folder:
        images(Path(folder))
        jobs = right() if args.right else mistakes(args.names)
        for what, trial in jobs:
            if args.silent and what["outcome"] != KINDS[0]:
                continue
            now = about | {"code": fingerprint(trial), "flags": " ".join(words := flags(trial))}
            now["outcome"] = what["outcome"]
            before = known.get(key := (what["page"], what["piece"]), {})
            if "reason" not in before and now.items() <= before.items():
                continue
            record = what | now | where | audited(trial, words, Path(folder))
            known = {k: r for k, r in known.items() if k != key and r["audit"] == now["audit"]}
            known[key] = record  # the last line
            write_whole(args.out, "".join(json.dumps(line) + "\n" for line in known.values()))
            kinds = [finding["kind"] for finding in record.get("findings", [])]
            print(*key, record.get("reason") or kinds, file=sys.stderr, flush=True)
    show(args.names)
    return 0
