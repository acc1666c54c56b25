"""Records of runs that never were, on a machine whose true speeds are known."""

import random

from bench import cases
from bench.host import Host
from bench.measure import schedule

HOST = Host("C", 2)
PLAN = schedule.Plan("fashion-mnist", "data", 256, 4, "resnet18", 0, True, 60.0, 2)
ENVIRONMENT = {"cpu": "C", "cores": 2, "gpus": [], "versions": {"torch": "2.15.0"}}


def simulated(rates: dict[str, float], rounds: int, seed: int) -> list[dict]:
    """The records of a run on a machine whose speed wanders by 20%, and each launch's by 2%."""
    dice = random.Random(seed)
    rows = [cases.Case(name, "snsc.py", "python", 1) for name in rates]
    known = [
        {"kind": "setting", **schedule.settings(PLAN, rows, "simulated", HOST, dict(ENVIRONMENT))}
    ]
    known += [{"kind": "gate", "case": n, "passed": True, "distance": 0.0} for n in rates]
    for number in range(1, rounds + 1):
        weather = dice.lognormvariate(0, 0.2)
        for name, rate in rates.items():
            seconds = 1000 / (rate * weather * dice.lognormvariate(0, 0.02))
            window = {"images": 1000, "seconds": seconds, "data_seconds": 0.0, "step": 10}
            known.append(
                {
                    "kind": "sample",
                    "case": name,
                    "round": number,
                    "warm_up": 5,
                    "windows": [{**window, "step": 5, "seconds": 9.0}, window],
                    "start": {"startup_seconds": 1.0},
                    "end": {"peak_memory_mib": 1.0},
                }
            )
    return known
