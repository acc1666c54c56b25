"""techniques/model_parallel.py: which device does what, and when."""

from real import FLAGS, data
from spies import said, tell
from support import forked, refused, succeeded
from test_on_gpus import two_gpus

SCRIPT = "techniques/model_parallel.py"


def watched() -> None:
    """Runs in the script's process: prints when a layer begins its forward, and when one of its
    weights has its gradient.
    """
    import torchvision

    get_model = torchvision.models.get_model

    def get(*rest, **options):
        model = get_model(*rest, **options)
        for name, layer in model.named_children():
            layer.register_forward_pre_hook(lambda *_, name=name: print("forward", name))
            for weight in layer.parameters():
                weight.register_post_accumulate_grad_hook(lambda _, name=name: print("back", name))
        return model

    torchvision.models.get_model = get


def test_the_two_halves_compute_in_turn():
    """Forward through the first, then the second; backward through the second, then the first. So
    while one computes the other idles: on average over both, a device idles half of the step.
    """
    flags = [*FLAGS, "--data", data(), "--image-size", 16]
    flags += ["--batch-size", 64, "--max-steps", 1]
    done = forked(SCRIPT, *flags, prepare=watched)
    succeeded(done)
    lines = [line.split() for line in done.out.splitlines()]
    names = {kind: [x[1] for x in lines if x[0] == kind] for kind in ("forward", "back")}
    second = {"layer4", "avgpool", "fc"}
    assert [name in second for name in names["forward"]] == [False] * 7 + [True] * 3
    assert [name in second for name in names["back"]] == [True] * 17 + [False] * 45
    kinds = [line[0] for line in lines if line[0] in names]
    assert kinds == ["forward"] * 10 + ["back"] * 62


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
