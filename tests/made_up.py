"""Records of made-up runs, whose numbers are known: for the tables, the plots and the page; and a
made-up driver of GPUs.
"""

import json
import math
import random
from pathlib import Path
from types import ModuleType

from bench import ladder

LADDER = [script.path for script in ladder.LADDER]


def row(name: str, script: str, world: int) -> dict:
    """A case, as a setting has it."""
    about = {"launcher": "python", "split": "strided", "share": 1, "technique": "", "threads": 1}
    about |= {"flags": [], "variables": [], "precision": "fp32", "backend": "gloo"}
    return {"name": name, "script": script, "world": world} | about


def cases(sizes: list[int]) -> list[dict]:
    """The ladder at these world sizes; Apex is not installed."""
    rows = [row(f"{name} x{world}", name, world) for name in LADDER[1:] for world in sizes]
    return [row("snsc.py", "snsc.py", 1), row("snsc.py again", "snsc.py", 1), *rows]


def techniques(world: int, *names: str) -> list[dict]:
    """The rows of `--techniques` with these: the plain script twice, DDP, and each of them."""
    rows = [row for row in cases([world]) if row["script"] in ("snsc.py", "mnmc_ddp_launch.py")]
    about = {"script": "techniques/amp.py"}
    return [*rows, *(rows[-1] | about | {"name": f"{n} x{world}", "technique": n} for n in names)]


def run(folder: Path, rates: dict[str, float], blocks: int, turns: int = 2, **more) -> list[dict]:
    """Writes the records of a run in which the cases have these images/s, by the case's script or
    name, and returns them; 2% between starts, 5% between turns, 20% of weather.

    more: sizes, gpus, command, seed, batch_size, flops_per_image, when; cases instead of
    the ladder's.
    """
    dice, rows = random.Random(more.get("seed", 0)), more.get("cases")
    known = begin(rows or cases(more.get("sizes", [1, 2])), **more)
    timed = [case for case in known[0]["cases"] if case["script"] != "mnmc_apex.py"]
    number, time = 0, more.get("when", 1_700_000_000.0)
    for block in range(1, blocks + 1):
        starts = {case["name"]: dice.lognormvariate(0, 0.02) for case in timed}
        for _ in range(turns):
            number, weather = number + 1, dice.lognormvariate(0, 0.2)
            for order, case in enumerate(dice.sample(timed, len(timed))):
                name = case["name"]
                rate = rates.get(name) or rates.get(case["script"], 1000)
                rate *= weather * starts[name] * dice.lognormvariate(0, 0.05)
                known.append(sample(case, block, number, order, rate, time))
                time += 1.5
        time += 20
    known.append({"kind": "stop", "reason": "as many blocks as asked for"})
    write(folder, known)
    return known


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
    rows = {name: row(name, "snsc.py", 1) for name in rates}
    known = begin([*rows.values()])
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
                rate, time = rates[name] * math.exp(noise), 1_700_000_000.0 + number
                known.append(sample(rows[name], block, number, 0, rate, time))
    return known


def heavy(dice: random.Random, mean: float, deviation: float) -> float:
    """Student's t with 3 degrees of freedom, whose variance is 3, with this deviation."""
    chi_square = dice.gammavariate(3 / 2, 2)
    return mean + deviation / 3**0.5 * dice.gauss(0, 1) / (chi_square / 3) ** 0.5


def begin(rows: list[dict], **more) -> list[dict]:
    """The setting of a run, and its gates, which all have passed."""
    plan = {"dataset": "fashion-mnist", "data": "data", "batch_size": 256, "workers": 0}
    plan |= {"arch": "resnet18", "seed": 0, "quick": False, "budget": 720}
    plan |= {"blocks": 1000, "precise": True, "scaling": "strong"}
    plan["batch_size"] = more.get("batch_size", plan["batch_size"])
    environment = {"cpu": "a CPU", "cores": 2, "gpus": more.get("gpus", [])}
    environment["versions"] = {"torch": "2.15.0"}
    known = [{"kind": "setting", "title": "made-up images", "plan": plan, "cases": rows}]
    known[0] |= {"environment": environment, "command": more.get("command", "python -m bench run")}
    known[0] |= {"flops_per_image": more.get("flops_per_image")}
    for case in rows:
        name = case["name"]
        if case["script"] == "mnmc_apex.py":
            known.append({"kind": "skip", "case": name, "reason": "apex not installed"})
            continue
        losses = [2.5 - 0.2 * k for k in range(5)]
        apart = [0.0, 0.0, 1e-7, 1e-6, 2e-6] if case["world"] > 1 else [0.0] * 5
        mine = [x * (1 + off) for x, off in zip(losses, apart, strict=True)]
        gate = {"passed": True, "distance": max(apart[:3]), "reason": "", "losses": mine}
        gate |= {"oracle_losses": losses, "update": [1e-7, 3e-6], "step_seconds": 0.2}
        known.append({"kind": "gate", "case": name} | gate)
    return known


def sample(case: dict, block: int, number: int, order: int, rate: float, time: float) -> dict:
    """One turn of a case at so many images/s."""
    window = {"images": 256, "seconds": 256 / rate, "data_seconds": 0.01, "loss": 1.0}
    return {
        "kind": "sample",
        "case": case["name"],
        "block": block,
        "round": number,
        "order": order,
        "begin": time,
        "warm_up": 3,
        "windows": [window | {"step": step} for step in (3, 4, 5, 6)],
        "memory_mib": 1000.0 * case["world"],
        "conditions": {"wall": 1.2, "steal": 0.0, "foreign": 0.0},
    }


def write(folder: Path, known: list[dict]) -> None:
    """The records as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in known)
    (folder / "records.jsonl").write_text(text)


class NVMLError(Exception):
    """As pynvml's: what a GPU does not know."""


def nvml(names: list[str], *answers: dict, driver: str = "580.1") -> ModuleType:
    """Instead of the module pynvml, GPUs of these names whose UUIDs are theirs.

    answers: what each look at a GPU finds in turn, the last for ever: clock, celsius, milliwatts,
    reasons. What one lacks raises NVMLError. The module counts the looks.
    """
    module, looks = ModuleType("pynvml"), []

    def answer(key: str) -> int:
        found = answers[min(len(looks), len(answers)) - 1] if answers else {}
        if key not in found:
            raise NVMLError
        return found[key]

    def clock(handle: str, kind: int) -> int:
        assert handle in names and kind == module.NVML_CLOCK_SM
        looks.append(handle)
        return answer("clock")

    def by_uuid(uuid: str) -> str:
        if uuid not in names:
            raise NVMLError
        return uuid

    module.looks, module.NVMLError = looks, NVMLError
    module.NVML_CLOCK_SM, module.NVML_TEMPERATURE_GPU = 1, 0
    module.nvmlInit = lambda: None
    module.nvmlSystemGetDriverVersion = lambda: driver
    module.nvmlDeviceGetCount = lambda: len(names)
    module.nvmlDeviceGetHandleByIndex = names.__getitem__
    module.nvmlDeviceGetName = str
    module.nvmlDeviceGetHandleByUUID = by_uuid
    module.nvmlDeviceGetClockInfo = clock
    module.nvmlDeviceGetTemperature = lambda handle, sensor: answer("celsius")
    module.nvmlDeviceGetPowerUsage = lambda handle: answer("milliwatts")
    module.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: answer("reasons")
    return module
