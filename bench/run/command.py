"""The command `run`: checks the flags, opens a folder, and measures into it."""

import datetime
import os
import socket
import sys
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench import ROOT, UserError, data, install, records
from bench.cases import Case, chosen, scaling
from bench.host import REMOTE, Host, look, output
from bench.ladder import LOOPS
from bench.options import EXTRAS
from bench.process import OWNER, Failed, end, heed_signals, sweep
from bench.run.progress import Progress
from bench.run.schedule import Runner, make_setting
from bench.run.timing import Plan
from bench.show import terminal

# Steps that an epoch on GPUs should have at least. A window ends with its epoch, so the last one of
# an epoch may be a few steps long, and short windows widen the spread of a step's time. A window is
# about 100 steps on a fast GPU: with an epoch of 50, none would be whole. More steps would cost
# memory: at a global batch of 2,048 each process keeps 410,000 images, 1.2 GiB (1.9 while it loads
# them), and the file has 0.3 GB. So larger batches get as many images, or 20 steps.
LONG, MOST, LEAST = 200, 410_000, 20
SHORT = 15  # the same on CPUs, whose windows are a few steps long


def command(args: Namespace, typed: str) -> int:
    """`run`, as the command line says; returns the exit code. Raises UserError.

    typed: the command line, for the records.
    """
    host = machines(args, look())
    rows = chosen(args, host)
    names = args.extras.split(",") if args.extras else []
    if unknown := set(names) - set(EXTRAS):
        raise UserError(f"--with {unknown.pop()}: give some of {','.join(EXTRAS)}")
    if args.list:
        terminal.list_cases(host, rows)
        return 0
    check_flags(args, host)
    folder, known = open_folder(args)
    if left := sweep():
        print(f"ended {left} processes that an earlier run had left", file=sys.stderr)
    heed_signals()
    plan, words = make_plan(args, host, rows)
    with ExitStack() as stack:
        install.provide(names, stack, lambda line: print(line, file=sys.stderr))
        setting = make_setting(plan, rows, words, host, host.record())
        if args.resume:
            check_unchanged(folder, known, setting)
        else:
            records.append(folder, "setting", **setting, command=typed)
        return measure(plan, rows, folder, host)


def machines(args: Namespace, host: Host) -> Host:
    """The host with the names of several machines, by --nodes or of a Slurm job, this one first.

    Raises UserError.
    """
    names, remote = (args.nodes or "").split(","), args.remote or REMOTE
    this = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    if not args.nodes and int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) > 1:
        listed = output("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", ""))
        names = sorted(listed.split(), key=lambda name: name != this)
        cores = os.environ.get("SLURM_CPUS_ON_NODE", host.cores)  # Slurm grants a step no more
        remote = f"srun --overlap -N1 -n1 --cpus-per-task {cores} --nodelist {{host}}"
        remote += f" --gpus-per-node {len(host.gpus)}" if host.slurm_gpus else ""
    if len(names) < 2 or len(set(names)) < len(names):
        if args.nodes or args.remote:
            raise UserError("--nodes: give two machines or more, with commas, this one first")
        return host
    if not args.remote and names[0].split(".")[0] != this.split(".")[0]:
        raise UserError(f"--nodes {','.join(names)}: start this on the first one; here is {this}")
    return replace(host, nodes=tuple(names), remote=remote)


def check_gpus(host: Host) -> None:
    """Raises UserError where torch cannot use the machine's GPUs."""
    if host.unusable:
        shown = ", ".join(host.unusable)
        raise UserError(
            f"nvidia-smi shows {shown}, which torch cannot use: its CUDA may be too new for the "
            "driver; CUDA_VISIBLE_DEVICES= measures the CPU"
        )


def check_flags(args: Namespace, host: Host) -> None:
    """Raises UserError where flags do not fit the machine."""
    check_gpus(host)
    if args.data and not args.data.is_dir():
        raise UserError(f"--data {args.data}: there is no such folder")


def open_folder(args: Namespace) -> tuple[Path, list[dict]]:
    """The folder for the result, and the records that it has of before. Raises UserError."""
    folder = args.resume or args.out
    folder = folder or ROOT / "logs" / "runs" / f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    if args.resume:
        records.mend(folder)
    known, broken = records.read(folder) if args.resume else ([], None)
    if broken:  # the numbers of what is lost would be given again
        raise UserError(
            f"--resume {folder}: start a new run, records of this one are lost: {broken}"
        )
    if not args.resume and (folder / records.NAME).exists():
        raise UserError(f"--out {folder}: holds a result, name a new folder or use --resume")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError
    except OSError:
        raise UserError(f"--out {folder}: cannot be written, name another folder") from None
    return folder, known


def make_plan(args: Namespace, host: Host, rows: list[Case]) -> tuple[Plan, str]:
    """What all cases have in common, and the words for the data set."""
    dataset, where, words = data.choose(args.dataset, args.data)
    images = None
    if dataset == "fashion-mnist":
        # The ancestors' workers begin anew in every epoch.
        long = host.gpus or any(case.script == LOOPS.path for case in rows)
        batch = max(case.batch for case in rows)
        wanted = min(LONG * batch, max(MOST, LEAST * batch)) if long else SHORT * batch
        there = data.embedded(ROOT / where)
        if 0 < there < wanted:
            images = wanted
            words += f", its training images {-(-wanted // there)} times over"
    size = args.image_size if args.image_size != data.usual_size(dataset) else None
    words += f", {size} pixels" if size else ""
    # Asleep, a case would keep its part of a GPU's memory, and its all-reduce a GPU at work. What
    # runs on other machines cannot be stopped from here.
    precise = not (host.gpus or args.fresh or host.nodes)
    plan = Plan(
        dataset=dataset,
        data=str(where),
        batch_size=rows[0].batch,
        workers=rows[0].workers,
        arch=args.arch,
        seed=args.seed,
        quick=args.quick,
        budget=args.budget and 60 * args.budget,
        blocks=args.blocks or 1000,
        precise=precise,
        scaling=scaling(args, host),
        images=images,
        image_size=size,
    )
    return plan, words


def check_unchanged(folder: Path, known: list[dict], setting: dict) -> None:
    """Raises UserError where the run to be resumed was another."""
    free = dict.fromkeys(("budget", "blocks"))
    differs = records.differences(known[0]["plan"] | free, setting["plan"] | free)
    differs += records.differences(known[0]["environment"], setting["environment"])
    if [row["name"] for row in known[0]["cases"]] != [row["name"] for row in setting["cases"]]:
        differs.append("cases")
    if differs:
        raise UserError(
            f"--resume {folder}: start a new run, this one differs: {'; '.join(differs)}"
        )


def measure(plan: Plan, rows: list[Case], folder: Path, host: Host) -> int:
    """Gates, blocks, table and plots; returns the exit code."""
    with Progress() as progress:
        runner = Runner(plan, rows, folder, host, progress)
        try:
            runner.skips()
            runner.gates()
            runner.measure()
            code = 0
        except Failed as error:
            print(f"bench: {error}", file=sys.stderr)
            code = 1
        except KeyboardInterrupt:
            end(OWNER)
            print("bench: interrupted; --resume resumes it", file=sys.stderr)
            code = 130
        finally:
            end(OWNER)
    if records.of(records.read(folder)[0], "sample"):
        terminal.print_result(folder)
    return code
