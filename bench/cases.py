"""Makes the cases: each script of the ladder, its launcher, its world size, its flags.

Nothing is asked of the machine here: a Host says what it is, and backends.py what is installed.
"""

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from bench import ROOT, UserError
from bench.host import PORT, Host
from bench.ladder import DDP, GROUPS, KERNELS, LADDER, PLAIN, SCRIPTS, TIMED, in_group

AGAIN = f"{PLAIN} again"  # the plain script once more, the control: its deviation shows the noise
PROBE = "bench/run/probe.py"  # starts a script, and records what the script does not
BATCH = 256  # images per step by default, of a GPU
SMALL = 64  # of a core, where a step of 256 takes a second or more; of photographs
WORKERS = 4  # processes of a loader, per device


@dataclass(frozen=True)
class Case:
    """One row of the table.

    world counts what computes: processes, and for nn.DataParallel the devices of its one process.
    share: it trains on this fraction of the global batch, 2 for a half, like one of 2 ranks that
    waits for no other. What the others take longer is their communication.
    """

    name: str
    script: str
    launcher: str  # python, torchrun, horovodrun or srun
    world: int
    split: str = "strided"  # how the global batch is split: the oracle's --split
    share: int = 1
    technique: str = ""  # what it adds to the parallelism: ladder.TIMED
    flags: tuple[str, ...] = ()  # the script's own
    variables: tuple[tuple[str, str], ...] = ()  # of its environment
    batch: int | None = None  # images per step, over all processes; None: the script's default
    workers: int | None = None  # of each process's loader

    @property
    def processes(self) -> int:
        return 1 if self.launcher == "python" and self.script != "mnmc_ddp_mp.py" else self.world

    @property
    def period(self) -> int:
        """Steps after which its work repeats."""
        return TIMED[self.technique][1].period if self.technique else 1

    def nodes(self, host: Host | None) -> int:
        """How many machines it takes: more than one for more processes than one has devices."""
        return -(-self.world // host.devices) if host and host.nodes else 1

    def threads(self, host: Host) -> int:
        """CPU threads per process.

        Without GPUs a core plays a device, so a process has one. With GPUs, all processes together
        use each core once.
        """
        if not host.gpus:
            return 1
        return max(1, host.cores // max(self.processes // self.nodes(host), self.share))

    def own_variables(self, host: Host) -> dict[str, str]:
        """Its variables: threads, the technique's own, and which GPUs it may use."""
        found = {"OMP_NUM_THREADS": str(self.threads(host)), **dict(self.variables)}
        if host.gpus and self.launcher == "python":  # nn.DataParallel takes all that it sees
            every = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.world)))
            found["CUDA_VISIBLE_DEVICES"] = ",".join(every.split(",")[: self.world])
        if self.launcher == "srun" and host.slurm_job:  # several steps of one job at the same time
            found["MASTER_PORT"] = PORT
        return found

    def precision(self, host: Host) -> str:
        """What the scripts compute convolutions in: TF32 by torch's default where the GPU can."""
        if self.script == "mnmc_apex.py":
            return "fp16"  # --opt-level O1
        if self.technique in ("bf16", "fp16", "fp32"):
            return self.technique
        return "tf32" if host.tf32 else "fp32"

    def command(self, *flags, host: Host | None = None) -> list[str]:
        """The whole command line, with these flags of the script or the probe.

        PORT stands in it where a port is chosen when it starts. host: None stands for a CPU.
        """
        script = [sys.executable, str(ROOT / PROBE), str(ROOT / self.script), *self.flags]
        script += [*map(str, flags), *self.amounts()]
        beside = Path(sys.executable).parent
        if self.script == "mnmc_ddp_mp.py":
            return [*script, "--nproc-per-node", str(self.world), "--master-port", PORT]
        if self.launcher == "torchrun" and (nodes := self.nodes(host)) > 1:
            spread = [sys.executable, "-m", "bench.nodes.spread", "--remote", host.remote]
            spread += ["--nodes", ",".join(host.nodes[:nodes]), "--port", PORT]
            return [*spread, "--per-node", str(self.world // nodes), "--", *script[1:]]
        if self.launcher == "torchrun":
            # Without the address, it waits forever where the machine's own name does not resolve.
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            launcher += ["--local-addr", "127.0.0.1"]
            return [*launcher, "--nproc-per-node", str(self.world), *script[1:]]
        if self.launcher == "horovodrun":
            program = shutil.which("horovodrun") or str(beside / "horovodrun")
            return [program, "-np", str(self.world), "--gloo", *script]
        if self.launcher == "srun":
            return [*self.srun(host), *script]
        return script

    def amounts(self) -> list[str]:
        """The scripts' flags for the case's batch and workers."""
        given = {"--batch-size": self.batch, "--workers": self.workers}
        return [word for k, v in given.items() if v is not None for word in (k, str(v))]

    def srun(self, host: Host | None) -> list[str]:
        """Slurm's launcher: cores for the threads of each process, and GPUs where it has them.

        --overlap: within a job, the steps of the cases that are asleep hold its cores and GPUs.
        """
        nodes = self.nodes(host)
        words = ["srun", "--kill-on-bad-exit", f"-N{nodes}", "-n", str(self.world)]
        if host is None:
            return words
        words += ["--cpus-per-task", str(self.threads(host))]
        if host.gpus and host.slurm_gpus:
            words += ["--gpus-per-node", str(self.world // nodes)]
        return [*words, "--overlap"] if host.slurm_job else words

    def oracle(self, *flags) -> list[str]:
        """The command of the oracle for its losses: one process, no launcher."""
        script = str(ROOT / "bench" / "oracle.py")
        parts = ["--parts", str(self.world), "--split", self.split]
        parts += TIMED[self.technique][1].exact if self.technique else []
        return [sys.executable, script, *map(str, flags), *self.amounts(), *parts]


def recorded(row: Mapping) -> Case:
    """A case as a record has it; fields that are not a Case's do not count."""
    found = {field.name: row[field.name] for field in fields(Case) if field.name in row}
    found["flags"] = tuple(found["flags"])
    found["variables"] = tuple(tuple(pair) for pair in found["variables"])
    return Case(**found)


def worlds(host: Host) -> list[int]:
    """The world sizes by default: 1, 2, 4, ... up to the number of devices. On several machines: 1,
    all devices of one, and those of 2, 4, ... and all machines.
    """
    if host.nodes:
        return sorted({1, *(host.devices * count for count in powers(len(host.nodes)))})
    return powers(host.devices)


def powers(most: int) -> list[int]:
    """1, 2, 4, ... and the number itself."""
    return [*(2**k for k in range(most.bit_length()) if 2**k < most), most]


def cases(host: Host, sizes: list[int]) -> list[Case]:
    """All rows, in the ladder's order: one a script, and one a world size where it has several."""
    rows = [Case(name, PLAIN, "python", 1) for name in (PLAIN, AGAIN)]
    for script in LADDER[1:]:
        several = sizes if host.gpus or script.processes else sizes[-1:]  # one that will not run
        rows += [
            Case(f"{script.path} x{world}", script.path, script.launcher, world, script.split)
            for world in several
        ]
    return rows


def techniques(host: Host, world: int, groups: Iterable[str] = (KERNELS,)) -> list[Case]:
    """One case for each technique of these groups, at this world size."""
    rows = [
        Case(
            f"{name} x{world}",
            script.path,
            script.launcher,
            world,
            script.split,
            technique=name,
            flags=how.flags,
            variables=how.variables,
        )
        for group in groups
        for name, (script, how) in in_group(group).items()
    ]
    usual = Case("", DDP, "torchrun", world).precision(host)
    return [case for case in rows if case.technique != usual]  # fp32 is no technique on a CPU


def alone(rows: list[Case]) -> list[Case]:
    """For each world size among the rows, one process with the local batch of one of its ranks.

    With --scaling weak, that is snsc.py itself.
    """
    sizes = sorted({case.world for case in rows if case.world > 1})
    return [Case(f"one rank of {world} alone", PLAIN, "python", 1, share=world) for world in sizes]


def sizes(text: str | None, host: Host) -> list[int]:
    """--world as numbers; raises UserError."""
    if text is None:
        return worlds(host)
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise UserError(f"--world {text}: give numbers from 1 up, with commas: 1,2,4")
    return found


def scaling(args: Namespace, host: Host) -> str:
    """--scaling: weak by default where there are several devices, else strong.

    weak: the same local batch at every world size, so the global batch grows; snsc.py has one
    device. strong: the same global batch at every world size.
    """
    return args.scaling or ("weak" if host.devices > 1 else "strong")


def chosen(args: Namespace, host: Host) -> list[Case]:
    """The cases that --world, --only, --techniques and --quick ask for, with batch and workers.

    snsc.py is always the first, and its control the second. Without --quick, one rank of each world
    size is measured alone, too. Raises UserError.
    """
    rows = cases(host, sizes(args.world, host))
    if args.quick and args.world is None:
        most = max(worlds(host))
        rows = [case for case in rows if case.world == most or not SCRIPTS[case.script].processes]
    if args.techniques:
        groups = args.techniques.split(",")
        if unknown := {*groups} - {*GROUPS}:
            text = f"choose from {','.join(GROUPS)}, with commas"
            raise UserError(f"--techniques {unknown.pop()}: {text}")
        most = max(case.world for case in rows)
        rows = [c for c in rows if c.script == PLAIN or c.name == f"{DDP} x{most}"]
        rows += techniques(host, most, groups)
    if args.only:
        parts = args.only.split(",")
        for part in parts:
            if not any(part in case.name for case in rows):
                raise UserError(f"--only {part}: no case is named so, --list shows them")
        rows = [c for c in rows if c.script == PLAIN or any(part in c.name for part in parts)]
    if not args.quick and scaling(args, host) == "strong":
        rows = [*rows, *alone(rows)]
    return scaled(rows, args, host)


def scaled(rows: list[Case], args: Namespace, host: Host) -> list[Case]:
    """The cases with the batch and the workers that --scaling, --batch-size and --workers give.

    --workers is per device. --batch-size is, too, with weak scaling; with strong scaling it is
    global. Its default is that of as many devices as the largest case uses. Raises UserError.
    """
    weak = scaling(args, host) == "weak"
    devices = 1 if weak else max(case.world for case in rows)
    photographs = args.dataset == "imagenet"
    batch = args.batch_size or (BATCH if host.gpus and not photographs else SMALL) * devices
    workers = args.workers
    if workers is None:  # on a CPU, images in memory need none
        workers = WORKERS if photographs or host.gpus else 0
    if workers < 0:
        raise UserError(f"--workers {workers}: give 0 or more")
    if batch < 2:
        raise UserError(f"--batch-size {batch}: give 2 or more, BatchNorm needs two images")
    found = []
    for case in rows:
        case = replace(case, workers=workers * (case.world // case.processes))
        if weak:
            found.append(replace(case, batch=batch * case.world))
            continue
        ranks = max(case.world, case.share)
        if batch % ranks or batch < 2 * ranks:
            cure = f"give a multiple of the world size {ranks}, at least two images for each"
            raise UserError(f"--batch-size {batch}: {cure}")
        found.append(replace(case, batch=batch // case.share))
    return found


class Compared(NamedTuple):
    """What a case is compared with, by name; None where there is no such case among the rows."""

    plain: str | None  # for `claim`: snsc.py
    ddp: str | None  # for `ddp_claim`: DDP with as many processes
    alone: str | None  # for the parallel overhead: one rank of it alone


def compared_with(case: Case, rows: list[Case]) -> Compared:
    """With which of the rows a case's speed may be compared: one batch, and one world size.

    A speed-up over more devices is a ratio, and no claim.
    """
    if case.name in (PLAIN, AGAIN) or case.share > 1:
        return Compared(None, None, None)

    def first(fits) -> str | None:
        return next((row.name for row in rows if row != case and fits(row)), None)

    def same(row: Case) -> bool:
        return row.batch == case.batch and row.world == case.world

    def like_one_rank(row: Case) -> bool:
        weak = row.name == PLAIN and row.batch and row.batch * case.world == case.batch
        return weak or row.share == case.world

    plain = first(lambda row: row.name == PLAIN and same(row))
    ddp = first(lambda row: row.name == f"{DDP} x{case.world}" and same(row))
    return Compared(plain, ddp, first(like_one_rank) if case.world > 1 else None)
