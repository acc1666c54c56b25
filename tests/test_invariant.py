"""techniques/invariant.py: one training, to the last bit, on 1, 2, 3 and 4 processes."""

import pytest
from real import FLAGS, numbers, output
from support import ORACLE, checkpoint, forked, full, records, refused, succeeded, torchrun, world

SCRIPT = "techniques/invariant.py"
ARCH = "shufflenet_v2_x0_5"
COUNT = 352_042  # its weights, with 10 classes
SHORT = [*FLAGS, "--arch", ARCH, "--epochs", 1]  # three steps
# BatchNorm and dropout, few weights and pixels: a step takes little. Twelve steps an epoch.
LONG = ["--arch", "mobilenet_v3_small", "--image-size", 16, "--batch-size", 16, "--epochs", 2]


def digests(flags: list) -> list[tuple]:
    """What a run has logged of each step and each evaluation, the digest last."""
    lines = records(flags[flags.index("--log-json") + 1])
    kept = [line["digest"] for line in lines if line["event"] in ("train", "eval")]
    return [(*line, found) for line, found in zip(numbers(flags), kept, strict=True)]


def trained(size: int, *more, name: str = "", **keywords) -> list[tuple]:
    """The same, of this many processes."""
    flags = [*SHORT, *more, *output(f"invariant-{size}{name}")]
    succeeded(*world(size, SCRIPT, *flags, **keywords))
    return digests(flags)


def test_it_is_what_four_data_parallel_processes_compute():
    """By independent code: losses, accuracies, evaluations, weights and BatchNorm's statistics."""
    both = []
    for start, script, own in ((world, SCRIPT, []), (forked, ORACLE, ["--parts", 4])):
        flags = [*SHORT, *own, *output("invariant-oracle")]
        weights = flags[-1].with_suffix(".pt")
        flags += ["--save", weights]
        succeeded(*(start(1, script, *flags) if start is world else [start(script, *flags)]))
        both.append((numbers(flags), checkpoint(weights, arch=ARCH)))
    (found, mine), (right, theirs) = both
    assert found == right and len(found) == 4
    assert mine.keys() == theirs.keys()
    assert all(value.equal(theirs[name]) for name, value in mine.items())


@pytest.mark.full
def test_the_number_of_processes_and_their_launcher_do_not_matter():
    """Each digest of 24 steps with dropout: one wrong bit anywhere grows, and would show.

    Once by torchrun itself, and with more than one thread in its environment.
    """
    found = trained(1, *LONG, name="long")
    assert len({line[-1] for line in found}) == 24 and len(found) == 24 + 2
    assert trained(4, *LONG, name="long") == found
    flags = [*SHORT, *LONG, *output("invariant-torchrun")]
    succeeded(torchrun(2, SCRIPT, *flags, OMP_NUM_THREADS=2))
    assert digests(flags) == found


@pytest.mark.full
def test_three_processes_with_six_shards():
    """And images of another size than the data's: each shard is resized by itself."""
    more = ["--shards", 6, "--batch-size", 48, "--image-size", 24]
    assert trained(3, *more, name="six") == trained(1, *more, name="six")


def reduced() -> None:
    """Runs in the script's process: a rank adds up its own shards before it sends them."""
    import torch.distributed as dist

    plain = dist.all_to_all_single

    def disordered(received, sent):
        sent[:, 0] += sent[:, 1]
        sent[:, 1] = 0
        plain(received, sent)

    dist.all_to_all_single = disordered


def test_another_order_shows():
    """The digests can fail: another order of the sum gives other bits from step 1 on."""
    (right, *_), (found, *_) = trained(1), trained(2, prepare=reduced)
    assert found[:-1] == right[:-1]  # the loss is that of before the step
    assert found[-1] != right[-1]


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
                    sent, again = (int.from_bytes(info[k : k + 8], "little") for k in (200, 208))
                    total += sent - again  # tcpi_bytes_sent, tcpi_bytes_retrans
        print(f"sent {total}", flush=True)
        dist.barrier()  # a process that ends closes its sockets, and then the others' Gloo does
        plain()

    dist.destroy_process_group = counted


def sent(size: int, steps: int) -> int:
    """The bytes that all ranks send in this many steps."""
    flags = [*SHORT, "--log-every", 50, "--max-steps", steps, "--batch-size", 16]
    ranks = world(size, SCRIPT, *flags, *output("sent"), prepare=count_bytes)
    succeeded(*ranks)
    return sum(int(rank.out.split("sent ")[1]) for rank in ranks)


@pytest.mark.parametrize("size", [2, *full(4)])
def test_traffic(size):
    """4 N (W - 1) / W (S / W + 1) bytes per step and rank, and little else."""
    expected = 4 * COUNT * (size - 1) / size * (4 / size + 1)
    assert (sent(size, 4) - sent(size, 2)) / 2 / size == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(
    "size, shards, words", [(3, 4, "multiple of 3"), (1, 5, "divide --batch-size 64")]
)
def test_shards_that_do_not_fit_are_one_line(size, shards, words):
    for rank in world(size, SCRIPT, *SHORT, "--shards", shards):
        refused(rank, f"--shards {shards}", words)
