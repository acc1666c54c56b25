"""python -m bench watch: what it passes on, and what it says of a command that hangs."""

import inspect
import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import hosts
import psutil
import pytest
from real import lacking
from support import ROOT, free_port, refused, wait_until

from bench.nodes.hang import PAGES, report
from bench.process import environment, run

AFTER = 5  # seconds, the shortest that it takes
WATCH = [sys.executable, "-m", "bench", "watch", "--after", AFTER, "--end", "--"]
# Ranks without torch, which starts faster. The last line is where each waits.
PROGRAM = """
import ctypes, multiprocessing, os, signal, sys, time
def wait():
    time.sleep(600)  # waits here
def spawned(rank):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    wait()
"""


def watched(tmp_path, body: str, ranks: int = 1, limit: float = 100):
    """Runs so many ranks of a program under a watcher."""
    (tmp_path / "train.py").write_text(f"{PROGRAM}{body}\n")
    numbers = " ".join(map(str, range(ranks)))
    each = f"RANK=$k WORLD_SIZE={ranks} {sys.executable} train.py &"
    shell = f"for k in {numbers}; do {each} done; wait"
    # In tmp_path, so that lines are named from there
    env = environment(1, PYTHONPATH=str(ROOT))
    return run([*WATCH, "sh", "-c", shell], limit, env, cwd=tmp_path)


# What it passes on


def test_output_and_exit_code_are_the_commands():
    done = run([*WATCH, "sh", "-c", "echo out; echo err >&2; exit 7"], 60)
    assert (done.code, done.out, done.err) == (7, "out\n", "err\n")
    assert run([*WATCH, "sh", "-c", "kill -9 $$"], 60).code == 128 + 9


def test_a_slow_reader_gets_all():
    """Of a pipe, from which it begins to read four seconds after the command's end."""
    words = [*map(str, WATCH), "sh", "-c", "head -c 300000 /dev/zero; echo err >&2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=ROOT, **pipes) as job:
        select.select([job.stdout], [], [], 60)
        time.sleep(4)
        out, err = job.communicate(timeout=60)
    assert (job.returncode, len(out), err) == (0, 300000, b"err\n")


def test_a_folder_keeps_the_users_files(tmp_path):
    """Old ones of any content; what is left of the watcher's is in its own folder."""
    mine = {"a-b.json": "[1]", "c.json": '{"a": 1}', "d-e.json": "broken"}
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (0, 0))
    done = run([*WATCH[:-1], "--folder", tmp_path, "--", "true"], 60)
    assert (done.code, done.err) == (0, "")
    assert {path.name: path.read_text() for path in tmp_path.glob("*.json")} == mine
    assert {path.name for path in tmp_path.iterdir()} == {*mine, "watch-notes"}


def test_a_fault_of_the_watcher_does_not_end_the_command(tmp_path):
    """Its notes cannot be written any more: one line says so."""
    shell = f"rm -r {tmp_path}/watch-notes; sleep 7; exit 5"
    done = run([*WATCH[:-1], "--folder", tmp_path, "--", "sh", "-c", shell], 60)
    assert done.code == 5 and done.err.startswith("watch: FileNotFoundError"), done
    assert done.err.count("\n") == 1


def test_the_next_run_does_not_see_a_told_ones_ranks(tmp_path):
    words = [*WATCH[:-1], "--folder", tmp_path, "--"]
    env = environment(1, PYTHONPATH=str(ROOT), RANK="0", WORLD_SIZE="1")
    done = run([*words, sys.executable, "-c", "import time; time.sleep(600)"], 100, env)
    (note,) = (tmp_path / "watch-notes").glob("*.json")
    assert done.code == 3 and '"state": "told"' in note.read_text(), done
    assert run([*words, "true"], 60).code == 0
    assert not note.exists() and not (tmp_path / "hang.txt").exists()


@contextmanager
def trapping(name: str, tmp_path):
    """A watcher, of a command that waits for a signal."""
    trap = f"trap 'echo {name}; exit 9' {name}; touch ready; while :; do sleep 0.1; done"
    words = [*map(str, WATCH), "sh", "-c", trap]
    env = environment(1, PYTHONPATH=str(ROOT))
    job = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env)
    try:
        wait_until((tmp_path / "ready").exists, 60)
        yield job
    finally:
        job.terminate()
        job.communicate(timeout=20)


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "USR1", "USR2"])
def test_signals_are_passed_on(name, tmp_path):
    with trapping(name, tmp_path) as job:
        job.send_signal(getattr(signal, f"SIG{name}"))
        assert (job.communicate(timeout=20)[0], job.returncode) == (f"{name}\n", 9)


def test_mistakes_are_one_line():
    for flags, said in [
        (["--after", "1", "--", "true"], "--after"),
        (["--", "nowhere"], "nowhere"),
    ]:
        refused(run([sys.executable, "-m", "bench", "watch", *flags], 60), said, code=2)


# One machine


def test_each_ranks_line_is_named(tmp_path):
    """A third one is elsewhere: it is the odd one out."""
    body = "if os.environ['RANK'] == '2':\n    time.sleep(600)\nelse:\n    wait()"
    done = watched(tmp_path, body, ranks=3)
    assert done.code == 3, done
    host = os.uname().nodename
    assert f"ranks 0, 1 on {host}: waits at train.py:4, called at train.py:" in done.err
    assert f"rank 2 on {host}: waits at train.py:9" in done.err
    assert "Odd one out: rank 2 on" in done.err and "under `if os.environ['RANK'] ==" in done.err


def test_a_rank_that_hangs_after_its_programs_end(tmp_path):
    body = (
        "class Late:\n    def __del__(self, sleep=time.sleep):\n        sleep(600)\nlate = Late()"
    )
    done = watched(tmp_path, body)
    assert done.code == 3 and f"rank 0 on {os.uname().nodename}: waits at" in done.err, done


@pytest.mark.full
def test_spawned_ranks_set_their_number_themselves(tmp_path):
    """As mp.spawn's do: the system does not show it."""
    body = "if __name__ == '__main__':\n    get = multiprocessing.get_context('spawn').Process\n"
    body += "    jobs = [get(target=spawned, args=(k,)) for k in range(2)]\n"
    body += "    [job.start() for job in jobs]\n    [job.join() for job in jobs]"
    (tmp_path / "train.py").write_text(PROGRAM + body)
    env = environment(1, PYTHONPATH=str(ROOT))
    done = run([*WATCH, sys.executable, "train.py"], 100, env, cwd=tmp_path)
    assert done.code == 3 and "ranks 0, 1 on" in done.err, done


WAYS = {
    "os.kill(os.getpid(), signal.SIGSTOP)": "stopped by a signal, last seen at train.py:",
    "sys.exit()": "ended: its program ended",
    "raise ValueError('a broken image')": "ended: ValueError: a broken image",
    "os._exit(0)": "killed, or ended by os._exit",
    "ctypes.PyDLL(None).sleep(600)": "waits at train.py:16\n",  # no thread of Python's can say so
}


@pytest.mark.full
def test_what_has_become_of_each_rank(tmp_path):
    """One waits for five others, each of which does not come in its way."""
    body = "time.sleep(2)\nrank = int(os.environ['RANK'])\n"
    lines = [f"if rank == {k + 1}: {way}" for k, way in enumerate(WAYS)]
    lines[-1] = lines[-1].replace(": ", ":\n    ")
    done = watched(tmp_path, "\n".join([body, *lines, "wait()"]), ranks=6)
    assert done.code == 3, done
    for k, said in enumerate(WAYS.values(), 1):
        assert f"rank {k} on {os.uname().nodename}: {said}" in done.err, done.err
    assert "Odd one out: rank 4 on" in done.err  # a dead one first


@pytest.mark.full
@pytest.mark.parametrize(
    "body",
    [
        "end = time.time() + 9\nwhile time.time() < end: pass",
        "for k in range(9):\n    print(k, flush=True)\n    time.sleep(1)",
        "for k in range(3):\n    time.sleep(2)\n    time.sleep(1)",
        # The time of children that ended counts, too.
        "burn = 'import time\\nwhile time.process_time() < 1: pass'\n"
        "os.system(f'for k in 1 2 3 4 5 6 7 8 9; do {sys.executable} -c \"{burn}\"; done')",
    ],
    ids=["computes", "prints", "moves", "children"],
)
def test_no_hang_is_reported(tmp_path, body):
    done = watched(tmp_path, body)
    assert done.code == 0 and "watch" not in done.err, done


@pytest.mark.full
def test_without_a_folder_the_other_machines_are_not_judged(tmp_path):
    """Nor is the command ended: they may be busy."""
    (tmp_path / "train.py").write_text(f"import time\ntime.sleep({AFTER + 5})\nprint('done')")
    env = environment(1, PYTHONPATH=str(ROOT), RANK="1", WORLD_SIZE="4")
    done = run([*WATCH, sys.executable, "train.py"], 60, env, cwd=tmp_path)
    assert (done.code, done.out) == (0, "done\n") and "train.py:2" in done.err, done
    assert "Ranks 0, 2, 3 are on other machines: --folder" in done.err


@pytest.mark.full
@pytest.mark.parametrize("who", ["watcher", "launcher"])
def test_no_rank_outlives_the_run(who, tmp_path):
    """If the watcher gets SIGKILL, or the command that started the ranks."""
    text = "import os, time\nopen('pid', 'w').write(f'{os.getppid()} {os.getpid()}')\n"
    (tmp_path / "train.py").write_text(f"{text}os.rename('pid', 'ready')\ntime.sleep(600)")
    trap = "trap 'kill $!; exit' TERM; "  # as a launcher does
    shell = f"{trap}RANK=0 WORLD_SIZE=1 {sys.executable} train.py & wait"
    env = environment(1, PYTHONPATH=str(ROOT))
    words = [*map(str, WATCH), "sh", "-c", shell]
    job = subprocess.Popen(words, cwd=tmp_path, env=env)
    wait_until((tmp_path / "ready").exists, 60)
    time.sleep(2)  # the rank's first note
    launcher, rank = map(int, (tmp_path / "ready").read_text().split())
    os.kill(launcher if who == "launcher" else job.pid, signal.SIGKILL)
    assert job.wait(30) == (128 + 9 if who == "launcher" else -9)
    wait_until(lambda: not psutil.pid_exists(rank), 30)


class Gpu:
    """What the watcher asks torch.cuda: the allocations so far, one more in each second."""

    def __init__(self, steps: int):
        self.steps, self.begun = steps, time.monotonic()

    def is_initialized(self) -> bool:
        return True

    def memory_stats(self) -> dict:
        count = min(int(time.monotonic() - self.begun), self.steps)
        return {"allocation.all.allocated": count}


@pytest.mark.full
@pytest.mark.parametrize(
    ("gpu", "code"), [("", 0), ("Gpu(0)", 3), ("Gpu(99)", 0)], ids=["no-gpu", "waits", "steps"]
)
def test_a_rank_on_a_gpu(gpu, code, tmp_path):
    """It keeps a core busy while it waits, in one call of C. The GPU is pretended."""
    body = f"{inspect.getsource(Gpu)}\nimport hashlib\n"
    body += f"sys.modules['torch.cuda'] = {gpu}\n" if gpu else ""
    body += "def work(rounds): hashlib.pbkdf2_hmac('sha256', b'a', b'b', rounds)\n"
    body += "begun = time.process_time()\nwork(500_000)\n"
    body += f"work(int(500_000 * {AFTER + 5} / (time.process_time() - begun)))"
    done = watched(tmp_path, body)
    assert done.code == code and ("waits at train.py:" in done.err) == bool(code), done


@pytest.mark.full
def test_it_goes_on_watching(tmp_path):
    """Without --end, and after a report."""
    (tmp_path / "train.py").write_text(f"import time\ntime.sleep({AFTER + 6})\nprint('done')")
    words = [each for each in WATCH if each != "--end"]
    env = environment(1, PYTHONPATH=str(ROOT), RANK="0", WORLD_SIZE="1")
    done = run([*words, sys.executable, "train.py"], 60, env, cwd=tmp_path)
    assert (done.code, done.out) == (0, "done\n") and "waits at train.py:2" in done.err, done


@pytest.mark.full
def test_another_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    env = environment(1, PYTHONPATH=f"{tmp_path}:{ROOT}")
    done = run([*WATCH, sys.executable, "-c", "print('program')"], 60, env, cwd=tmp_path)
    # python -m bench runs it, too
    assert sorted(done.out.splitlines()) == ["mine", "mine", "program"], done


# The report, of made-up ranks


def made_up(rank: int, at: str, how: str = "waits", **more) -> dict:
    lines = [{"at": at, "inside": more.pop("inside", [])}]
    known = {"rank": rank, "host": f"host{'ab'[rank // 4]}", "how": how, "lines": lines}
    return known | {"in": "all_reduce (torch/distributed/distributed_c10d.py)"} | more


ALIKE = [made_up(k, "a.py:1") for k in range(4)]


@pytest.mark.parametrize(
    ("ranks", "missing", "said"),
    [
        (
            [*ALIKE, made_up(4, "a.py:1"), made_up(5, "a.py:2"), made_up(6, "a.py:1")],
            [],
            "rank 5 on hostb: not where the others wait.",
        ),
        (ALIKE, [4, 5, 6, 7], "ranks 4-7: no watcher saw"),
        (ALIKE, [], "all ranks wait in the same line"),
        ([ALIKE[0], made_up(1, "a.py:2")], [], "the ranks wait in different lines"),
        ([ALIKE[0], made_up(4, "a.py:2", "lost")], [], "rank 4 on hostb: dead"),
    ],
)
def test_who_is_the_odd_one(ranks, missing, said):
    text = report(ranks, missing, 60)
    assert f"Odd one out: {said}" in text
    if len(ranks) == 7:  # those that do the same are told together
        assert "  ranks 0-3 on hosta and ranks 4, 6 on hostb: waits at a.py:1 in all_" in text


def test_the_pages_are_there():
    for page in PAGES.values():
        path, _, anchor = page.partition("#")
        heads = re.findall(r"^#+ (.+)", (ROOT / path).read_text(), re.M)
        slugs = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]
        assert anchor in ["", *slugs], page


# Two hosts


def line_of(text: str) -> str:
    """A line of the program, as a report names it."""
    lines = (ROOT / HANGS).read_text().splitlines()
    (number,) = [k for k, line in enumerate(lines, 1) if text in line]
    return f"{HANGS}:{number}"


HANGS = "tests/wrong_programs/hangs.py"
# Of each way to hang: what the report must say, with the rank, its host and the line; its page.
SAID = {
    "condition": (
        "Odd one out: rank 0 on hosta: {dist.all_reduce} is under `if way == 'condition'",
        "rank 1 on hostb: waits at {ddp_model(} in DistributedDataParallel.forward",
        "docs/diffs/mnmc_ddp_launch.md#10-collectives-under-if-rank--0",
    ),
    "uneven": (
        "rank 0 on hosta: waits at {ddp_model(} in DistributedDataParallel.forward",
        "rank 1 on hostb: waits at {dist.barrier()  # at the end} in barrier",
        "Odd one out: rank 1 on hostb: has left the loop at hangs.py:",
        "docs/diffs/uneven_inputs.md",
    ),
    "dead": (
        "rank 0 on hosta: waits at {dist.init_process_group} in init_process_group",
        "Odd one out: rank 1 on hostb: dead",
        "docs/howto/troubleshooting.md#exitcode--9",
    ),
    "interface": (
        "{dist.init_process_group} in init_process_group",
        "Odd one out: all wait while they connect: check the network by bench doctor",
        "docs/howto/several-machines.md#network-interfaces",
    ),
    "exception": (
        "rank 0 on hosta: waits at {ddp_model(} in DistributedDataParallel.forward",
        "Odd one out: rank 1 on hostb: {dist.barrier()  # so} is in an exception handler",
        "docs/howto/hangs.md",
    ),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Each way to hang, all at once: the exit codes of both watchers, what they printed, and the
    report that one of them wrote.
    """
    if reason := hosts.lacking():
        lacking(reason)
    with hosts.lab() as lab:
        jobs, found = {}, {}
        for way in SAID:
            folder, port = tmp_path_factory.mktemp(way), free_port()
            for k, host in enumerate(lab.hosts()):
                env = {"RANK": str(k), "WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1"}
                env |= {"MASTER_PORT": str(port)}
                env |= {"GLOO_SOCKET_IFNAME": "docker0"} if way == "interface" else {}
                command = f"exec {sys.executable} -m bench watch --after 12 --end --folder {folder}"
                command += f" -- {sys.executable} {HANGS} {way}"
                jobs[way, host] = folder, lab.start(host, command, env)
        for (way, host), (folder, job) in jobs.items():
            done = lab.finish(host, job, 200)
            codes, outs, _ = found.get(way, ([], "", ""))
            text = file.read_text() if (file := folder / "hang.txt").exists() else ""
            found[way] = [*codes, done.code], outs + done.out, text
    return found


@pytest.mark.full
@pytest.mark.parametrize("way", SAID)
def test_a_hang_of_two_hosts(reports, way):
    """The report names the rank, its host and its line, and the page about it."""
    codes, printed, report = reports[way]
    for text in SAID[way]:
        text = re.sub(r"\{(.+)\}", lambda found: line_of(found[1]), text)
        assert text in report and text in printed, (text, printed)
    # A dead rank has ended its command, and one that cannot connect gives up
    assert codes in {"dead": [[3, 137]], "interface": [[3, 3], [1, 3], [3, 1]]}.get(way, [[3, 3]])
