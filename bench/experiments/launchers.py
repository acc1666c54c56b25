"""python -m bench launchers --out FILE: what each launcher does when a rank fails.

Two ranks all-reduce ten times a second. Then something breaks: rank 1 raises an exception, gets
SIGKILL, or hangs; the launcher gets SIGKILL, or Ctrl-C; or the port was in use from the start. A
record has the exit code, the seconds until the launcher and until all ranks were gone, how many
ranks were left after LIMIT, and the first line that names rank 1. What is not installed is left
out, with the reason. For srun it starts a small Slurm (bench/slurm/up.sh), which needs root.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from bench import ROOT, errors, refuse
from bench.host import free_port, look
from bench.options import make_parser
from bench.process import MARK, end, environment, heed_signals, new_mark
from bench.records import lines as read_lines
from bench.records import write_whole

LIMIT = 45.0  # seconds that ranks may take to end; torchrun gives them 30 after SIGTERM
START = 180.0  # seconds until three steps are done, on a loaded machine
PYTHON = f"{sys.executable} {ROOT}/bench/experiments/ranks.py"
SCRIPT = PYTHON.split()[1]
EXCEPTION, KILLED, HANG = "exception on a rank", "SIGKILL of a rank", "a rank hangs"
LAUNCHER, CTRL_C, PORT = "SIGKILL of the launcher", "Ctrl-C", "busy port"
OF_RANK_1 = [EXCEPTION, KILLED, HANG]
CASES = [*OF_RANK_1, LAUNCHER, CTRL_C, PORT]
TORCHRUN = f"torchrun --nproc-per-node=2 --master-port=PORT {SCRIPT}"
WATCH = f"{sys.executable} -m bench watch --after 10 --end --"
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "bench watch --end -- torchrun": f"{WATCH} {TORCHRUN}",
    "accelerate launch": "accelerate launch --multi_gpu --num_processes=2 --num_machines=1 "
    "--mixed_precision=no --dynamo_backend=no --num_cpu_threads_per_process=1 "
    f"--main_process_port=PORT {SCRIPT}",
    "mp.spawn": PYTHON,
    "srun": f"srun -N2 --ntasks-per-node=1 {PYTHON}",
    "srun --kill-on-bad-exit": f"srun --kill-on-bad-exit -N2 --ntasks-per-node=1 {PYTHON}",
    "horovodrun": f"horovodrun -np 2 {PYTHON}",
    "mpirun": f"mpirun --allow-run-as-root --oversubscribe -np 2 {PYTHON}",
}
# A line that says which rank it was, in the launcher's words
NAMED = re.compile(
    r"(?i)(.*\b(rank|process|process name|task)\b\W{0,12}1\b|.*\[rank1\]|.*\[1\]<).*"
)


@contextmanager
def small_slurm():
    """The variables of a Slurm of our own; none, and why, where there can be none."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        scripts = {"cwd": ROOT / "bench" / "slurm", "capture_output": True, "text": True}
        up = subprocess.run(["bash", "up.sh", folder], **scripts)
        try:
            said = (up.stdout or up.stderr).strip().splitlines()[-1]
            yield (said if up.returncode else dict([said.split()[1].split("=", 1)]))
        finally:
            subprocess.run(["bash", "down.sh", folder], **scripts)


def alive(folder: Path, mark: str) -> list[psutil.Process]:
    """The ranks that live, in their order."""
    found = []
    for path in sorted(folder.glob("pid.*")):
        with suppress(psutil.Error, ValueError):
            process = psutil.Process(int(path.read_text()))
            if process.status() != "zombie" and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def wait(true, deadline: float) -> float | None:
    """When something was true, on the monotonic clock; None if it is not by the deadline."""
    while time.monotonic() < deadline:
        if true():
            return time.monotonic()
        time.sleep(0.05)
    return None


def act(case: str, job: psutil.Popen, folder: Path, mark: str) -> None:
    """What breaks."""
    (folder / "act").touch()
    if case == KILLED:
        alive(folder, mark)[1].kill()
    elif case == LAUNCHER:
        job.kill()
    elif case == CTRL_C:
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does


def measure(command: str, case: str, variables: dict) -> dict:
    """Starts the ranks, breaks something, and says what came of it. Leaves no process.

    Another program may take the port before the ranks do; then it is done once more, on another.
    """
    found = measure_once(command, case, variables)
    again = "in use" in found.get("skipped", "")
    return measure_once(command, case, variables) if again else found


def measure_once(command: str, case: str, variables: dict) -> dict:
    mark, fault = new_mark(), {EXCEPTION: "exception", HANG: "hang"}.get(case, "none")
    with tempfile.TemporaryDirectory() as place, socket.socket() as other:
        folder, port = Path(place), free_port()
        if case == PORT:
            other.bind(("", port))
            other.listen()
        words = [*command.replace("PORT", str(port)).split(), place, fault]
        words += ["--spawn"] * (command == PYTHON)
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), MARK: mark}
        env = environment(1, **variables, **meet)
        with open(folder / "out", "w") as out:
            streams = {"stdout": out, "stderr": out, "stdin": subprocess.DEVNULL}
            job = psutil.Popen(words, env=env, cwd=ROOT, start_new_session=True, **streams)
        try:
            begun, three = time.monotonic(), [folder / f"ready.{rank}" for rank in (0, 1)]
            most = begun + (LIMIT if case == PORT else START)
            wait(lambda: all(map(Path.exists, three)) or job.poll() is not None, most)
            if case != PORT:
                if len(alive(folder, mark)) < 2:
                    said = (folder / "out").read_text(errors="replace")
                    reason = errors.reason(said)[:300] or "no output"
                    return {"skipped": f"did not start: {reason}"}
                act(case, job, folder, mark)
                begun = time.monotonic()
            elif all(map(Path.exists, three)):
                return {"skipped": "it takes another port"}
            ended = wait(lambda: job.poll() is not None, begun + LIMIT)
            gone = wait(lambda: not alive(folder, mark), begun + LIMIT)
            left = len(alive(folder, mark))
            lines = (folder / "out").read_text(errors="replace").splitlines()
        finally:
            end(mark)
    named = [line.strip()[:200] for line in lines if NAMED.fullmatch(line) and case in OF_RANK_1]
    seconds = [None if at is None else at - begun for at in (ended, gone)]
    result = {"code": None if ended is None else job.poll(), "launcher_seconds": seconds[0]}
    return result | {"ranks_seconds": seconds[1], "left": left, "names": named[:1]}


def main(argv: list[str]) -> int:
    """Each case of each launcher; one record each. Raises UserError."""
    parser = make_parser("launchers", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="FILE.jsonl")
    parser.add_argument(
        "--only", nargs="+", choices=LAUNCHERS, help="these launchers; FILE keeps the others [all]"
    )
    args = parser.parse_args(argv)
    if args.out.suffix != ".jsonl":
        refuse(f"--out {args.out}: give a name that ends in .jsonl")
    heed_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else a child may inherit SIG_IGN
    args.out.parent.mkdir(parents=True, exist_ok=True)
    known, _ = read_lines(args.out)
    kept = [line for line in known[1:] if args.only and line["launcher"] not in args.only]
    lines = [{"environment": look().record(), "limit": LIMIT}, *kept]
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with small_slurm() as slurm:
        for name in args.only or LAUNCHERS:
            command = LAUNCHERS[name]
            variables = slurm if command.startswith("srun") else {}
            reason = variables if isinstance(variables, str) else None
            if not shutil.which(command.split()[0]):
                reason = "not installed"
            for case in CASES if not reason else ["all"]:
                found = {"skipped": reason} if reason else measure(command, case, variables)
                lines.append({"launcher": name, "case": case, **found})
                print(json.dumps(lines[-1]), flush=True)
                write_whole(args.out, "".join(json.dumps(line) + "\n" for line in lines))
    return 0
