"""What there is to run: each script of the ladder, its launcher, and what it needs."""

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.environment import cores, cpu_has, gpus, has, output, tf32, versions
from bench.launch import ROOT, environment

PLAIN = "snsc.py"  # the reference: all ratios are to it
AGAIN = "snsc.py again"  # the same once more, the control: what it differs by is noise


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

    @property
    def threads(self) -> int:
        """CPU threads a process, so that all of them together use each core once."""
        return max(1, cores() // max(self.processes, self.share))

    @property
    def precision(self) -> str:
        """What the scripts compute convolutions in: TF32 by torch's default where the GPU can."""
        if self.script == "mnmc_apex.py":
            return "fp16"  # --opt-level O1
        if self.technique in ("bf16", "fp16", "fp32"):
            return self.technique
        return "tf32" if tf32() else "fp32"

    def backend(self) -> str:
        """What carries its messages, with versions and build flags, where it can run."""
        return _backend(self.launcher, self.script) if not self.missing() else ""

    def command(self, *flags) -> list[str]:
        """The whole command line, with these flags of the script's."""
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
            known = "gpu" in output("sinfo", "-h", "-o", "%G")  # else Slurm leaves them to the job
            ask = ["--gpus-per-node", str(self.world)] if gpus() and known else []
            return ["srun", "--kill-on-bad-exit", "-N1", "-n", str(self.world), *ask, *script]
        return script

    def oracle(self, *flags) -> list[str]:
        """The command of the exact reference for its losses: one process, no launcher."""
        script = str(ROOT / "bench" / "oracle.py")
        parts = ["--parts", str(self.world), "--split", self.split]
        return [sys.executable, script, *map(str, flags), *parts]

    def environment(self) -> dict[str, str]:
        """The child's: its threads, and of several GPUs only as many as it is to use."""
        env = environment(self.threads, **dict(self.variables))
        if gpus() and self.launcher == "python":  # nn.DataParallel takes all that it sees
            every = env.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.world)))
            env["CUDA_VISIBLE_DEVICES"] = ",".join(every.split(",")[: self.world])
        if self.launcher == "srun" and "SLURM_JOB_ID" in env:  # steps of one job, at the same time
            port = 20_000 + (16 * os.getpid() + self.world) % 10_000
            env.setdefault("MASTER_PORT", str(port))
        return env

    def missing(self) -> str | None:
        """Why it cannot run here, in words for the table; None where it can."""
        if gpus() and self.world > len(gpus()):
            return f"needs {self.world} GPUs, {len(gpus())} here"
        if self.technique == "fp16" and not gpus() and not cpu_has("fp16", "asimdhp"):
            return "this CPU has no fp16 arithmetic, to emulate it takes a hundred times as long"
        if self.technique == "compiled" and not shutil.which(os.environ.get("CXX", "g++")):
            return "g++ not found: torch.compile needs a C++ compiler"
        return _missing(self.launcher, self.script)


@cache
def _missing(launcher: str, script: str) -> str | None:
    if launcher == "srun":
        if not has("srun"):
            return "srun not found: no Slurm here"
        try:
            asked = subprocess.run(["sinfo", "-h"], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return "Slurm's sinfo does not answer"
        if asked.returncode or not asked.stdout.strip():
            return "Slurm's sinfo shows no node"
    if launcher == "horovodrun":
        if importlib.util.find_spec("horovod") is None or not has("horovodrun"):
            return "horovod not installed: bash bench/install_horovod.sh builds it"
    if script == "mnmc_apex.py":
        if importlib.util.find_spec("apex") is None:
            return "apex not installed: docs/backends.md says how"
        if not gpus():
            return "apex.amp and apex.parallel need a GPU"
        code = "from apex import amp; from apex.parallel import DistributedDataParallel"
        if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode:
            return "this apex has no apex.amp and apex.parallel: docs/backends.md says how"
    return None


@cache
def _backend(launcher: str, script: str) -> str:
    found = versions()
    nccl = ["nccl", *(found[name] for name in found if name.startswith("nvidia-nccl"))]
    torchs = " ".join([*(nccl if gpus() else ["gloo"]), "of torch", found["torch"]])
    if script == "snmc_dp.py":
        return "copies between devices" if gpus() else "none: one device"
    if launcher == "srun":
        return f"{output('srun', '--version')}, {torchs}"
    if script == "mnmc_apex.py":
        kernels = "" if importlib.util.find_spec("amp_C") else " without its CUDA kernels"
        return f"apex {found.get('apex', '?')}{kernels}, {torchs}"
    if launcher == "horovodrun":
        code = "import horovod.torch as h; print(*(n for n in ('nccl', 'mpi', 'gloo', 'cuda') "
        code += "if getattr(h, n + '_built')()))"
        built = output(sys.executable, "-c", code).split()
        return f"horovod {found['horovod']} built with {', '.join(built)}"
    return torchs if launcher == "torchrun" or script == "mnmc_ddp_mp.py" else "none"


def worlds() -> list[int]:
    """The world sizes by default: 1, 2, 4, ... up to the number of GPUs; 1 and 2 on a CPU."""
    most = len(gpus()) or min(2, cores())
    sizes = [2**k for k in range(most.bit_length()) if 2**k < most]
    return [*sizes, most]


def cases(sizes: list[int]) -> list[Case]:
    """All rows, in the ladder's order: one a script, and one a world size where it has several."""
    rows = [Case(PLAIN, "snsc.py", "python", 1), Case(AGAIN, "snsc.py", "python", 1)]
    several = sizes if gpus() else [max(sizes)]  # on a CPU nn.DataParallel passes through
    if not gpus():
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


def techniques(world: int) -> list[Case]:
    """mnmc_ddp_launch.py at this world size once more, with each technique."""
    rows = [
        Case(f"{name} x{world}", script, "torchrun", world, "strided", 1, name, flags, variables)
        for name, (script, flags, variables) in TECHNIQUES.items()
    ]
    usual = Case("", "mnmc_ddp_launch.py", "torchrun", world).precision
    return [case for case in rows if case.technique != usual]  # fp32 is no technique on a CPU


def alone(rows: list[Case]) -> list[Case]:
    """One rank of each world size among the rows by itself, at the batch that it has among them."""
    sizes = sorted({case.world for case in rows if case.world > 1})
    return [Case(f"one rank of {world} alone", PLAIN, "python", 1, share=world) for world in sizes]
