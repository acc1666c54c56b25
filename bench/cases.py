"""What there is to run: each script of the ladder, its launcher, its world size, its flags.

Nothing is asked of the machine here: a Host says what it is, and backends.py what is installed.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from bench import ROOT, UserError
from bench.host import Host

PLAIN = "snsc.py"  # the reference: all ratios are to it
AGAIN = "snsc.py again"  # the same once more, the control: what it differs by is noise
ONE_PROCESS = ("snsc.py", "snmc_dp.py")


@dataclass(frozen=True)
class Case:
    """One row of the table.

    world counts what computes: processes, and for nn.DataParallel the devices of its one process.
    share: it trains on this fraction of the global batch, 2 for a half, as one rank of 2 would that
    had nobody to wait for; what the others take longer than it is their communication.
    """

    name: str
    script: str
    launcher: str  # python, torchrun, horovodrun or srun
    world: int
    split: str = "strided"  # how the global batch is shared: the oracle's --split
    share: int = 1
    technique: str = ""  # what it does to a step beside the parallelism: TECHNIQUES
    flags: tuple[str, ...] = ()  # the script's own
    variables: tuple[tuple[str, str], ...] = ()  # of its environment

    @property
    def processes(self) -> int:
        return 1 if self.launcher == "python" and self.script != "mnmc_ddp_mp.py" else self.world

    def threads(self, host: Host) -> int:
        """CPU threads a process, so that all of them together use each core once."""
        return max(1, host.cores // max(self.processes, self.share))

    def precision(self, host: Host) -> str:
        """What the scripts compute convolutions in: TF32 by torch's default where the GPU can."""
        if self.script == "mnmc_apex.py":
            return "fp16"  # --opt-level O1
        if self.technique in ("bf16", "fp16", "fp32"):
            return self.technique
        return "tf32" if host.tf32 else "fp32"

    def command(self, *flags, host: Host | None = None) -> list[str]:
        """The whole command line, with these flags of the script's; no host: for the CPU."""
        script = [sys.executable, str(ROOT / self.script), *self.flags, *map(str, flags)]
        beside = Path(sys.executable).parent
        if self.script == "mnmc_ddp_mp.py":
            return [*script, "--nproc-per-node", str(self.world)]
        if self.launcher == "torchrun":
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            return [*launcher, "--nproc-per-node", str(self.world), *script[1:]]
        if self.launcher == "horovodrun":
            program = shutil.which("horovodrun") or str(beside / "horovodrun")
            return [program, "-np", str(self.world), "--gloo", *script]
        if self.launcher == "srun":
            handed_out = host is not None and host.gpus and host.slurm_gpus
            ask = ["--gpus-per-node", str(self.world)] if handed_out else []
            return ["srun", "--kill-on-bad-exit", "-N1", "-n", str(self.world), *ask, *script]
        return script

    def oracle(self, *flags) -> list[str]:
        """The command of the exact reference for its losses: one process, no launcher."""
        script = str(ROOT / "bench" / "oracle.py")
        parts = ["--parts", str(self.world), "--split", self.split]
        return [sys.executable, script, *map(str, flags), *parts]

    def missing(self) -> str | None:
        """Only for bench/pieces, which runs on the CPU: what backend it lacks here."""
        from bench.backends import absent

        return absent(self)


def worlds(host: Host) -> list[int]:
    """The world sizes by default: 1, 2, 4, ... up to the number of GPUs; 1 and 2 on a CPU."""
    most = len(host.gpus) or min(2, host.cores)
    sizes = [2**k for k in range(most.bit_length()) if 2**k < most]
    return [*sizes, most]


def cases(host: Host, sizes: list[int]) -> list[Case]:
    """All rows, in the ladder's order: one a script, and one a world size where it has several."""
    rows = [Case(PLAIN, "snsc.py", "python", 1), Case(AGAIN, "snsc.py", "python", 1)]
    several = sizes if host.gpus else [max(sizes)]  # on a CPU nn.DataParallel passes through
    if not host.gpus:
        rows.append(Case("snmc_dp.py", "snmc_dp.py", "python", 1, "contiguous"))
    else:
        rows += [
            Case(f"snmc_dp.py x{world}", "snmc_dp.py", "python", world, "contiguous")
            for world in several
        ]
    launchers = {
        "mnmc_ddp_launch.py": "torchrun",
        "mnmc_ddp_mp.py": "python",
        "mnmc_ddp_slurm.py": "srun",
        "mnmc_apex.py": "torchrun",
        "mnmc_horovod.py": "horovodrun",
    }
    for script, launcher in launchers.items():
        rows += [Case(f"{script} x{world}", script, launcher, world) for world in sizes]
    return rows


# By what each does to a step: script, its flags, variables. Where a GPU has TF32, torch uses it.
TECHNIQUES = {
    "fp32": ("mnmc_ddp_launch.py", (), (("NVIDIA_TF32_OVERRIDE", "0"),)),
    "bf16": ("techniques/amp.py", ("--amp", "bf16"), ()),
    "fp16": ("techniques/amp.py", ("--amp", "fp16"), ()),
    "channels_last": ("techniques/channels_last.py", (), ()),
    "compiled": ("techniques/compile.py", (), ()),
}


def techniques(host: Host, world: int) -> list[Case]:
    """mnmc_ddp_launch.py at this world size once more, with each technique."""
    rows = [
        Case(f"{name} x{world}", script, "torchrun", world, "strided", 1, name, flags, variables)
        for name, (script, flags, variables) in TECHNIQUES.items()
    ]
    usual = Case("", "mnmc_ddp_launch.py", "torchrun", world).precision(host)
    return [case for case in rows if case.technique != usual]  # fp32 is no technique on a CPU


def alone(rows: list[Case]) -> list[Case]:
    """One rank of each world size among the rows by itself, at the batch that it has among them."""
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


def chosen(args, host: Host) -> list[Case]:
    """The cases that --world, --only, --techniques and --quick ask for; the reference and its
    control always.

    Of each world size one rank alone, too, where there is time for it. Raises UserError.
    """
    rows = cases(host, sizes(args.world, host))
    if args.quick and args.world is None:
        most = max(worlds(host))
        rows = [case for case in rows if case.world == most or case.script in ONE_PROCESS]
    if args.techniques:
        most = max(case.world for case in rows)
        rows = [c for c in rows if c.script == PLAIN or c.name == f"mnmc_ddp_launch.py x{most}"]
        rows += techniques(host, most)
    if args.only:
        parts = args.only.split(",")
        for part in parts:
            if not any(part in case.name for case in rows):
                raise UserError(f"--only {part}: no case is named so, --list shows them")
        rows = [c for c in rows if c.script == PLAIN or any(part in c.name for part in parts)]
    return rows if args.quick else [*rows, *alone(rows)]
