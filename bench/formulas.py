"""Bytes that training holds and sends, by published formulas. Of a transformer, where it says so.

ZeRO       Rajbhandari and others, 2019, arxiv.org/abs/1910.02054, sections 3 and 7, figure 1
Offload    Ren and others, 2021, arxiv.org/abs/2101.06840, section 3
Megatron   Shoeybi and others, 2019, arxiv.org/abs/1909.08053, section 3
PTD-P      Narayanan and others, 2021, arxiv.org/abs/2104.04473, sections 2.2 and 3.2
Recompute  Korthikanti and others, 2022, arxiv.org/abs/2205.05198, section 4 and table 2
Scaling    Kaplan and others, 2020, arxiv.org/abs/2001.08361, section 2.1
"""

from collections.abc import Iterator
from dataclasses import dataclass

# Bytes per parameter: weights, gradients, optimizer state. With mixed precision the state holds the
# fp32 weights, too: for Adam the K = 12 of ZeRO, section 3.1.
BYTES = {
    ("adam", "mixed"): (2, 2, 12),
    ("adam", "fp32"): (4, 4, 8),
    ("sgd", "mixed"): (2, 2, 8),
    ("sgd", "fp32"): (4, 4, 4),
}


@dataclass(frozen=True)
class Model:
    """A transformer, and how it is trained. sequence: tokens; batch: sequences per GPU in a step.

    vocabulary: the number of tokens that the loss chooses from.
    fused: the attention keeps no matrix of sequence x sequence (FlashAttention and the like).
    checkpoint: forward keeps only the inputs of layers.
    """

    params: float
    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    batch: int = 8
    vocabulary: int = 32000
    optimizer: str = "adam"
    precision: str = "mixed"
    fused: bool = True
    checkpoint: bool = False

    @property
    def element(self) -> int:
        """Bytes of a number in weights and activations."""
        return BYTES[self.optimizer, self.precision][0]

    def kinds(self, stage: int = 0, ranks: int = 1, parts: int = 1) -> tuple[float, ...]:
        """Bytes of weights, gradients and optimizer state; parts: of tensor and pipeline."""
        each = BYTES[self.optimizer, self.precision]
        return tuple(states(self.params / parts, each, stage, ranks))

    def numbers(self, batch: float) -> float:
        """Bytes of the input or output of a layer: s b h numbers."""
        return self.element * self.sequence * batch * self.hidden

    def activations(
        self, batch: int, tensor: int = 1, layers: float | None = None, *, loss: bool = True
    ) -> float:
        """Bytes that this many sequences keep for backward, on each of `tensor` GPUs.

        With checkpointing, the inputs of the layers and one layer that is computed again. The loss
        keeps the logits in 32 bits: 4 s b v / t (Recompute, section 4.3).
        """
        layers = self.layers if layers is None else layers
        shape = self.sequence, batch, self.hidden, self.heads, tensor
        one = layer_activations(*shape, element=self.element, fused=self.fused)
        inside = layers * self.numbers(batch) + one if self.checkpoint else layers * one
        logits = 4 * self.sequence * batch * self.vocabulary / tensor if loss else 0
        return inside + logits


def states(params: float, each: tuple, stage: int = 0, ranks: int = 1) -> Iterator[float]:
    """Bytes of weights, gradients and optimizer state on a rank, from bytes per parameter (ZeRO).

    Stage 1 shards the optimizer state over the ranks, stage 2 the gradients, too, 3 the weights.
    """
    for place, size in enumerate(each):
        yield params * size / (ranks if place >= 3 - stage else 1)


def layer_activations(
    sequence: int,
    batch: int,
    hidden: int,
    heads: int,
    tensor: int = 1,
    *,
    sequence_parallel: bool = False,
    element: int = 2,
    fused: bool = False,
) -> float:
    """Bytes that a layer keeps for backward, on each of `tensor` GPUs (Recompute, equations 1-4).

    With elements of 2 bytes: s b h (10 + 24 / t + 5 a s / (h t)), with sequence parallelism all
    over t. A fused attention keeps no 5 a s / h. The paper counts, of s b h, 4 elements and 2 masks
    of a byte in the 10, 12 elements in the 24; of a s s b, 2 elements and a mask in the 5.
    """
    whole, split = 4 * element + 2, 12 * element
    scores = 0 if fused else (2 * element + 1) * heads * sequence / hidden
    whole = whole / tensor if sequence_parallel else whole
    return sequence * batch * hidden * (whole + (split + scores) / tensor)


def all_reduced(size: float, ranks: int) -> float:
    """Bytes that a rank sends in a ring all-reduce of `size` bytes.

    An all-gather and a reduce-scatter send half of it each (ZeRO, section 7).
    """
    return 2 * size * (ranks - 1) / ranks


def sharded_traffic(weights: float, gradients: float, ranks: int) -> float:
    """Bytes that a rank of ZeRO-3 sends in a pass: weights twice, gradients once (ZeRO, 7.2.2)."""
    return all_reduced(weights, ranks) + all_reduced(gradients, ranks) / 2


def bubble(stages: int, micro_batches: int) -> float:
    """The part of a step that each stage idles, (p - 1) / (m + p - 1) (PTD-P, section 2.2.1)."""
    return (stages - 1) / (micro_batches + stages - 1)
