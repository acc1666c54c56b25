"""techniques/elastic.py: killed processes are replaced, and the numbers are those of no kill."""

import os
import signal

import psutil
import pytest
from real import FLAGS, compare, numbers, oracle, output
from support import checkpoint, records, refused, restarting, started, succeeded, wait_for, world

SCRIPT = "techniques/elastic.py"
# Few weights, BatchNorm and dropout; six steps an epoch.
SMALL = [*FLAGS, "--arch", "mobilenet_v3_small", "--batch-size", 32]
STEPS = 12
BATCH = {2: [], 3: ["--batch-size", 48]}


def logged(flags: list) -> dict:
    """The loss and the accuracy of each step and each evaluation; what was done again agrees.

    But an evaluation within an epoch, where --max-steps has ended a run.
    """
    found = {}
    for what, *values in numbers(flags):
        if what[0] == "eval":
            found.pop(what, None)
        assert found.setdefault(what, values) == values, what
    return found


def train(size: int, flags: list, *more) -> None:
    succeeded(*world(size, SCRIPT, *flags, *more))


@pytest.fixture(scope="module")
def whole() -> dict:
    """By so many processes, what nobody interrupts: numbers."""
    found = {}
    for size in (2, 3):
        flags = [*SMALL, *BATCH[size], *output(f"elastic-whole{size}")]
        train(size, flags)
        found[size] = logged(flags)
    assert len(found[2]) == STEPS + 2
    return found


def test_it_trains_what_its_parent_trains():
    """To the last bit, and without snapshots, too; the weights are the model's."""
    flags = [*FLAGS, *output("elastic-plain")]
    weights = flags[-1].with_suffix(".pt")
    train(2, flags, "--save", weights)
    compare(numbers(flags), oracle(2), tolerance=0)
    checkpoint(weights)


@pytest.mark.parametrize("size, stops", [(2, [2, 6, 7]), (3, [3])])
def test_it_goes_on_bit_for_bit(size, stops, whole, tmp_path):
    """From within an epoch, and from its end; dropout and BatchNorm's averages, too."""
    flags = [*SMALL, *BATCH[size], *output(f"elastic-stops{size}")]
    flags += ["--snapshot", tmp_path / "snapshot.pt"]
    for stop in stops:
        train(size, flags, "--snapshot-every", stop, "--max-steps", stop)
    train(size, flags)
    assert logged(flags) == whole[size]
    starts = [line["resumed"] for line in records(flags[flags.index("--log-json") + 1], "start")]
    assert starts == [0, *stops]


def test_a_finished_run_has_nothing_to_do(whole, tmp_path):
    """But to evaluate; and --max-steps that are done are not done again."""
    flags = [*SMALL, *output("elastic-done"), "--snapshot", tmp_path / "s.pt", "--max-steps", 3]
    flags += ["--snapshot-every", 3]
    train(2, flags)
    train(2, flags)
    train(2, [*flags, "--max-steps", 2])
    steps = [line["step"] for line in records(flags[flags.index("--log-json") + 1], "train")]
    assert steps == [1, 2, 3]


def kill_one(job, which: int) -> None:
    """SIGKILL for a process that torchrun has started."""
    os.kill(sorted(child.pid for child in psutil.Process(job.pid).children())[which], 9)


def test_torchrun_replaces_killed_processes(whole, tmp_path):
    """Process 1, then process 0: each time all begin anew, and end with the same numbers."""
    flags = [*SMALL, *output("elastic-killed"), "--snapshot", tmp_path / "snapshot.pt"]
    log = flags[flags.index("--log-json") + 1]
    job = restarting(3, SCRIPT, *flags, "--snapshot-every", 1)
    try:
        for kill, (which, step) in enumerate([(1, 2), (0, 7)]):
            wait_for(log, step, kill + 1, lambda: job.poll() is None)
            kill_one(job, which)
        assert job.wait(180) == 0
    finally:
        job.terminate()
        job.wait()
    begun = [line["resumed"] for line in records(log, "start")]
    assert len(begun) == 3 and begun[0] == 0 and begun[1] >= 1 and begun[2] >= 6
    assert logged(flags) == whole[2]


def die_while_writing() -> None:
    """Runs in the script's process: the third snapshot is left unfinished."""
    import torch

    plain, left = torch.save, [3]

    def cut_off(what, path):
        left[0] -= 1
        if left[0]:
            return plain(what, path)
        path.write_bytes(b"PK")
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = cut_off


def test_a_snapshot_is_written_whole_or_not_at_all(whole, tmp_path):
    flags = [*SMALL, *output("elastic-cut"), "--snapshot", tmp_path / "snapshot.pt"]
    flags += ["--snapshot-every", 1]
    first, other = started(2, SCRIPT, *flags, prepare=die_while_writing)
    assert first.finish(120).code == -signal.SIGKILL and other.finish(120).code
    train(2, flags)
    starts = records(flags[flags.index("--log-json") + 1], "start")
    assert [line["resumed"] for line in starts] == [0, 2]
    assert logged(flags) == whole[2]


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """One of a first step."""
    path = tmp_path_factory.mktemp("elastic") / "snapshot.pt"
    flags = [*SMALL, *output("elastic-begun"), "--snapshot", path, "--snapshot-every", 1]
    train(1, flags, "--max-steps", 1)
    return path


@pytest.mark.parametrize(
    "more, words",
    [
        (["--lr", 0.5], ["lr 0.005", "0.5"]),
        (["--arch", "resnet18"], ["arch mobilenet_v3_small"]),
        (["--seed", 3], ["seed 0"]),
    ],
)
def test_another_runs_snapshot_is_refused(more, words, snapshot):
    flags = [*SMALL, *output("elastic-other"), "--snapshot", snapshot, *more]
    for rank in world(2, SCRIPT, *flags):
        refused(rank, f"--snapshot {snapshot}", *words)
    assert not flags[flags.index("--log-json") + 1].exists()


def test_fewer_epochs_than_the_snapshot_has_are_refused(tmp_path):
    """Else nothing would be evaluated, and nothing saved."""
    flags = [*SMALL, "--batch-size", 192, *output("elastic-epochs")]  # a step an epoch
    flags += ["--snapshot", tmp_path / "s.pt"]
    train(1, flags)
    for rank in world(1, SCRIPT, *flags, "--epochs", 1):
        refused(rank, "--epochs 1", "epoch 2")


@pytest.mark.parametrize("how", ["damaged", "empty", "weights"])
def test_what_is_no_snapshot_is_refused(how, snapshot, tmp_path):
    import torch

    path, whole = tmp_path / "snapshot.pt", snapshot.read_bytes()
    path.write_bytes({"damaged": whole[: len(whole) // 2], "empty": b""}.get(how, whole))
    if how == "weights":
        torch.save(torch.load(snapshot)["model"], path)
    flags = [*SMALL, *output("elastic-none"), "--snapshot", path]
    for rank in world(2, SCRIPT, *flags):
        refused(rank, f"--snapshot {path}", "not a snapshot")


@pytest.mark.parametrize("flag, value", [("--snapshot", "/nowhere/s"), ("--snapshot-every", 0)])
def test_bad_input_is_one_line(flag, value):
    for rank in world(1, SCRIPT, *SMALL, *output("elastic-bad"), flag, value):
        refused(rank, flag, str(value))


def test_a_start_by_hand():
    """No address to meet at: the variable is named."""
    from support import forked

    env = dict.fromkeys(["RANK", "LOCAL_RANK"], 0) | dict.fromkeys(
        ["WORLD_SIZE", "LOCAL_WORLD_SIZE"], 1
    )
    refused(forked(SCRIPT, *SMALL, *output("elastic-hand"), **env), "MASTER_ADDR", "torchrun")
