"""`python -m bench plan`: its formulas give published figures; a user's mistake is one line."""

import re
from dataclasses import replace

import pytest
from support import ROOT

from bench.experiments import plan
from bench.formulas import (
    BYTES,
    Model,
    all_reduced,
    bubble,
    layer_activations,
    sharded_traffic,
    states,
)

# Layers, hidden size, heads, tensor parallelism; of tables 3 in Korthikanti and others, 2022.
GPT3, MT_NLG = (96, 12288, 96, 8), (105, 20480, 128, 8)
GB = 1e9


@pytest.mark.parametrize(
    "billions, ranks, published",
    [
        (7.5, 64, (120, 31.4, 16.6, 1.88)),  # figure 1
        (128, 64, (2048, 536, 284, 32)),  # table 1
    ],
)
def test_zero(billions, ranks, published):
    """GB per GPU in Rajbhandari and others, 2019, with mixed precision and Adam."""
    each = BYTES["adam", "mixed"]
    found = [sum(states(billions * GB, each, stage, ranks)) / GB for stage in range(4)]
    assert found == pytest.approx(published, rel=0.005)


def test_what_zero_sends():
    """As much as DDP in stages 1 and 2, and half as much again in stage 3 (section 7)."""
    model = Model(1e9, 24, 2048, 16)
    sent = {row.name: row.sent for row in plan.rows(model, 64, 8, 80e9)}
    assert sent["DDP"] == sent["ZeRO-1"] == sent["ZeRO-2"] == pytest.approx(4e9, rel=0.02)
    assert sent["ZeRO-3, FSDP"] == pytest.approx(1.5 * sent["DDP"])
    assert all_reduced(12.0, 3) == 16 and sharded_traffic(1.0, 1.0, 1) == 0


@pytest.mark.parametrize("shape", [GPT3, MT_NLG])
def test_activations_of_a_layer(shape):
    """Equations 1 to 4 of Korthikanti and others, 2022; s = 2048, b = 1."""
    _, h, a, t = shape
    s, b = 2048, 1
    each = s * b * h
    assert layer_activations(s, b, h, a) == each * (34 + 5 * a * s / h)
    assert layer_activations(s, b, h, a, t) == each * (10 + 24 / t + 5 * a * s / (h * t))
    whole = layer_activations(s, b, h, a, t, sequence_parallel=True)
    assert whole == each / t * (34 + 5 * a * s / h)
    assert layer_activations(s, b, h, a, t, sequence_parallel=True, fused=True) == each * 34 / t


def test_the_loss_keeps_logits_in_32_bits():
    """4 s b v / t bytes, whatever the precision of the rest (section 4.3)."""
    for precision in ("mixed", "fp32"):
        model = Model(7e9, 33, 4096, 32, precision=precision)
        for tensor, size in ((1, 2_097_152_000), (8, 262_144_000)):
            assert model.activations(8, tensor) - model.activations(8, tensor, loss=False) == size


def test_a_pipeline():
    """The first stage holds all layers' activations of one sequence; bubble (p - 1) / m of the
    time without it (Narayanan and others, 2021, section 2.2.1). The last stage has the logits.
    """
    idle = bubble(4, 8)
    assert idle / (1 - idle) == pytest.approx(3 / 8)
    model = Model(1e9, 24, 2048, 16)
    row = plan.split(model, "pipeline", (1, 4, 2))
    assert row.activations == model.activations(1, loss=False)
    large = replace(model, vocabulary=400_000)
    last = 34 * 2048 * 2048 * 24 / 4 + 4 * 2048 * 400_000
    assert plan.split(large, "pipeline", (1, 4, 2)).activations == last > row.activations
    assert sum(row.kinds) == 16e9 / 4 and "4 pipeline x 2 data" in row.note


def run(capsys, *flags: str) -> str:
    """What the command prints."""
    assert plan.main([*flags]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--params 1e8 --gpus 1 --memory 80", "one GPU, 8.3 GB"),
        ("--params 7e9 --gpus 8 --memory 80", "ZeRO-1 with activation checkpointing, "),
        ("--params 7e9 --gpus 8 --memory 40", "ZeRO-2 with activation checkpointing, "),
        ("--params 7e9 --gpus 8 --memory 24", "3D (2 tensor x 4 pipeline, idle 4%), "),
        ("--params 530e9 --gpus 1024 --memory 40 --batch 1", "ZeRO-3, FSDP with activation"),
        ("--params 7e9 --gpus 1 --memory 40", "nothing. Take more GPUs, a smaller --batch, "),
        ("--params 7e9 --gpus 1 --memory 48", "CPU offload with activation checkpointing, "),
        (
            "--params 175e9 --gpus 1024 --memory 80 --batch 16",
            "3D (4 tensor x 32 pipeline x 8 data, idle 1%), ",
        ),
    ],
)
def test_the_simplest_that_fits(capsys, flags, words):
    assert f"The simplest that fits: {words}" in run(capsys, *flags.split())


@pytest.mark.parametrize("gpus, memory", [(8, 80), (1, 80), (16, 24)])
@pytest.mark.parametrize("batch, precision", [(1, "mixed"), (8, "fp32")])
def test_a_script_is_named_only_where_it_fits_in_its_own_precision(gpus, memory, batch, precision):
    """zero1.py trains in fp32: what ZeRO-1 needs in 16 bits says nothing about it."""
    named = 0
    for params in (1e8, 1e9, 2.5e9, 7e9, 13e9):
        model = Model(params, 32, 4096, 32, batch=batch, precision=precision)
        said = plan.recommend(model, gpus, 8, memory * GB)
        fits = set()
        for checkpoint in (False, True):
            fp32 = replace(model, precision="fp32", checkpoint=checkpoint)
            for row in plan.rows(fp32, gpus, 8, memory * GB):
                if row.fits(memory * GB):
                    fits.add((row.script, checkpoint))
        for line in re.findall(r"^  (.+)$", said, re.M):
            script, *more = line.split(" and ")
            assert (script, bool(more)) in fits
            assert (ROOT / script.split()[0]).is_file()
            named += 1
    assert named
