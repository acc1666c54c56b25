"""techniques/distributed_eval.py: the exact numbers, and two that look like them."""

import pytest
from real import FLAGS, TEST_IMAGES, data, doubles, output
from support import checkpoint, full, records, succeeded, world, write_idx

SCRIPT = "techniques/distributed_eval.py"
ARCH = "shufflenet_v2_x0_5"
SMALL = [*FLAGS, "--arch", ARCH, "--epochs", 1, "--log-every", 50]
COUNTED = ("loss", "accuracy", "top5")


def independent(weights, folder):
    """Of each test image, in one pass of one process: loss, correct, correct in 5 (images, 3)."""
    import torch
    from torchvision.models import get_model

    raw = folder / "FashionMNIST" / "raw"
    pixels = (raw / "t10k-images-idx3-ubyte").read_bytes()[16:]
    labels = torch.tensor(list((raw / "t10k-labels-idx1-ubyte").read_bytes()[8:]))
    images = torch.full((len(labels), 3, 32, 32), -2.0, dtype=torch.float64)  # black
    images[:, :, 2:30, 2:30] = (torch.tensor([*pixels]).view(-1, 1, 28, 28).double() - 128) / 64
    net = get_model(ARCH, num_classes=10).double()
    net.load_state_dict(checkpoint(weights, arch=ARCH))
    with torch.no_grad():
        logits = net.eval()(images)
    losses = torch.logsumexp(logits, 1) - logits.gather(1, labels[:, None])[:, 0]
    better = (logits > logits.gather(1, labels[:, None])).sum(1)
    return torch.stack([losses, (better < 1).double(), (better < 5).double()], 1)


def near(record: dict, means) -> None:
    """The numbers of a line, to twelve digits."""
    found = [record[name] for name in COUNTED]
    assert found == pytest.approx(means.tolist(), rel=1e-12), record["event"]


@pytest.mark.parametrize("size, local", [(3, 16), *full((1, 32))])
def test_equal_to_one_process_and_the_errors_are_those_described(size, local):
    """101 images: with three ranks one comes twice, and shares of 34, 34 and 33 images have
    batches of 16, 16 and 2 or 1.
    """
    import torch

    flags = [*SMALL, "--batch-size", size * local, *output("evaluation")]
    weights = flags[-1].with_suffix(".pt")
    succeeded(*world(size, SCRIPT, *flags, "--save", weights, prepare=doubles))
    each = independent(weights, data())
    exact, padded, averaged = records(flags[-1])[-4:-1]
    assert [exact["event"], padded["event"], averaged["event"]] == ["eval", "padded", "averaged"]
    near(exact, each.mean(0))
    assert exact["images"] == TEST_IMAGES
    assert exact["accuracy"] * TEST_IMAGES == pytest.approx(each[:, 1].sum().item(), abs=1e-9)
    twice = -TEST_IMAGES % size
    near(padded, torch.cat([each, each[:twice]]).mean(0))
    assert padded["images"] == TEST_IMAGES + twice
    shares = [torch.stack([x.mean(0) for x in each[r::size].split(local)]) for r in range(size)]
    near(averaged, torch.stack([share.mean(0) for share in shares]).mean(0))
    assert averaged["loss"] != pytest.approx(exact["loss"], rel=1e-4)
    assert (padded["loss"] != pytest.approx(exact["loss"], rel=1e-6)) == (twice > 0)


def test_fewer_images_than_ranks(tmp_path):
    """Two images for three ranks: the exact numbers are right, and no mean of means exists."""
    weights = tmp_path / "weights.pt"
    flags = [*SMALL, "--batch-size", 12, "--data", write_idx(tmp_path, 24, 2), "--save", weights]
    ranks = world(3, SCRIPT, *flags, prepare=doubles)
    succeeded(*ranks)
    lines = [line.split() for line in ranks[0].out.splitlines()]
    found = {line[0]: dict(word.split("=") for word in line[1:]) for line in lines}
    each = independent(weights, tmp_path)
    exact = [float(found["eval"][name]) for name in COUNTED]
    assert exact == pytest.approx(each.mean(0).tolist(), rel=1e-8)  # of 9 digits
    assert (found["eval"]["images"], found["padded"]["images"]) == ("2", "3")
    assert [found["averaged"][name] for name in COUNTED] == ["nan"] * 3


def test_fewer_than_five_classes(photos, tmp_path):
    """Of three, the right one is always among the best."""
    log = tmp_path / "log.json"
    flags = [*photos, "--arch", ARCH, "--workers", 0, "--epochs", 1, "--log-json", log]
    succeeded(*world(2, SCRIPT, *flags))
    (exact,) = records(log, "eval")
    assert exact["top5"] == 1 and exact["accuracy"] < 1 and exact["images"] == 18
