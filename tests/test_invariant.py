"""techniques/invariant.py: one training, to the last bit, on 1, 2 and 4 processes."""

from functools import cache

import pytest
from real import FLAGS, numbers, oracle, output
from support import ORACLE, checkpoint, forked, records, refused, succeeded, torchrun, world

SCRIPT = "techniques/invariant.py"
SHORT = [*FLAGS, "--epochs", 1]  # three steps
# BatchNorm and dropout, few weights and pixels: a step takes little. Twelve steps an epoch.
LONG = ["--arch", "mobilenet_v3_small", "--image-size", 16, "--batch-size", 16, "--epochs", 3]


def digests(flags: list) -> list[tuple]:
    """What a run has logged of each step and each evaluation, the digest last."""
    lines = records(flags[flags.index("--log-json") + 1])
    kept = [line["digest"] for line in lines if line["event"] in ("train", "eval")]
    return [(*line, found) for line, found in zip(numbers(flags), kept, strict=True)]


def trained(size: int, *more, name: str = "", **keywords) -> list[tuple]:
    """The same, of so many processes."""
    flags = [*SHORT, *more, *output(f"invariant-{size}{name}")]
    succeeded(*world(size, SCRIPT, *flags, **keywords))
    return digests(flags)


@cache
def one() -> tuple[list[tuple], list[tuple], dict]:
    """A single process with 4 shards: its digests, its numbers, its weights."""
    flags = [*SHORT, *output("invariant-one")]
    weights = flags[-1].with_suffix(".pt")
    succeeded(*world(1, SCRIPT, *flags, "--save", weights))
    return digests(flags), numbers(flags), checkpoint(weights)


def test_it_is_what_four_data_parallel_processes_compute():
    """By independent code: losses, hits, evaluations and weights, BatchNorm's averages too."""
    weights = output("invariant-oracle")[-1].with_suffix(".pt")
    flags = [*SHORT, *output("invariant-oracle"), "--parts", 4, "--save", weights]
    succeeded(forked(ORACLE, *flags))
    _, found, mine = one()
    assert found == numbers(flags) and len(found) == 4
    right = checkpoint(weights)
    assert mine.keys() == right.keys()
    assert all(value.equal(right[name]) for name, value in mine.items())


@pytest.mark.parametrize("size", [2, 4])
def test_the_number_of_processes_does_not_matter(size):
    """Every digest, loss and evaluation of one process's."""
    assert trained(size) == one()[0]
    assert len({line[-1] for line in one()[0]}) == 3  # each step's is another


def test_so_does_not_how_it_is_started():
    """torchrun itself, and more threads than one in its environment."""
    flags = [*SHORT, *output("invariant-torchrun")]
    succeeded(torchrun(2, SCRIPT, *flags, OMP_NUM_THREADS=2))
    assert digests(flags) == one()[0]


def test_two_shards_are_the_ladders_two_processes():
    """Whatever launcher those have: they are the oracle's to the last bit, by test_equality.py."""
    flags = [*SHORT, "--shards", 2, *output("invariant-ladder")]
    succeeded(*world(1, SCRIPT, *flags))
    assert numbers(flags) == oracle(2)[:4]


def test_many_steps_with_dropout_on_1_2_and_4_processes():
    """Each digest: what is off by one bit anywhere grows, and would show."""
    found = trained(1, *LONG, name="long")
    assert len({line[-1] for line in found}) == 36 and len(found) == 36 + 3
    assert trained(2, *LONG, name="long") == found
    assert trained(4, *LONG, name="long") == found


def test_three_processes_with_six_shards():
    """And images of another size than the data's, which are scaled by the batch."""
    more = ["--shards", 6, "--batch-size", 48, "--image-size", 24]
    assert trained(3, *more, name="six") == trained(1, *more, name="six")


def test_another_order_shows():
    """The digests can fail: a process's own shards added up first are other bits from step 1 on."""
    disordered = trained(2, "--max-steps", 1, prepare=reduced)
    assert disordered[0][:-1] == one()[0][0][:-1]  # the loss is that of before the step
    assert disordered[0][-1] != one()[0][0][-1]


def reduced() -> None:
    """Runs in the script's process: what each process has sent is added up where it is sent."""
    import torch.distributed as dist

    plain = dist.all_to_all_single

    def disordered(received, sent):
        sent[:, 0] += sent[:, 1]
        sent[:, 1] = 0
        plain(received, sent)

    dist.all_to_all_single = disordered


def count_bytes() -> None:
    """Runs in the script's process: at the end it prints what its sockets have sent."""
    import os
    import socket
    from contextlib import suppress

    import torch.distributed as dist

    plain = dist.destroy_process_group

    def counted():
        dist.barrier()
        total = 0
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
                if found.type == socket.SOCK_STREAM and found.family != socket.AF_UNIX:
                    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                    total += int.from_bytes(info[200:208], "little")  # tcpi_bytes_sent
        print(f"sent {total}", flush=True)
        dist.barrier()  # who ends closes its sockets, and then the others' Gloo closes theirs
        plain()

    dist.destroy_process_group = counted


def sent(script: str, size: int, *more) -> float:
    """The bytes that a process sends in a step, the mean of all: four steps less two."""
    totals = []
    for steps in (2, 4):
        flags = [*FLAGS, "--log-every", 50, "--max-steps", steps, "--batch-size", 16]
        flags += [*more, *output("sent")]
        ranks = world(size, script, *flags, prepare=count_bytes)
        succeeded(*ranks)
        totals.append(sum(int(rank.out.split("sent ")[1]) for rank in ranks))
    return (totals[1] - totals[0]) / 2 / size


@pytest.mark.parametrize("size, shards", [(2, 4), (4, 4)])
def test_traffic(size, shards):
    """4 N (W - 1) / W (S / W + 1) bytes a step, and little else; N: that of resnet18."""
    count = 11_181_642
    expected = 4 * count * (size - 1) / size * (shards / size + 1)
    assert sent(SCRIPT, size, "--shards", shards) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    "size, more, words",
    [
        (3, [], ["--shards 4", "3 processes"]),
        (1, ["--shards", 5], ["--batch-size 64", "5 --shards"]),
        (2, ["--shards", 64], ["--batch-size 64", "two images"]),
        (1, ["--shards", 0], ["--shards", "0"]),
        (1, ["--threads", 0], ["--threads", "0"]),
    ],
)
def test_what_does_not_fit_is_one_line(size, more, words):
    flags = [*FLAGS, *more, *output("invariant-unfit")]
    for rank in world(size, SCRIPT, *flags):
        refused(rank, *words)
    assert not flags[-1].exists()
