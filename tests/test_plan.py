"""`python -m bench plan`: its formulas give published figures; a user's mistake is one line."""

import argparse
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
        (1000, 1024, (16000, 4011, 2013, 15.6)),
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


@pytest.mark.parametrize("shape, saved", [(GPT3, 0.70), (MT_NLG, 0.65)])
def test_what_a_fused_attention_saves(shape, saved):
    """70% and 65% of the activations (section 5, there by computing the attention again)."""
    _, h, a, _ = shape
    fused = layer_activations(2048, 1, h, a, fused=True) / layer_activations(2048, 1, h, a)
    assert 1 - fused == pytest.approx(saved, abs=0.005)


def test_checkpointing_keeps_the_inputs_of_layers():
    """2 s b h L (table 2), and here one layer that is computed again."""
    model = Model(175e9, 96, 12288, 96, batch=1, checkpoint=True)
    again = layer_activations(2048, 1, 12288, 96, fused=True)
    assert model.activations(1, loss=False) - again == 2 * 2048 * 12288 * 96


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


def test_tensor_parallelism_sends_four_all_reduces_a_layer():
    """Of s b h elements, for all sequences of a replica; gradients over the replicas on top."""
    model = Model(1e9, 24, 2048, 16, batch=1)
    row = plan.split(model, "tensor", (8, 1, 1))
    assert row.sent == 24 * 4 * 2 * 7 / 8 * (2 * 2048 * 8 * 2048)
    more = plan.split(model, "tensor", (8, 1, 2)).sent - row.sent
    assert more == pytest.approx(2e9 / 8)


def test_of_one_split_nothing_is_left():
    """All that is split is DDP again, or FSDP, with one GPU a replica."""
    model = Model(1e9, 24, 2048, 16)
    rows = {row.name: row for row in plan.rows(model, 8, 8, 80e9)}
    for name, stage in (("DDP", 0), ("ZeRO-3, FSDP", 3)):
        whole = plan.split(model, name, (1, 1, 8), stage)
        assert (whole.held, whole.sent) == pytest.approx((rows[name].held, rows[name].sent))


def run(capsys, *flags: str) -> str:
    """What the command prints."""
    assert plan.main([*flags]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--params 1e8 --gpus 1 --memory 80", "one GPU, 8.3 GB"),
        ("--params 1e8 --gpus 8 --memory 80", "DDP, "),
        ("--params 7e9 --gpus 8 --memory 80", "ZeRO-1 with activation checkpointing, "),
        ("--params 7e9 --gpus 8 --memory 40", "ZeRO-2 with activation checkpointing, "),
        (
            "--params 7e9 --gpus 8 --memory 80 --precision fp32",
            "ZeRO-2 with activation checkpointing, 53.9 GB per GPU\n"
            "  techniques/deepspeed_zero.py --stage 2 and techniques/activation_checkpointing.py\n",
        ),
        ("--params 7e9 --gpus 8 --memory 24", "3D (2 tensor x 4 pipeline, idle 4%), "),
        (
            "--params 7e9 --gpus 8 --memory 24 --batch 4",
            "ZeRO-3, FSDP with activation checkpointing, ",
        ),
        ("--params 7e9 --gpus 1 --memory 40", "nothing. Take more GPUs, a smaller --batch, "),
        ("--params 7e9 --gpus 1 --memory 48", "CPU offload with activation checkpointing, "),
        ("--params 530e9 --gpus 1024 --memory 40 --batch 1", "ZeRO-3, FSDP with activation"),
        (
            "--params 175e9 --gpus 1024 --memory 80 --batch 16",
            "3D (4 tensor x 32 pipeline x 8 data, idle 1%), ",
        ),
    ],
)
def test_the_simplest_that_fits(capsys, flags, words):
    assert f"The simplest that fits: {words}" in run(capsys, *flags.split())


@pytest.mark.parametrize("gpus, memory", [(8, 80), (8, 40), (8, 24), (1, 80), (16, 24), (64, 16)])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("precision", ["mixed", "fp32"])
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


def test_where_nothing_fits(capsys):
    said = run(capsys, *"--params 1e12 --gpus 8 --memory 80".split())
    assert said.count(": nothing. Take more GPUs") == 2


def test_the_shape_of_a_model_of_this_size():
    """GPT-3's, whose 96 layers of 12,288 have 12 L h^2 = 174e9 of its 175e9 parameters."""
    flags = dict.fromkeys(("layers", "hidden", "heads")) | {"sequence": 2048, "batch": 1}
    flags |= {"optimizer": "adam", "precision": "mixed", "attention": "plain", "vocabulary": 50257}
    args = argparse.Namespace(params=174e9, **flags)
    model = plan.shaped(args)
    assert (model.layers, model.hidden, model.heads) == GPT3[:3] and not model.fused
    assert args.estimated == " (estimated: layers, hidden, heads)"
    args.layers, args.heads = 24, 16
    assert plan.shaped(args).hidden == 24_576 and args.estimated == " (estimated: hidden)"
