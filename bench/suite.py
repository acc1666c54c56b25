"""python -m bench suite --minutes 8 --out logs/1-h100-torch2.11: all that is measured of a machine.

The parts below come in order of worth, and each has a share of the minutes. A part that is cut off
leaves what it has, and the same command completes it; finished parts are left out. So a GPU that is
rented by the minute, or lost in the middle, still gives results. Name parts to run only these, in
your order: then none takes the least seconds of those behind it.

facts      this machine: GPUs, driver, clocks, versions
scripts    every script that runs here, for 20 steps: which one fails, and how far from the oracle
tests      the tests that need a GPU
ladder     bench run --quick, into the folder bench-quick
throughput one GPU's steps without data and logs: precisions, layouts, compiled
ancestors, ancestors-2048
           our loop and the ancestors', at 256 images per device and at 2,048 (GPUs)
imagenet   imagenet.py's loader and its training, each by itself; a minute of both (--photos)
apex       mnmc_apex.py with O0, O1 and O2 (GPUs; where Apex is installed)
cifar10    five epochs of snsc.py with its defaults, or on --cifar
full       bench run, into the folder bench
kernels, memory, communication, model, exactness, libraries, tensor
           bench run --techniques, its groups
large, photos224
           the kernels at a batch of 2,048, and on 224 pixels with resnet50 (GPUs)

After each part, and every 20 seconds, all results are packed into one file, --pack.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import NamedTuple

from bench import ROOT, UserError, backends, cases, process, records
from bench.cases import Case
from bench.experiments import check_scripts
from bench.host import Host, look
from bench.options import make_parser, positive
from bench.run.command import check_gpus

# Tests on GPUs that other parts do anyway, that need none, or that take many minutes.
ELSEWHERE = ("what_the_oracle_trains", "a_run_on_a_gpu_has_its_table", "pretended", "planted")


PERIOD = 20.0  # seconds after which all is packed again
TABLE = 15.0  # seconds for a table of a run that was cut off
PASSED = re.compile(r"^(tests/\S+\.py::.+?) PASSED", re.M)  # a line of pytest's


class Suite(NamedTuple):
    """What all parts are given. left: seconds that this part may take."""

    args: Namespace
    host: Host
    folder: Path
    left: Callable[[], float]

    def within(self, kept: float = 0.0, most: float = inf) -> "Suite":
        """The same, for so many seconds at most, which leaves some of the part's."""
        end = time.monotonic() + min(most, self.left() - kept)
        return self._replace(left=lambda: end - time.monotonic())

    def call(self, words: list, text: Path | None = None, **env: str) -> bool:
        """Runs a command of this project; whether it ended well in the part's time.

        text: the file that gets its output.
        """
        if self.left() <= 0:
            return False
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        found = process.environment(PYTHONPATH=path, **env)
        done = process.run([sys.executable, *words], self.left(), found)
        process.sweep()  # what a harness left that was cut off
        if text:
            records.write_whole(text, done.out + done.err)
        if done.code:
            why = f"exit code {done.code}: {done.last_line}"
            why = "its time is over" if done.timed_out else why
            say(f"  {' '.join(map(str, words[:3]))}: {why}")
        return done.code == 0


def say(text: str) -> None:
    print(f"suite: {text}", file=sys.stderr, flush=True)


def facts(suite: Suite) -> bool:
    """What this machine is, by torch, and by nvidia-smi."""
    found = suite.host.record()
    for words in (["nvidia-smi"], ["nvidia-smi", "-q", "-d", "CLOCK,POWER,TEMPERATURE,ECC"]):
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(words, capture_output=True, text=True, timeout=20)
            found[" ".join(words)] = done.stdout.splitlines()
    records.write_whole(suite.folder / "facts.json", json.dumps(found, indent=1, default=str))
    return True


def every_script(suite: Suite) -> bool:
    """Every script for some steps, and a line of each in scripts.jsonl."""
    return check_scripts.check(suite.folder / "scripts.jsonl", suite.host, suite.left, say)


def tests(suite: Suite) -> bool:
    """The tests that need a GPU, but for what the parts `scripts` and `ladder` do anyway."""
    if not suite.host.gpus:
        return True
    words = ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--durations", "0", "-v"]
    words += ["-k", f"not {' and not '.join(ELSEWHERE)}"]
    text, now = suite.folder / "tests.txt", suite.folder / "tests-now.txt"
    before = text.read_text() if text.exists() else ""
    for name in PASSED.findall(before):  # in a call that was cut off
        words += ["--deselect", name]
    try:
        return suite.call(words, now)
    finally:
        if now.exists():
            records.write_whole(text, before + now.read_text())
            now.unlink()


def bench_run(name: str, flags: str = "", gpus: bool = False) -> Callable[[Suite], bool]:
    """A part: a result of `bench run`, in a folder of this name. gpus: only with GPUs."""

    def work(suite: Suite) -> bool:
        folder = suite.folder / name
        if gpus and not suite.host.gpus:
            return True
        known, _ = records.lines(folder / records.NAME)
        if records.of(known, "stop") and (folder / "table.md").exists():
            return True
        if not known:  # killed as it began
            (folder / records.NAME).unlink(missing_ok=True)
        most = suite.within(TABLE)
        words = ["-m", "bench", "run", "--budget", f"{most.left() / 60:.2f}", *flags.split()]
        words += ["--dataset", suite.args.dataset] if suite.args.dataset else []
        words += ["--with", suite.args.extras] if suite.args.extras else []
        done = most.call([*words, "--resume" if known else "--out", folder])
        if not done and records.of(records.lines(folder / records.NAME)[0], "sample"):
            suite.call(["-m", "bench", "table", folder])  # of what was timed before it was cut off
        return done

    return work


def throughput(suite: Suite) -> bool:
    """One device's bare steps."""
    out = suite.folder / "throughput.jsonl"
    more = [] if suite.host.gpus else ["--sizes", "resnet18:32:64", "--ways", "fp32,bf16"]
    return suite.call(["-m", "bench", "throughput", "--out", out, *more])


WAY = ("precision", "channels_last", "compile")  # of a record
MANY = 50  # times that a training has each photograph: an epoch of 2,000 would be a second
TRAINING = 80.0  # seconds, its start included


def imagenet(suite: Suite) -> bool:
    """imagenet.py's loader by itself, beside its training in four ways; and a training."""
    data, folder = suite.args.photos, suite.folder / "imagenet"
    if not data:
        return True
    folder.mkdir(exist_ok=True)
    out, half = folder / "speed.jsonl", "bf16"
    if suite.host.gpus and suite.host.gpus[0].capability < (8, 0):
        half = "fp16"
    known = [[line[name] for name in WAY] for line in records.lines(out)[0]]

    def measured(precision: str, channels_last: bool, compiled: bool) -> bool:
        if [precision, channels_last, compiled] in known:
            return True
        words = ["-m", "bench.experiments.recipe", "--record", out, "--seconds", "8"]
        words += ["--data", data, "--precision", precision]
        words += ["--channels-last"] * channels_last + ["--compile"] * compiled
        return suite.call(words)

    def loaders() -> bool:
        loader = folder / "loader-224.jsonl"
        words = ["-m", "bench", "loader", "--data", data, "--out", loader, "--starts", "2"]
        return loader.exists() or suite.call(words)

    # First what is wanted most. If one fails, as where nothing compiles, the others are measured.
    done = [
        measured(half, True, False),
        training(suite, half),
        measured(half, True, True),
        measured("tf32", False, False),
        measured(half, False, False),
        loaders(),
    ]
    return all(done)


def training(suite: Suite, precision: str) -> bool:
    """imagenet.py on the photographs for a minute, and what it logs, train.jsonl: the speed with
    loading, training and all else.
    """
    log = suite.folder / "imagenet" / "train.jsonl"
    if log.exists() or not suite.host.gpus:  # two cores take minutes for 50 steps
        return True
    with tempfile.TemporaryDirectory(prefix="suite-") as made:
        for source in suite.args.photos.glob("*/*"):
            folder = Path(made, "data", source.parent.name, source.name)
            folder.mkdir(parents=True)
            for number in range(MANY if source.parent.name == "train" else 1):
                (folder / f"{number}").symlink_to(source.absolute())
        words = ["imagenet.py", "--data", Path(made, "data"), "--out", Path(made, "out")]
        words += ["--precision", precision, "--channels-last"]
        suite.within(most=TRAINING).call(words, log.with_suffix(".txt"))
        lines, _ = records.lines(Path(made, "out", "log.jsonl"))
        enough = sum(line["event"] == "train" for line in lines) > 1  # the first is the first step
        if enough:
            records.write_whole(log, "".join(json.dumps(line) + "\n" for line in lines))
    return enough


def transcript(suite: Suite, name: str, *command) -> bool:
    """What a script prints, NAME.txt, and the probe's records, NAME.jsonl."""
    text = suite.folder / f"{name}.txt"
    if text.exists():
        return True
    part = suite.folder / f"{name}.jsonl.part"
    part.unlink(missing_ok=True)
    done = suite.call([*command, "--log-json", part], text)
    if done:
        part.replace(suite.folder / f"{name}.jsonl")
        (suite.folder / f"{name}.failed.txt").unlink(missing_ok=True)
    else:
        text.replace(suite.folder / f"{name}.failed.txt")
    return done


def apex(suite: Suite) -> bool:
    """Apex's levels, on one GPU."""
    case = Case("mnmc_apex.py x1", "mnmc_apex.py", "torchrun", 1)
    if not suite.host.gpus or backends.missing(case, suite.host):
        return True
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", cases.PROBE]
    flags = ["mnmc_apex.py", "--dataset", "fashion-mnist", "--epochs", "2", "--opt-level"]
    return all(
        transcript(suite, f"fashion-mnist-mnmc_apex-{level}", *start, *flags, level)
        for level in ("O0", "O1", "O2")
    )


def cifar10(suite: Suite) -> bool:
    """Whole epochs of snsc.py."""
    name, flags = "cifar10-snsc", ["--dataset", "cifar10"]
    if data := suite.args.cifar:
        name = "cifar10-jpeg-snsc"
        flags = ["--dataset", "imagenet", "--data", data, "--image-size", "32"]
    return transcript(suite, name, cases.PROBE, "snsc.py", *flags, "--epochs", "5")


class Part(NamedTuple):
    """A part: what it does, its share of what is left when it begins, and its least and most
    seconds. With less than the least it isn't begun.
    """

    work: Callable[[Suite], bool]
    share: float = 1.0
    least: float = 60.0
    most: float = 15 * 60.0


# Seconds of `bench run --quick` with its table: two cores need 180, GPUs on which each script
# takes 40 to start need 300.
QUICK = 420.0
TECHNIQUES = {  # folder, flags, and whether only GPUs are worth it
    **{
        name: (f"techniques-{name}", f"--techniques {name}", False)
        for name in "kernels memory communication model exactness libraries".split()
    },
    "tensor": (
        "techniques-tensor",
        "--techniques tensor --arch vit_b_16 --image-size 224 --scaling strong --batch-size 32",
        True,
    ),
    "large": ("techniques-2048", "--techniques --batch-size 2048", True),
    "photos224": (
        "techniques-224",
        "--techniques --arch resnet50 --image-size 224 --batch-size 128",
        True,
    ),
}
ANCESTORS = "--quick --techniques ancestors"
PARTS = {
    "facts": Part(facts, least=0),
    "scripts": Part(every_script, 0.4, 30, 10 * 60.0),
    "tests": Part(tests, 0.4, 45, 10 * 60.0),
    "ladder": Part(bench_run("bench-quick", "--quick"), least=90, most=QUICK),
    "throughput": Part(throughput, 0.5, 45, 5 * 60.0),
    # One block of either takes three minutes on a GPU, and the next is not begun if it won't fit.
    "ancestors": Part(bench_run("ancestors", ANCESTORS), 0.55, 90),
    "ancestors-2048": Part(
        bench_run("ancestors-2048", f"{ANCESTORS} --batch-size 2048", True), 0.55, 90
    ),
    "imagenet": Part(imagenet, 0.7, 60, 6 * 60.0),
    "apex": Part(apex, 0.5, 20, 3 * 60.0),
    "cifar10": Part(cifar10, 0.5, 30),
    "full": Part(bench_run("bench"), least=300, most=3600),
    **{name: Part(bench_run(*how), least=300) for name, how in TECHNIQUES.items()},
}


def pack(folder: Path, file: Path) -> None:
    """All of the folder in one file, which is there whole or as it was before."""
    part = file.with_name(f"{file.name}.part")
    with tarfile.open(part, "w:gz") as tar:
        tar.add(folder, folder.name)
    part.replace(file)


@contextmanager
def packed(folder: Path, file: Path):
    """Packs at the end, and every PERIOD seconds before: a machine may be lost within a part."""
    ended = threading.Event()

    def work():
        while not ended.wait(PERIOD):
            with suppress(OSError):  # a file that was just replaced
                pack(folder, file)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        pack(folder, file)


def run(args: Namespace, host: Host, deadline: float) -> list[str]:
    """Runs the parts that have no result yet; returns the names of those that are not finished."""
    folder = args.out
    folder.mkdir(parents=True, exist_ok=True)
    finished = {line["part"] for line in records.lines(folder / "parts.jsonl")[0]}
    open_parts = []
    todo = [name for name in args.parts or PARTS if name not in finished]
    for place, name in enumerate(todo, start=1):
        part, left = PARTS[name], deadline - time.monotonic()
        if left < part.least:
            say(f"{name}: {left:.0f} s are left, it takes {part.least:.0f}: for the next call")
            open_parts.append(name)
            continue
        kept = sum(PARTS[other].least for other in todo[place:]) if args.parts else 0
        share = part.share if todo[place:] else 1.0  # nothing waits for the rest
        seconds = max(part.least, min(part.most, share * left, left - kept))
        end = time.monotonic() + seconds
        say(f"{name}: up to {seconds:.0f} s")
        begun = time.monotonic()
        suite = Suite(args, host, folder, lambda end=end: end - time.monotonic())
        with packed(folder, args.pack):  # what is cut off, too
            if part.work(suite):
                record = {"part": name, "seconds": round(time.monotonic() - begun, 1)}
                with open(folder / "parts.jsonl", "a") as file:
                    file.write(json.dumps(record) + "\n")
            else:
                open_parts.append(name)
    return open_parts


def main(argv: list[str]) -> int:
    """The command. Raises UserError."""
    begun = time.monotonic()  # on a cold disk, torch's first import takes a minute
    parser = make_parser("suite", __doc__)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help="only these [all]")
    add("--minutes", type=positive(float), required=True, help="for all parts together")
    add("--out", type=Path, required=True, help="folder of the results: logs/NAME")
    add("--pack", type=Path, metavar="FILE", help="all results in one file [NAME.tar.gz]")
    add("--dataset", help="of bench run [its default]")
    add("--with", dest="extras", metavar="NAMES", help="of bench run [nothing]")
    add("--photos", type=Path, metavar="DIR", help="photographs in train/ and val/ [none]")
    add("--cifar", type=Path, metavar="DIR", help="CIFAR-10 as image files [--dataset cifar10]")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        raise UserError(f"{unknown.pop()}: no part is called so: {' '.join(PARTS)}")
    for flag in ("photos", "cifar"):
        folder = getattr(args, flag)
        if folder and not (folder / "train").is_dir():
            raise UserError(f"--{flag} {folder}: there is no {folder}/train")
    args.pack = args.pack or args.out.with_name(args.out.name + ".tar.gz")
    process.heed_signals()
    host = look()
    check_gpus(host)
    process.sweep()
    try:
        left = run(args, host, begun + 60 * args.minutes)
    finally:
        process.end(process.OWNER)
    if left:
        say(f"not finished: {' '.join(left)}: the same command goes on")
    return 1 if left else 0
