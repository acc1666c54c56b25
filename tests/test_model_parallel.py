"""techniques/model_parallel.py: what each device holds."""

from real import data
from spies import said, tell
from support import forked, refused, succeeded
from test_on_gpus import two_gpus

SCRIPT = "techniques/model_parallel.py"


def held() -> None:
    """Runs in the script's process: it finds two GPUs; tells the bytes of the weights on each."""
    import torch

    two_gpus()
    begin = torch.optim.SGD.__init__

    def init(self, weights, **options):
        weights, bytes_on = list(weights), {}
        for weight in weights:
            place = str(weight.device)
            bytes_on[place] = bytes_on.get(place, 0) + weight.nbytes
        tell("held", bytes_on)
        begin(self, weights, **options)

    torch.optim.SGD.__init__ = init


def test_each_device_has_layers_of_its_own():
    """Whole layers: of resnet18's 44.7 MB, 11.1 and 33.6."""
    flags = ["--dataset", "fashion-mnist", "--data", data(), "--image-size", 16]
    flags += ["--batch-size", 64, "--max-steps", 1]
    done = forked(SCRIPT, *flags, prepare=held, CUDA_VISIBLE_DEVICES="0,1")
    succeeded(done)
    assert said(done.out, "held") == [{"cuda:0": 11131136, "cuda:1": 33595432}]


def test_one_gpu_is_refused():
    flags = ["--dataset", "fashion-mnist", "--device", "cuda"]
    done = forked(SCRIPT, *flags, prepare=two_gpus, CUDA_VISIBLE_DEVICES="0")
    refused(done, "--device cuda", "--device cpu")
