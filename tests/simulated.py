"""Records of runs that never were, on a machine whose true speeds are known."""

import math
import random
from copy import deepcopy
from functools import cache

from bench import cases
from bench.host import Host
from bench.run import plan as plans
from bench.run import schedule

HOST = Host("C", 2)
PLAN = plans.Plan("fashion-mnist", "data", 256, 4, "resnet18", 0, True, 60.0, 2, precise=True)
ENVIRONMENT = {"cpu": "C", "cores": 2, "gpus": [], "versions": {"torch": "2.15.0"}}


def simulated(
    rates: dict[str, float],
    blocks: int,
    seed: int,
    starts: float = 0.016,
    turns: float = 0.075,
    of_a_start: int = 2,
    rough: bool = False,
) -> list[dict]:
    """The records of a run on a machine whose speed wanders by 20%.

    rates: images/s by case; starts, turns: by how much the ratio of two cases differs from start
    to start and from turn to turn (standard deviations; each case has its half of the variance);
    of_a_start: turns in a block;
    rough: nothing is normal and independent. What starts and turns differ by has heavy tails
    (Student's t with 3 degrees of freedom), and one turn in a hundred takes three times as long.
    The machine wanders within a round, too, from one turn to the next, and slows down by 20%.
    """
    dice = random.Random(seed)
    known = [{"kind": "setting", **deepcopy(setting(*rates)), "command": "python -m bench run"}]
    known += [{"kind": "gate", "case": n, "passed": True, "distance": 0.0} for n in rates]
    number = 0
    differs = heavy if rough else random.Random.gauss
    weather = 0.0
    for block in range(1, blocks + 1):
        started = {name: differs(dice, 0, starts / 2**0.5) for name in rates}
        for _ in range(of_a_start):
            number += 1
            weather = weather if rough else dice.gauss(0, 0.2)
            for name in dice.sample([*rates], len(rates)) if rough else rates:
                noise = weather + started[name] + differs(dice, 0, turns / 2**0.5)
                if rough:
                    weather = 0.9 * weather + dice.gauss(0, 0.2 * (1 - 0.9**2) ** 0.5)
                    noise -= 0.2 * block / blocks + (dice.random() < 0.01) * math.log(3)
                known.append(sample(name, block, number, rates[name] * math.exp(noise)))
    return known


@cache
def setting(*names: str) -> dict:
    """The first record of a run of these cases. It looks for versions of libraries: made once."""
    rows = [cases.Case(name, "snsc.py", "python", 1) for name in names]
    return schedule.make_setting(PLAN, rows, "simulated", HOST, dict(ENVIRONMENT))


def heavy(dice: random.Random, mean: float, deviation: float) -> float:
    """Student's t with 3 degrees of freedom, whose variance is 3, with this deviation."""
    chi_square = dice.gammavariate(3 / 2, 2)
    return mean + deviation / 3**0.5 * dice.gauss(0, 1) / (chi_square / 3) ** 0.5


def sample(name: str, block: int, number: int, rate: float) -> dict:
    """One turn of a case, at so many images/s."""
    window = {"images": 1000, "seconds": 1000 / rate, "data_seconds": 0.0, "step": 10}
    return {
        "kind": "sample",
        "case": name,
        "block": block,
        "round": number,
        "begin": 1_700_000_000.0 + number,
        "conditions": {"wall": 1.0, "steal": 0.0},
        "warm_up": 5,
        "windows": [{**window, "step": 5, "seconds": 9.0}, window],
        "start": {"startup_seconds": 1.0},
        "end": {"peak_memory_mib": 1.0},
    }
