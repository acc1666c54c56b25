"""audit.py: it finds planted mistakes with their cause, and nothing in right programs."""

import json
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from support import ROOT, free_port, full, succeeded, wait_until, world, write_idx
from torch.utils.data import Subset

import audit as module
from bench.process import environment, run

PROGRAMS = ROOT / "tests" / "programs"
OWN_START = "spawned"  # starts its ranks itself
LIBRARY = "accelerated"  # needs one
# A program, what is taken out of it, what comes instead, and the mistake that this is.
MISTAKES = [
    ("trainer_class", "            self.loader.sampler.set_epoch(epoch)\n", "", "one order"),
    (
        "trainer_class",
        "DistributedSampler(t",
        "DistributedSampler(shuffle=False, dataset=t",
        "no shuffling",
    ),
    (
        "trainer_class",
        "Subset(data, range(160)), Subset(data, range(160, 203))",
        "torch.utils.data.random_split("
        "data, [160, 43], torch.Generator().manual_seed(dist.get_rank()))",
        "other data",
    ),
    ("trainer_class", "        dist.all_reduce(total)\n", "", "not added up"),
    ("trainer_class", "(own, 16)", "(test_set, 16)", "counted twice"),
    (
        "trainer_class",
        "(own, 16)",
        "(test_set, sampler=DistributedSampler(test_set))",
        "uneven evaluation",
    ),
    (
        "trainer_class",
        "(own, 16)",
        "(Subset(test_set, range(40)), sampler=DistributedSampler(range(40)))",
        "padded evaluation",
    ),
    ("trainer_class", "self.model.module.state_dict()", "self.model.state_dict()", "wrapped names"),
    ("trainer_class", "            if self.rank == 0:\n", "            if True:\n", "one file"),
    (
        "trainer_class",
        "            self.evaluate()\n",
        "            self.evaluate()\n"
        "            __import__('pathlib').Path(__file__ + '.txt').write_text('')\n",
        "one file",
    ),
    (
        "trainer_class",
        "            self.evaluate()\n",
        "            self.model.module[0].bias.data += self.rank\n            self.evaluate()\n",
        "other weights",
    ),
    ("accumulation", " if last else", " if not last else", "weights"),
    (
        "accumulation",
        "8, sampler=sampler",
        "8, sampler=range(160 * dist.get_rank(), 160 + 80 * dist.get_rank())",
        "batches",
    ),
    ("gan", "        judge_step.zero_grad()\n", "", "not cleared"),
    ("moving_average", "torch.manual_seed(rank)", "torch.manual_seed(7)", "same dropout"),
    ("moving_average", "if rank == 0:", "if True:", "evaluated by all"),
    ("frozen", "torch.manual_seed(dist.get_rank())", "torch.manual_seed(7)", "same augmentation"),
    ("frozen", "Adam(head.", "Adam(nn.Linear(288, 5).", "other model"),
    (
        "frozen",
        "Adam(head.parameters()",
        "Adam([*body.requires_grad_().parameters(), *head.parameters()]",
        "weights",
    ),
    ("frozen", "    body.eval()\n", "    loader.batch_sampler.batch_size = 2\n", "small batch"),
    ("language_model", "1337 + dist.get_rank()", "1337", "same samples"),
    ("by_hand", "    dist.broadcast(weight.data, src=0)", "    pass", "weights"),
    ("by_hand", "lr=1e-3", "lr=1e-3 * (1 + rank)", "weights"),
    ("by_hand", "            dist.all_reduce(weight.grad)\n", "", "weights"),
    ("by_hand", "order[rank::size]", "order[rank:]", "shared samples"),
    ("by_hand", "manual_seed(epoch)", "manual_seed(2 * epoch + rank)", "shared samples"),
    ("by_hand", "lr=1e-3", "lr=1e30", "not finite"),
    ("by_hand", "            weight.grad /= size\n", "", "summed gradients"),
    ("by_hand", "weight.grad /= size", "weight.grad.neg_()", "other gradients"),
    ("by_hand", "        optimizer.step()", "        _ = rank or optimizer.step()", "steps"),
    ("by_hand", "weight.grad /= size", "weight.grad /= 3", "other gradients"),
    ("by_hand", "weight.grad /= size", "weight.grad.zero_()", "zero gradients"),
    ("stream", "Stream(dist.get_rank(), dist.get_world_size())", "Stream(0, 1)", "same samples"),
    ("stream", "dist.destroy_process_group()", "", "group left"),
    ("accumulation", " / ACCUMULATE", "", "sum of parts"),
    (
        "accumulation",
        "            loss.b",
        "            optimizer.zero_grad()\n            loss.b",
        "lost gradients",
    ),
    (
        "by_hand",
        "weight.grad /= size",
        "weight.grad = (weight.grad / size).half().float()",
        "rounded gradients",
    ),
    (
        "by_hand",
        "        optimizer.step()\n",
        """        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank)
        optimizer.step()
        for weight in model.parameters():
            dist.broadcast(weight.data, src=0)
""",
        "hyperparameters",
    ),
    ("local_steps", "                weight.data /= dist.get_world_size()\n", "", "summed weights"),
    ("local_steps", "batch_size // dist.get_world_size()", "batch_size - 8", "other batch"),
    ("local_steps", "batch_size // dist.get_world_size()", "batch_size", "local batch"),
    (
        "trainer_class",
        "DistributedSampler(train_set)",
        "DistributedSampler(train_set, 4, self.rank)",
        "left out",
    ),
    (
        "frozen",
        "16, sampler=sampler",
        "16 - 8 * dist.get_rank(), sampler=[*sampler][:: 1 + dist.get_rank()]",
        "unweighted batches",
    ),
    ("split_layer", "(1 + dist.get_rank())", "(1)", "equal summands"),
    (  # whose bias is the same on all ranks
        "split_layer",
        "nn.Linear(16, 1, bias=False)",
        "nn.Linear(16, 1)\n        nn.init.ones_(self.down.bias)",
        "equal summands",
    ),
    (
        "own_layers",
        "        dist.all_reduce(total)\n        return total\n\n\n",
        "        return total\n\n\n",
        "forward only",
    ),
    ("own_layers", "square - mean.square()", "square", "other variance"),
    ("own_layers", "* new", "* weight.grad", "ignored momentum"),
    ("joined", "shares[rank])", "shares[rank]), drop_last=True", "left out"),
    ("joined", "(loss * len(x) * size / count)", "loss", "unweighted batches"),
    ("joined", 'dist.broadcast(state["momentum_buffer"], src=0)', "del state", "weights"),
    ("replicas", "mesh=mesh)", 'mesh=mesh["shard"])', "weights"),
    ("two_stages", "        dist.broadcast(weight.data, src=1)", "        pass", "old weights"),
    ("two_stages", "(data, 1, 0)", "(data, 1, 0, seed=rank)", "split samples"),
    ("normalized", "            buffer.copy_(value)", "            pass", "statistics twice"),
    ("normalized", "nn.BatchNorm1d(16)", "nn.BatchNorm1d(16, momentum=0.0)", "constant statistics"),
    ("normalized", ', reduction="sum"', "", "wrong mean"),
    (  # whose right mean of other samples comes later
        "normalized",
        "    total = torch.zeros(2",
        """    with torch.no_grad():
        batches = DataLoader(TensorDataset(*data[:40]), 16)
        wrong = [cross_entropy(model(x), y).item() for x, y in batches]
    print(f"loss={sum(wrong) / len(wrong):.8f}")
    total = torch.zeros(2""",
        "wrong mean",
    ),
    (
        "normalized",
        "    for buffer in model.buffers():\n        dist",
        "    for buffer in []:\n        dist",
        "other buffers",
    ),
    ("recipe", "for buffer in average.buffers():", "for buffer in []:", "other buffers"),
    ("recipe", "torch.manual_seed(rank)", "torch.manual_seed(7)", "same augmentation"),
    ("recipe", "(train_set, 16,", "(train_set, 47,", "small batch"),
    ("flat", "torch.manual_seed(dist.get_rank())", "torch.manual_seed(7)", "same augmentation"),
    ("accelerated", "accelerator.process_index", "7", "same augmentation"),
    ("accelerated", "gather_for_metrics", "gather", "uneven evaluation"),
    (
        "normalized",
        "logits = logits[: len(y)]",
        "y = pad(y, [0, missing])",
        "padding counted",
    ),
]
# Those that the default tier runs, beside all right programs: one of each way of recording.
QUICK = """one order|not added up|wrong mean|sum of parts|lost gradients|weights|same augmentation
|old weights|equal summands|statistics twice""".replace("\n", "").split("|")
CAUSES = {  # of weights that differ
    "pass": "the weights differed before",
    "lr=1e-3 * (1 + rank)": "lr is [0.001, 0.002]",
    "": "nothing averages them",
    " if not last else": "within no_sync()",
    "del state": "the optimizers' states are not",
    'mesh=mesh["shard"])': "the ranks that hold the same shard",
    "Adam([*body.requires_grad_().parameters(), *head.parameters()]": "frozen when DDP was made",
}
LINES = {  # what is in the line that a finding names
    "no shuffling": "DataLoader(",
    "one order": "for ",
    "counted twice": "DataLoader(",
    "sum of parts": "backward()",
    "lost gradients": "zero_grad()",
    "summed gradients": "all_reduce(",
    "unweighted batches": "backward()",
}
BESIDES = {  # kinds that are also true there
    "same samples": {"same dropout"},
    "other data": {"uneven evaluation"},
    "batches": {"no shuffling"},
    "other weights": {"weights"},
    "steps": {"hang"},
    "weights": {"hyperparameters"},
    "hyperparameters": {"weights"},
    "wrong mean": {"evaluated by all"},
    "unweighted batches": {"no shuffling"},
    "other model": {"not cleared"},  # zero_grad() clears those of the other model
}


def audit(folder, script, *flags, ranks=2, own=(), **env):
    """What the audit reports on ranks that a launcher has started, and its findings by kind."""
    file = folder / "found.json"
    options = ["--batches", 4, "--hang", 60, "--json", file, "--records", folder / "records"]
    runs = world(ranks, "audit.py", *options, *own, script, *flags, **env)
    assert file.exists(), runs[0].err + runs[0].out
    assert not [*(folder / "records").iterdir()]  # the folder itself is the user's
    report = json.loads(file.read_text())
    kinds = {finding["kind"]: finding for finding in report["findings"]}
    levels = {"ERROR", "WARN"} if "--strict" in own else {"ERROR"}
    serious = any(finding["level"] in levels for finding in kinds.values())
    assert runs[0].code == serious, runs[0].err + runs[0].out
    return report | {"kinds": kinds, "out": runs[0].out}


def changed(folder, name, old, new):
    """A copy of a program with a mistake."""
    text = (PROGRAMS / f"{name}.py").read_text()
    assert text.count(old) == 1, old
    script = folder / f"{name}.py"
    script.write_text(text.replace(old, new))
    return script


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Flags for four steps per epoch, and 51 test images."""
    folder = write_idx(tmp_path_factory.mktemp("data"), 256, 51)
    flags = ["--dataset", "fashion-mnist", "--data", folder, "--device", "cpu", "--log-every", 1]
    return [*flags, "--image-size", 16, "--batch-size", 64]


SMALL_NET = ["--arch", "shufflenet_v2_x0_5"]


OTHERS = sorted({p.stem for p in PROGRAMS.glob("*.py")} - {OWN_START, LIBRARY})


@pytest.mark.parametrize("name", [*OTHERS, *full(LIBRARY)])
def test_right_programs(name, tmp_path, request):
    if name == LIBRARY:
        request.getfixturevalue("libraries")
    report = audit(tmp_path, PROGRAMS / f"{name}.py")
    assert not report["kinds"] and report["steps"] > 1


def tiers():
    """The first mistake of each quick kind by default, the others with --full."""
    quick = {kind: mistake for mistake in reversed(MISTAKES) if (kind := mistake[3]) in QUICK}
    quick = [*quick.values()]
    return [*quick, *full(*(mistake for mistake in MISTAKES if mistake not in quick))]


@pytest.mark.parametrize(("name", "old", "new", "kind"), tiers())
def test_mistakes(name, old, new, kind, tmp_path, request):
    if name == LIBRARY:
        request.getfixturevalue("libraries")
    own = ["--strict"] if kind == "shared samples" else []
    own += ["--hang", 5] if kind == "steps" else []  # one rank ends before the other
    kinds = audit(tmp_path, changed(tmp_path, name, old, new), own=own)["kinds"]
    assert kind in kinds and kinds.keys() <= {kind} | BESIDES.get(kind, set())
    if kind == "counted twice":
        assert kinds[kind]["level"] == "HINT" and "means are right" in kinds[kind]["seen"]
    if kind != "group left":
        assert re.fullmatch(rf"{name}\.py:\d+", kinds[kind]["line"])
        text = (tmp_path / kinds[kind]["line"].split(":")[0]).read_text().splitlines()
        assert LINES.get(kind, "") in text[int(kinds[kind]["line"].split(":")[1]) - 1]
    if kind == "weights":
        assert CAUSES[new.strip() if new != " if not last else" else new] in kinds[kind]["seen"]


def test_a_group_that_a_mesh_makes(tmp_path):
    """init_device_mesh() makes it: no copy is taken for a script of one device."""
    script = changed(tmp_path, "replicas", 'dist.init_process_group("gloo")\n', "")
    script.write_text(script.read_text().replace("dist.get_world_size()", "2"))
    report = audit(tmp_path, script)
    assert not report["kinds"] and report["ranks"] == 2 and report["steps"] > 10


def test_one_rank(tmp_path):
    report = audit(tmp_path, PROGRAMS / "by_hand.py", ranks=1)
    assert "has started only one rank" in report["unchecked"][0]


def test_several_ranks(tmp_path):
    """Four ranks, of which two share their samples."""
    script = changed(tmp_path, "by_hand", "order[rank::size]", "order[rank // 2 :: 2]")
    kinds = audit(tmp_path, script, ranks=4)["kinds"]
    assert kinds.keys() == {"same samples"}


def test_module(tmp_path):
    report = audit(tmp_path, "tests.programs.by_hand", own=["-m"])
    assert not report["findings"] and report["script"] == "tests.programs.by_hand"


def test_a_crash_and_a_hang(tmp_path):
    """Rank 1 raises an error, or leaves out a collective."""
    fails = changed(tmp_path, "by_hand", "        optimizer.step()", "        1 / (1 - rank)")
    kinds = audit(tmp_path, fails)["kinds"]
    assert kinds.keys() == {"crash"} and "by_hand.py:24" in kinds["crash"]["line"]
    assert "rank 1: ZeroDivisionError" in kinds["crash"]["seen"]
    assert "rank 0 waits at by_hand.py:22, in all_reduce()" in kinds["crash"]["seen"]
    hangs = changed(
        tmp_path, "by_hand", "            dist.all_reduce(", "            rank or dist.all_reduce("
    )
    kinds = audit(tmp_path, hangs, own=["--hang", 2])["kinds"]
    assert "rank 0 waits at by_hand.py:22" in kinds["hang"]["seen"]


NAMES_GPUS = (  # in trainer_class.py: what comes instead
    ("DistributedDataParallel(model)", "DistributedDataParallel(model.cuda(), [self.rank])"),
    ("(self.model(x), y)", "(self.model(x.to(self.rank)), y.cuda(non_blocking=True))"),
    ("(self.model.module(x) - y)", '(self.model.module(x.to("cuda:0")) - y.to("cuda"))'),
    ("torch.zeros(2)", 'torch.zeros(2, device=f"cuda:{self.rank}")'),
    ("(train_set, 16, sampler=sampler)", "(train_set, 16, sampler=sampler, pin_memory=True)"),
    ('"gloo"', '"nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"]))'),
    (
        "        self.optimizer = ",
        "        assert torch.cuda.is_available()\n        self.optimizer = ",
    ),
)


NO_SUM = (  # SyncBatchNorm's own collectives, since it is not in eval mode, add up no results
    ("nn.ReLU()", "nn.BatchNorm1d(32)"),
    ("Trainer(model", "Trainer(nn.SyncBatchNorm.convert_sync_batchnorm(model)"),
    ("        self.model.eval()\n", ""),
    ("        dist.all_reduce(total)\n", ""),
)


@pytest.mark.parametrize(("more", "kinds"), [((), set()), *full((NO_SUM, {"not added up"}))])
def test_without_gpus(more, kinds, tmp_path):
    """--cpu: what names a GPU means the CPU."""
    text = (PROGRAMS / "trainer_class.py").read_text()
    for old, new in (*NAMES_GPUS, *more):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = tmp_path / "trainer_class.py"
    script.write_text(text)
    assert audit(tmp_path, script, own=["--cpu"])["kinds"].keys() == kinds


LAYERS = """
import torch, torch.distributed as dist

dist.init_process_group("nccl")
torch.manual_seed(0)
images, slopes = torch.randn(2, 12, 5, 3, 3)
images, own = images.requires_grad_(), slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
local_images = images[own].detach().requires_grad_()
whole, split = (torch.nn.BatchNorm2d(5, device=device) for device in ("cpu", "cuda"))
split = torch.nn.SyncBatchNorm.convert_sync_batchnorm(split)
(whole(images) * slopes).sum().backward()
(split(local_images) * slopes[own]).sum().backward()
torch.testing.assert_close(local_images.grad, images.grad[own])
torch.testing.assert_close(split.state_dict(), whole.state_dict())
assert torch.rand(1, generator=torch.Generator(device="cuda:0")) < 1
assert torch.cuda.get_device_properties(0).major
dist.destroy_process_group()
"""


def test_sync_batch_norm_without_gpus(tmp_path):
    """It computes what a BatchNorm does with the samples of both ranks."""
    script = tmp_path / "layers.py"
    script.write_text(LAYERS)
    assert not audit(tmp_path, script, own=["--cpu"])["kinds"]


@pytest.mark.full
def test_a_compiler_is_no_hang(tmp_path):
    """A process that a rank has started computes, while the rank waits for it."""
    script = changed(
        tmp_path,
        "by_hand",
        "    for batch",
        """    if epoch == 0:
        import subprocess, sys
        code = "import time\\nwhile time.process_time() < 8: pass"
        subprocess.run([sys.executable, "-c", code])
    for batch""",
    )
    assert not audit(tmp_path, script, own=["--hang", 4])["kinds"]


@pytest.mark.full
def test_a_slow_loader_is_no_hang(tmp_path):
    slow = "lambda _: sampler.epoch or __import__('time').sleep(10)"
    script = changed(
        tmp_path,
        "trainer_class",
        "16, sampler=sampler",
        f"16, sampler=sampler, num_workers=1, worker_init_fn={slow}",
    )
    assert not audit(tmp_path, script, own=["--hang", 4])["kinds"]


ORDERS = """
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 4), torch.randint(2, (256,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
test_loader = DataLoader(data, 16, {test})
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for epoch in range(5):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y in test_loader:
            sums += torch.tensor([cross_entropy(model(x), y) * len(y), len(y)])
    {exchange}
    if dist.get_rank() == 0:
        print(f"test loss {{sums[0] / sums[1]:.6f}}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("test", "exchange", "kind"),
    [
        # The ranks' means differ only since the audit ends the evaluation after some batches.
        ("shuffle=True", "pass", "evaluated by all"),
        # It looks like the training, whose last passes get equal samples from the audit.
        *full(
            (
                "sampler=DistributedSampler(data, shuffle=False)",
                "dist.all_reduce(sums)",
                "padded evaluation",
            )
        ),
    ],
)
def test_evaluations_of_the_training_set(test, exchange, kind, tmp_path):
    script = tmp_path / "orders.py"
    script.write_text(ORDERS.format(test=test, exchange=exchange))
    assert audit(tmp_path, script)["kinds"].keys() == {kind}


def test_a_subset_within_a_data_set():
    split = SimpleNamespace(images=Subset("abc", [2, 0]))
    assert module.contents(split) == {"images": "2 [2, 0]"}


def test_a_collective_with_a_name():
    """Horovod's have one, a keyword."""
    assert module.on_collective("allreduce", 1, name="loss")


def test_same_numbers(small, tmp_path):
    """The losses of the script are the same, bit for bit, and nothing is found."""
    flags = [*small, *SMALL_NET, "--epochs", 2]
    plain = world(2, "mnmc_ddp_launch.py", *flags)
    succeeded(*plain)
    report = audit(tmp_path, "mnmc_ddp_launch.py", *flags, "--save", tmp_path / "weights")
    losses = re.compile(r"(train|eval) .* loss=(\S+) accuracy=(\S+)")
    assert losses.findall(report["out"]) == losses.findall(plain[0].out) != []
    assert len(losses.findall(report["out"])) == 10 and not report["findings"]


def test_one_process(small, tmp_path):
    """A script for one device: it says that there is nothing to compare."""
    report = audit(tmp_path, "snsc.py", *small, *SMALL_NET)
    assert not report["findings"] and "joins no process group" in report["unchecked"][0]
    assert report["steps"] > 4


def test_own_errors(tmp_path):
    """An error in what only records is named as the audit's, and the script runs to its end."""
    script = changed(
        tmp_path, "by_hand", "import torch\n", "import audit\nimport torch\naudit.rows = None\n"
    )
    report = audit(tmp_path, script)
    assert not report["findings"] and report["steps"] > 1
    assert any("of audit.py failed: TypeError" in text for text in report["unchecked"])


def test_a_killed_rank(tmp_path):
    """Rank 1 reports that rank 0 was killed."""
    script = changed(tmp_path, "by_hand", "        optimizer.step()", "        rank or os.abort()")
    script.write_text("import os\n" + script.read_text())
    file = tmp_path / "found.json"
    world(2, "audit.py", "--json", file, "--records", tmp_path / "records", script)
    (found,) = json.loads(file.read_text())["findings"]
    assert found["kind"] == "hang" and "rank 0 never came, or was killed" in found["seen"]


@pytest.mark.parametrize(
    ("text", "itself"),
    [
        ("mp.spawn(main, nprocs=2)", True),
        ("for rank in range(2):\n    Process(target=main, args=(rank,)).start()", True),
        ("# or: mp.spawn(main)\ndist.init_process_group('nccl')\nProcess(target=watch)", False),
    ],
)
def test_whether_a_script_starts_its_ranks(text, itself):
    assert module.starts_ranks(text) is itself


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),  # srun --pty bash
        ({"SLURM_PROCID": "0"}, False),  # in a script of sbatch
    ],
)
def test_whether_a_launcher_has_started_it(env, ranks, monkeypatch):
    for name in (*module.RANKS, *module.WORLDS):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert module.launched() is ranks


def test_length(tmp_path):
    """A script sees the true length of its loader; one that needs all its batches is not blamed."""
    script = changed(
        tmp_path, "trainer_class", "            for x, y in self.loader:\n",
        """            assert len(self.loader) == 5
            for _, (x, y) in zip(range(5), self.loader, strict=True):
""",
    )  # fmt: skip
    report = audit(tmp_path, script)
    assert not report["findings"] and any("--batches" in text for text in report["unchecked"])


def test_a_pass_by_next(tmp_path):
    """It never asks for the end, and ends with the next pass: two and two short ones are seen."""
    script = changed(
        tmp_path, "trainer_class", "            for x, y in self.loader:\n",
        """            batches = iter(self.loader)
            for _ in range(3):
                x, y = next(batches)
""",
    )  # fmt: skip
    report = audit(tmp_path, script)
    assert not report["findings"] and report["steps"] == 12


def test_start(tmp_path):
    """audit.py starts two ranks, and finds a hang; it leaves nothing. The flag before the script is
    one that deepspeed and torch.distributed.launch put there.
    """
    script = changed(
        tmp_path, "by_hand", "    for batch", "    rank or dist.barrier()\n    for batch"
    )
    command = [sys.executable, "audit.py", "--local_rank=0", "--hang", 3, script]
    env = environment(1, TMPDIR=tmp_path / "tmp")
    (tmp_path / "tmp").mkdir()
    done = run([*map(str, command)], 120, env)
    assert done.code == 1 and "rank 0 waits at by_hand.py:18, in barrier()" in done.out
    assert "rank 1 waits at by_hand.py:23, in all_reduce()" in done.out
    assert not [*(tmp_path / "tmp").glob("audit-*")]


@pytest.mark.parametrize("mistake", [True, *full(False)])
def test_own_start(mistake, tmp_path):
    """A script that starts its ranks by mp.spawn. The mistake: each rank makes other random data.
    That script names GPUs, and imports a function by its name.
    """
    script, own = PROGRAMS / f"{OWN_START}.py", []
    if mistake:
        script, own = changed(tmp_path, OWN_START, "    torch.manual_seed(0)\n", ""), ["--cpu"]
        text = script.read_text().replace('dist.init_process_group("gloo"', 'init("nccl"')
        named = "from torch.distributed import init_process_group as init"
        text = text.replace("dist\n", f"dist\n{named}\n")
        device = "torch.accelerator.current_accelerator()"
        script.write_text(text.replace("model(x)", f"model(x.to({device}))"))
    file = tmp_path / "found.json"
    command = [sys.executable, "audit.py", *own, "--json", file, script, free_port()]
    done = run([*map(str, command)], 120, environment(1))
    report = json.loads(file.read_text())
    kinds = {finding["kind"] for finding in report["findings"]}
    assert any("other ranks that the script starts" in text for text in report["unchecked"])
    assert done.code == mistake and kinds == ({"other data"} if mistake else set()), done.out


PORTED = """
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

{imports}
images, labels = torch.rand(203, 8), torch.arange(203) % 4
train_set, test_set = (TensorDataset(images[k], labels[k]) for k in (slice(160), slice(160, 203)))
batch_size, lr, seed, epochs = 32, 0.1, 0, 5

def make_model():
    torch.manual_seed(seed)
    layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)
    return torch.nn.Sequential(*layers)

@torch.no_grad()
def evaluate(model, loader):
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        logits = model(x)
        loss = F.cross_entropy(logits, y, reduction="sum")
        sums += torch.tensor([loss, (logits.argmax(1) == y).sum(), len(y)])
    return sums

{body}
"""


def test_port(tmp_path):
    """The lines of docs/howto/port.md, on CPUs."""
    page = (ROOT / "docs" / "howto" / "port.md").read_text()
    lines = re.search(r"```diff\n(.*?)```", page, re.S)[1].splitlines()
    new = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    imports, body = new.split("\n\n", 1)
    body = body.replace('torch.device("cuda", local_rank)', 'torch.device("cpu")')
    body = body.replace('"model.pt"', f"{str(tmp_path / 'model.pt')!r}")
    body = re.sub(r"torch.cuda.set_device.*\n", "", body)
    body = re.sub(r"dist.init_process_group.*", 'dist.init_process_group("gloo")', body)
    script = tmp_path / "ported.py"
    script.write_text(PORTED.format(imports=imports, body=body))
    report = audit(tmp_path, script)
    assert not report["kinds"] and report["steps"] > 4, report["out"]
    assert not report["unchecked"][1:]


def test_interrupted(tmp_path):
    """Ctrl-C ends all ranks, and leaves no folder."""
    line = "        print('one\\n', end='', flush=True)"  # one write, which two ranks cannot mix
    script = changed(tmp_path, "by_hand", "        optimizer.step()", line)
    env = environment(1, TMPDIR=str(tmp_path), PYTHONUNBUFFERED="1")
    command = [sys.executable, "audit.py", "--batches", "1000000", str(script)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout.readline() == b"one\n"
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert len(started) == 2
        wait_until(lambda: not any(alive(child) for child in started), 20)
    finally:
        process.kill()
        process.stdout.close()
    assert not [*tmp_path.glob("audit-*")]


def alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_wrong_calls():
    for words, said in (
        (["nothing.py"], "nothing.py: there is no such script"),
        (["--ranks", "1", "snsc.py"], "at least 2 ranks"),
    ):
        done = run([sys.executable, "audit.py", *words], 60, environment(1))
        assert done.code == 2 and said in done.err


def test_without_a_group(tmp_path, capsys):
    """Processes that share a model, as Hogwild's do, join no group, and leave no record."""
    settings = module.Record(ranks=2, name="hogwild.py", started=0, strict=False, json=None)
    assert module.report(tmp_path, settings, ended=True) == 0
    assert "no process has joined a process group" in capsys.readouterr().out
    assert module.report(tmp_path, settings) == 1
    assert "rank 1 never came, or was killed" in capsys.readouterr().out


def test_devices():
    """Two ranks on one GPU, seen in their records."""
    ranks = [module.empty_record() for _ in range(2)]
    for number, rank in enumerate(ranks):
        rank |= {"rank": number, "group": True, "cut": True, "left": False}
        rank |= {"device": ["host", None, "cuda:0"]}
    findings = module.Comparison(ranks, []).findings
    assert [finding["kind"] for finding in findings] == ["one device"]
    ranks[1]["device"] = ["host", None, "cuda:1"]
    assert not module.Comparison(ranks, []).findings
