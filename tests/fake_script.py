"""A fake for the harness's tests: the probe and the script that it starts, without training.

The script's name says what it does wrong: hang.py, crash.py, wrong.py, nan.py, stubborn.py (it
forks, and both processes ignore SIGTERM). With any other name, it does everything right.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--log-json", type=Path)
parser.add_argument("--save", type=Path)
parser.add_argument("--max-steps", type=int)
parser.add_argument("--epochs", type=int)  # in a gate each is one step
parser.add_argument("--log-every", type=int)
args, _ = parser.parse_known_args([word for word in sys.argv[1:] if word != "--"])
manner = next(Path(word).stem for word in sys.argv[1:] if word.endswith(".py"))
steps, batch = args.max_steps or args.epochs, 256
if manner == "hang":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    time.sleep(600)
if manner == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(60)
    time.sleep(0.3)
if manner == "crash":
    sys.exit("RuntimeError: planted crash")


def log(event, **fields):
    with open(args.log_json, "a") as file:
        file.write(json.dumps({"event": event, **fields}) + "\n")


log("start", script=manner, time=time.time())
before = 0
for step in range(args.log_every, steps + 1, args.log_every):
    loss = {"wrong": 2.001, "nan": float("nan")}.get(manner, 2.0) / step
    images, seconds = (step - before) * batch, 0.5 * (step - before)
    log("train", step=step, loss=loss, images=images, seconds=seconds, data_seconds=0.05)
    before = step
if args.save:  # as the probe writes weights
    import numpy as np

    for number in (1, 2, 3):
        step = number - (manner == "oracle")
        np.savez(args.save.with_name(f"{number}.npz"), weight=np.full(3, 0.1 * step))
log("eval", loss=1.0, accuracy=0.5, images=2000)
log("end", seconds=3.0, peak_memory_mib=100.0)
