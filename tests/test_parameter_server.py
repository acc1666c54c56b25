"""techniques/parameter_server.py: the oracle's numbers, and the bytes through the server."""

from functools import partial

import pytest
from real import EPOCH, STEPS, epoch_oracle, short, train
from support import ORACLE, forked, records, refused, succeeded, world

from bench.lab.formulas import all_reduced, through_server

SCRIPT = "techniques/parameter_server.py"
WEIGHTS = 4 * 352_042  # bytes of shufflenet_v2_x0_5's parameters, with 10 classes


def test_two_workers_train_what_the_oracle_trains():
    """Bit for bit, over a server that trains nothing."""
    run = train(partial(world, 3), SCRIPT, *EPOCH)
    assert len(run.losses) == STEPS
    run.equals(epoch_oracle(2))


@pytest.mark.full
def test_one_asynchronous_worker_trains_what_one_process_trains():
    """Its gradients are never stale: bit for bit SGD."""
    run = train(partial(world, 2), SCRIPT, *short(), "--updates", "async")
    assert len(run.losses) == 6
    run.equals(train(forked, ORACLE, *short()))


def counted() -> None:
    """Runs in the script's process: prints the bytes of floats that it sends and receives, and the
    number of updates.
    """
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    found = {"sent": 0, "received": 0, "updates": 0}
    send, recv, end = dist.send, dist.recv, dist.destroy_process_group

    def counting(call, key):
        def counted(tensor, *arguments, **named):
            found[key] += tensor.nbytes
            return call(tensor, *arguments, **named)

        return counted

    def step(*_):
        found["updates"] += 1

    def destroy():
        print("counted", *found.values())
        end()

    dist.send, dist.recv = counting(send, "sent"), counting(recv, "received")
    dist.destroy_process_group = destroy
    register_optimizer_step_post_hook(step)


@pytest.mark.parametrize("updates", ["sync", "async"])
def test_all_bytes_pass_through_the_server(updates, tmp_path):
    """Gradients in and weights out, for each worker and step. An asynchronous server makes as many
    updates as there are gradients; a notice before each one has 4 bytes. All ranks evaluate the
    server's weights, each test image once.
    """
    log = tmp_path / "log.jsonl"
    ranks = world(3, SCRIPT, *short(), "--updates", updates, "--log-json", log, prepare=counted)
    succeeded(*ranks)
    lines = [line for rank in ranks for line in rank.out.splitlines() if "counted" in line]
    found = [[int(word) for word in line.split()[1:]] for line in lines]
    steps, workers = 6, 2
    notices = 4 * steps if updates == "async" else 0
    each = steps * WEIGHTS
    server = [workers * each, workers * (each + notices), steps * workers ** (updates == "async")]
    assert found == [server, *[[each + notices, each, 0]] * workers]
    assert server[0] + server[1] == steps * through_server(WEIGHTS, workers) + workers * notices
    assert through_server(WEIGHTS, workers) == 4 * all_reduced(WEIGHTS, workers)
    ages = [record.get("staleness", {}) for record in records(log, "train")]
    assert sum(sum(each.values()) for each in ages) == (server[2] if notices else 0)
    (first, second) = records(log, "eval")
    assert first["images"] == second["images"] == 101


def test_staleness_is_counted_from_outside(tmp_path, monkeypatch):
    """By the order in which workers are received from. An evaluation gives all the same weights."""
    import torch.distributed as dist

    from bench.run.probe import Probe, watch_arrivals

    senders = iter([1, 2, 1, 1, 2, 2, 1])
    monkeypatch.setattr(dist, "recv", lambda tensor, src=None: src or next(senders))
    probe = Probe(log_json=tmp_path / "log.jsonl")
    watch_arrivals(probe)
    for _ in range(6):
        dist.recv(None, src=dist.recv(None))
    assert probe.staleness == {0: 3, 1: 2, 2: 1}
    probe.record("eval", {})
    dist.recv(None)
    assert probe.staleness == {0: 4, 1: 2, 2: 1}


def test_a_server_alone_is_refused():
    refused(*world(1, SCRIPT, *short()), "--nproc-per-node", "server")
