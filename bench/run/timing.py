"""Holds what all cases of a run have in common, and how long its turns and windows take.

Nothing runs here, so all of it can be tried on made-up machines.
"""

from dataclasses import dataclass

# A launch of its own: seconds that count, in so many windows.
MEASURED, WINDOWS = 3.0, 8
# The same of a turn, for cases that stay started. Measured: what one turn differs from the next by
# is decided when it begins, so three windows tell as much as six, and more turns more.
TURN, TURN_WINDOWS = 0.75, 3
SETTLE = 1  # windows of a turn that do not count, beside the first, which holds the sleep: in it
# caches are cold
WARM_UP = 5  # steps of a launch that do not count, at least
# Steps that do not count after a start with loader workers: until then a script lives on what they
# had ready before the first step. It is 8 batches.
STOCK = 24
TURNS = 2  # of a start: two tell starts from turns apart, and short blocks are many


@dataclass
class Plan:
    """What all cases of a run have in common."""

    dataset: str
    data: str
    batch_size: int  # of snsc.py; a case has its own, by --scaling
    workers: int  # processes of a loader, per device
    arch: str
    seed: int
    quick: bool
    budget: float | None  # seconds, of --budget
    blocks: int  # at most
    precise: bool = False  # whether the cases of a block stay started together and take turns
    scaling: str = "strong"
    images: int | None = None  # training images that an epoch has at least: the set is repeated
    image_size: int | None = None  # pixels per side; None: the scripts' default

    def seconds(self) -> float:
        """The budget. If the cases run one after the other, it is only the least: Runner.blocks."""
        return self.budget or 60 * (2.95 if self.quick else 14)

    def flags(self) -> list[str]:
        """The scripts' flags that every launch gets; each case adds its batch and its workers."""
        size = ["--image-size", str(self.image_size)] if self.image_size else []
        return ["--dataset", self.dataset, "--data", self.data, "--arch", self.arch, *size]


def window(seconds: float, windows: int, step_seconds: float, period: int = 1) -> int:
    """Steps a window: whole periods, at least one. This many windows take about these seconds, or
    longer if a period does.

    Turns begin at the same steps in every block. So parts of periods would not be a fair sample.
    """
    return period * max(1, round(seconds / windows / step_seconds / period))


def warm_up(size: int, stock: int = 0) -> int:
    """Steps that do not count of a launch, in whole windows of this size."""
    return size * -(-max(WARM_UP, stock) // size)
