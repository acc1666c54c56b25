"""`bench effects`, and the parts of pages made of it: what a step's time does not show."""

import json
import sys

import pytest
from real import lacking
from support import PROBE, records, succeeded, world

from bench import process
from bench.cases import DDP
from bench.experiments import effects
from mistakes.trials import ALONE, no_own_network


@pytest.mark.full
def test_a_run_is_kept_with_its_machine(tmp_path, monkeypatch):
    """The ring, by torchrun itself."""
    run = effects.Job("x2", "bench/experiments/ring.py", 2)
    monkeypatch.setattr(effects, "EFFECTS", {"ring": lambda: effects.Effect([run], times=1)})
    assert effects.main(["--out", str(tmp_path / "new")]) == 0
    setting, *lines = map(json.loads, (tmp_path / "new" / "ring.jsonl").read_text().splitlines())
    assert setting["environment"]["cores"] > 0
    assert [line["event"] for line in lines] == ["start", "check", "end"]
    assert all((r["run"], r["processes"], r["number"]) == ("x2", 2, 0) for r in lines)
    assert lines[1]["ring_seconds"] > 0 and "log_json" not in lines[0]


@pytest.mark.full
def test_all_reduces_and_their_bytes_are_counted_from_outside(tmp_path):
    """local_sgd.py averages the weights once in these two steps, in fp32; the averages of three
    sums do not count.
    """
    from torchvision.models import shufflenet_v2_x0_5

    size = 4 * sum(x.numel() for x in shufflenet_v2_x0_5(num_classes=10).parameters())
    flags = [*effects.EMBEDDED, "--arch", "shufflenet_v2_x0_5", "--batch-size", 16]
    flags += ["--log-every", 2, "--max-steps", 2, "--sync-every", 2]
    log = tmp_path / "log.jsonl"
    succeeded(*world(2, "techniques/local_sgd.py", *flags, "--log-json", log))
    (train,) = records(log, "train")
    assert train["all_reduce_bytes"] == size and train["all_reduces"] >= 1


@pytest.mark.full
def test_what_two_ranks_send_is_counted_from_outside(tmp_path):
    """In a step of DDP, each rank sends half of the gradients twice, and rank 0 the buffers once.

    In a network of their own: nothing else is counted. 2 percent are for headers and the Meter.
    """
    from torchvision.models import resnet18

    if reason := no_own_network():
        lacking(reason)
    log, model = tmp_path / "log.jsonl", resnet18(num_classes=10)
    weights = sum(weight.nbytes for weight in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, PROBE, DDP]
    flags = [*effects.EMBEDDED, "--batch-size", 8, "--max-steps", 4, "--log-every", 1]
    command = [*ALONE, *launch, *flags, "--log-json", log]
    succeeded(process.run(command, 300, process.environment(1)))
    sent = [line["loopback_bytes"] for line in records(log, "train")]
    assert sent[1:] == pytest.approx(3 * [2 * weights + buffers], rel=0.02)


def test_a_run_that_fails_leaves_no_file(tmp_path, monkeypatch, capsys):
    """Its reason is a line. The first run does not fail."""
    made = [[{"event": "start"}]]

    def launch(*_):
        if not made:
            raise process.Failed("exit code 1: planted")
        return made.pop()

    monkeypatch.setattr(effects, "launch", launch)
    assert effects.main(["ring", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("bench: exit code 1: planted\n")
    assert not [*tmp_path.iterdir()]
