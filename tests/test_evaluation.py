"""Evaluation counts every test image exactly once, however many processes share them."""

import pytest
from support import forked, records, succeeded, world

SIZES = {  # processes: batch size
    1: 32,
    3: 33,  # 101 images: shares of 34, 34 and 33, and the last one has a batch less
    8: 32,  # five images in the last batch: three processes have none of it
}


def independent(weights, folder) -> tuple[int, float]:
    """Hits and mean loss of saved weights, from the files, in one pass and our own code."""
    import torch
    from torchvision.models import resnet18

    raw = folder / "FashionMNIST" / "raw"
    pixels = (raw / "t10k-images-idx3-ubyte").read_bytes()[16:]
    labels = torch.tensor(list((raw / "t10k-labels-idx1-ubyte").read_bytes()[8:]))
    images = torch.full((len(labels), 3, 32, 32), -2.0)  # black, after (x - 128) / 64
    gray = torch.tensor(list(pixels)).view(-1, 1, 28, 28).float()
    images[:, :, 2:30, 2:30] = (gray - 128) / 64
    net = resnet18(num_classes=10)
    net.load_state_dict(torch.load(weights))
    with torch.no_grad():
        logits = net.eval()(images)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    return (logits.argmax(1) == labels).sum().item(), loss


@pytest.mark.parametrize("size", SIZES)
def test_every_image_is_evaluated_once(size, small, tmp_path):
    """The logged counts are those of one pass over the test set with the saved weights."""
    log, weights = tmp_path / "log.json", tmp_path / "weights.pt"
    flags = [*small, "--batch-size", SIZES[size], "--log-json", log, "--save", weights]
    flags += ["--epochs", 4]
    if size == 1:
        succeeded(forked("snsc.py", *flags))
    else:
        succeeded(*world(size, "mnmc_ddp_launch.py", *flags))
    *_, evaluation = records(log, "eval")
    hits, loss = independent(weights, small[3])
    assert evaluation["images"] == 101
    assert round(evaluation["accuracy"] * 101) == hits
    assert evaluation["accuracy"] == pytest.approx(hits / 101, rel=1e-12)
    assert evaluation["loss"] == pytest.approx(loss, rel=1e-5)
    assert hits > 20  # learnt something: a guess would hide a wrong order of the images


def test_training_counts_every_image_of_every_process(small, tmp_path):
    """The images of a line are those of the global batch, and an epoch drops the remainder."""
    log = tmp_path / "log.json"
    flags = [*small, "--batch-size", 48, "--epochs", 1, "--log-every", 4, "--log-json", log]
    succeeded(*world(3, "mnmc_ddp_launch.py", *flags))
    steps = records(log, "train")
    assert [(step["step"], step["images"]) for step in steps] == [(1, 48), (4, 144), (6, 96)]
