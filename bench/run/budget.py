"""How the time of a run is shared out: what all cases have in common, blocks, turns and windows.

Nothing runs here, so all of it can be tried on made-up machines.
"""

from dataclasses import dataclass

from bench.stats import FEWEST, best_turns, least_blocks

# A launch of its own: seconds that count, in so many windows.
MEASURED, WINDOWS = 3.0, 8
# The same of a turn, for cases that stay started. Measured: what one turn differs from the next by
# is decided when it begins, so three windows tell as much as six, and more turns more.
TURN, TURN_WINDOWS = 0.75, 3
SETTLE = 1  # windows of a turn that do not count, beside the first, which holds the sleep: in it
# caches are cold
WARM_UP = 5  # steps of a launch that do not count, at least
BLOCKS = 10  # many short blocks tell more than few long ones: turns give way until so many fit
FEW, MANY = 2, 6  # turns of a start
SPREADS = (0.04, 0.12)  # between starts, between turns: measured on two cores that others use, too
# How much longer starts take beside each other than those of gates say. Measured on two cores:
# 64 s, ends included, for 12 cases, two at once, whose gates' starts add up to 68 s.
CROWD = 1.9
PAUSE = 0.3  # seconds to wake a case and to stop it, in each turn


@dataclass
class Plan:
    """What all cases of a run have in common."""

    dataset: str
    data: str
    batch_size: int  # of snsc.py; a case has its own, by --scaling
    workers: int  # processes per device that decode photographs
    arch: str
    seed: int
    quick: bool
    budget: float  # seconds
    blocks: int  # at most
    precise: bool = False  # whether the cases of a block stay started together and take turns
    price: float | None = None  # of the machine, an hour
    scaling: str = "strong"
    all_cores: bool = False  # whether on a CPU each process may use all cores: --threads all
    images: int | None = None  # training images that an epoch has at least: the set is repeated
    image_size: int | None = None  # pixels per side; None: the scripts' default

    def flags(self) -> list[str]:
        """The scripts' flags that every launch gets; each case adds its batch and its workers."""
        size = ["--image-size", str(self.image_size)] if self.image_size else []
        return ["--dataset", self.dataset, "--data", self.data, "--arch", self.arch, *size]


@dataclass(frozen=True)
class Layout:
    """What fits into the time that is left."""

    blocks: int
    turns: int  # of every case in a block
    seconds: float  # that a block takes


def layout(
    start: float,
    turn: float,
    left: float,
    claims: int,
    spreads: tuple[float, float] = SPREADS,
    done: int = 0,
) -> Layout:
    """How many blocks fit into `left` seconds, and with how many turns of each start.

    start: seconds to start and to end all cases of a block; turn: seconds of one turn of each, 0
    where a launch has but one, which its start holds;
    spreads: standard deviations of ratios, between starts and between turns; done: blocks so far.

    Kalibera and Jones's number of turns, from FEW to MANY; less where the run would then have fewer
    blocks than BLOCKS and than its number of claims asks for, and one where only so it has FEWEST.
    Their formula weighs spreads and costs, and knows nothing of t's factor, which is large for a
    few blocks.
    """

    def fit(turns: int) -> int:
        return max(0, int(left // (start + turns * turn)))

    if not turn:
        return Layout(fit(1), 1, start)
    wanted = enough(claims) - done
    turns = max(FEW, round(min(MANY, best_turns(start, turn, *spreads))))
    while turns > FEW and fit(turns) < min(wanted, fit(FEW)):
        turns -= 1
    if fit(FEW) < FEWEST - done <= fit(1):
        turns = 1
    return Layout(fit(turns), turns, start + turns * turn)


def enough(claims: int) -> int:
    """The blocks after which a run may end, since its intervals are narrow."""
    return max(BLOCKS, least_blocks(claims))


def predicted(starts: list[float], steps: list[float], at_once: int) -> tuple[float, float]:
    """Seconds to start all cases, so many at once, and of one turn of each, before any was timed.

    starts: seconds of each case's start in its gate; steps: of its steps.
    """
    begin = sum(starts) / at_once * (CROWD if at_once > 1 else 1)
    windows = [TURN_WINDOWS * window(TURN, TURN_WINDOWS, step) * step for step in steps]
    whole = (1 + SETTLE + TURN_WINDOWS) / TURN_WINDOWS
    return begin, sum(whole * seconds + PAUSE for seconds in windows)


def alone(starts: list[float], steps: list[float]) -> float:
    """The same of launches one after the other, each with its warm-up and its windows."""
    seconds = 0.0
    for start, step in zip(starts, steps, strict=True):
        size = window(MEASURED, WINDOWS, step)
        seconds += start + step * (warm_up(size) + WINDOWS * size)
    return seconds


def window(seconds: float, windows: int, step_seconds: float) -> int:
    """Steps a window, so that so many windows take these seconds."""
    return max(1, round(seconds / windows / step_seconds))


def warm_up(size: int) -> int:
    """Steps that do not count of a launch, in whole windows of this size."""
    return size * -(-WARM_UP // size)
