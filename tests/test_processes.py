"""Processes end, whatever happens; and what a failure says."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from support import ROOT, wait_until

from bench import cases, process
from bench.host import Host
from bench.process import MARK, Finished

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


# --- signals

HARNESS = """
import signal, sys
from bench import process
if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
process.heed_signals()
process.GRACE = 1.0
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
process.run([sys.executable, "-c", code], 500)
"""


def test_a_terminal_that_closes_ends_all():
    """SIGHUP as SIGTERM; under nohup it is not heeded."""
    for word in ("", "nohup"):
        harness = subprocess.Popen([sys.executable, "-c", HARNESS, word], cwd=ROOT)
        mark, number = f"{harness.pid}-", signal.SIGHUP
        wait_until(lambda mark=mark: process.marked(mark))
        if word:
            harness.send_signal(number)
            time.sleep(0.5)
            assert harness.poll() is None and process.marked(mark)
            number = signal.SIGTERM
        harness.send_signal(number)
        assert harness.wait(240) == 128 + number
        assert not process.marked(mark)


def test_an_interrupt_ends_what_runs_side_by_side():
    """No further job begins, and none is waited for."""
    begun = []

    def work(job):
        begun.append(job)
        return process.run(SLEEP, 500)

    def interrupt():
        wait_until(lambda: len(process.marked(process.OWNER)) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        process.side_by_side(work, range(5), 2)
    thread.join()
    assert sorted(begun) == [0, 1] and not process.marked(process.OWNER)


def test_a_command_that_hangs_is_killed_with_all_its_children(monkeypatch):
    """Children in sessions of their own, and one that ignores SIGTERM, included."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    parent = f"""
import subprocess, sys, time
code = {child!r}
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
subprocess.Popen([sys.executable, "-c", code])
time.sleep(600)
"""
    monkeypatch.setattr(process, "GRACE", 0.5)
    done = process.run([sys.executable, "-c", parent], limit=3)
    assert done.timed_out and done.code != 0
    assert not process.marked(process.OWNER)


def test_orphans_of_a_command_that_ends_are_ended_too():
    """As a launcher's workers, when the launcher alone is killed."""
    parent = f"import subprocess; subprocess.Popen({SLEEP})"
    assert process.run([sys.executable, "-c", parent], limit=120).code == 0
    assert not process.marked(process.OWNER)


SHOW = "import os, sys; print(sys.argv[1], os.environ['MASTER_PORT'])"


def test_a_port_is_chosen_when_a_command_starts(monkeypatch):
    """Not when it is made: gates are made minutes before they run. Two at once get two ports."""
    case = cases.Case("x2", "mnmc_ddp_mp.py", "python", 2)
    words = case.command()
    port = words[words.index("--master-port") + 1]
    assert words == case.command()  # nothing was chosen yet
    slurm = cases.Case("x2", "mnmc_ddp_slurm.py", "srun", 2)
    monkeypatch.setenv("MASTER_PORT", "29500")  # of the job: its steps run at the same time
    env = process.environment(1, **slurm.own_variables(Host("C", 2, slurm_job=True)))
    command = [sys.executable, "-c", SHOW, port]
    done = process.side_by_side(lambda _: process.run(command, 120, env), range(3), 3)
    ports = [run.out.split() for run in done]
    assert all(mine == its and 1024 <= int(mine) < 2**16 for mine, its in ports)
    assert len({mine for mine, _ in ports}) == 3


# --- marks


@pytest.fixture
def stranger():
    """Starts a process with this mark: stranger(mark)."""
    started = []

    def start(mark: str) -> psutil.Process:
        started.append(subprocess.Popen(SLEEP, env=os.environ | {process.MARK: mark}))
        return psutil.Process(started[-1].pid)

    yield start
    for found in started:
        found.kill()
        found.wait()


DEAD = f"{2**22 + 1}-1-{process.PLACE}-{'0' * 32}"  # no process has such an id
ELSEWHERE = DEAD.replace(
    process.PLACE, "0" * 12
)  # of a harness on another node, which Slurm passed on


@pytest.mark.parametrize("mark", ["yes", ELSEWHERE])
def test_a_mark_that_no_harness_of_this_machine_made_is_left_alone(mark, stranger):
    """A user's own LADDER_RUN, and that of a harness on another node."""
    found = stranger(mark)
    wait_until(lambda: found.environ().get(MARK) == mark)
    process.sweep()
    assert found.is_running() and found.status() != psutil.STATUS_ZOMBIE


def test_a_dead_harness_mark_is_swept_but_from_ourselves(stranger, monkeypatch):
    """A shell that a run had started passes its mark on to what is typed there."""
    name = f"LADDER_TEST_{os.getpid()}"  # else another harness on this machine may be the first
    monkeypatch.setattr(process, "MARK", name)
    found = stranger(DEAD)
    wait_until(lambda: found.environ().get(name) == DEAD)
    # It waits for the end of what it kills, which is a zombie here: our child.
    code = f"from bench import process; process.MARK = {name!r}; process.GRACE = 0.1; "
    code += "print(process.sweep())"
    env = os.environ | {name: DEAD}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"1\n"), done
    wait_until(lambda: found.status() == psutil.STATUS_ZOMBIE)


# --- the line of a failure

WARNING = """\
/venv/torch/utils.py:10: UserWarning: an error may occur: lower the number of workers
  warnings.warn("an error may occur")
[W1122 10:00:00.1 socket.cpp:200] [c10d] The client socket has failed: no error, only slow
"""
TORCHRUN = """\
E1122 10:00:00.2 7 elastic/multiprocessing/api.py:900] failed (exitcode: {code}) local_rank: 1
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  exitcode  : {code} (pid: 8)
  traceback : {why}
"""
RANKS = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "mnmc_ddp_launch.py", line 90, in main
[rank1]: ValueError: first
[rank1]: During handling of the above exception, another exception occurred:

[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
[rank0]: torch.distributed.DistBackendError: connection closed by peer
"""
OURS = "mnmc_ddp_launch.py: --batch-size 255: give a multiple of the 2 processes"
SIGNAL = "Signal 9 (SIGKILL) received by PID 8"
TRACE = "To enable traceback see: https://..."


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            RANKS + TORCHRUN.format(code=1, why=TRACE),
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        (f"{OURS}\n{TORCHRUN.format(code=2, why=TRACE)}", OURS),
        (TORCHRUN.format(code=-9, why=SIGNAL), SIGNAL),
        ("[1]<stderr>:RuntimeError: no GPU\nProcess 1 exit with code 1.", "RuntimeError: no GPU"),
        ("", "no output"),
    ],
)
def test_the_reason_is_the_errors_line(said, line):
    """Not the first warning with the word, nor the launcher's report of it."""
    err = WARNING + said if said else ""
    assert Finished(1, "", err, False).last_line == line
