"""pytest's settings: tests import bench and support, are of two tiers, hide the GPUs, are grouped.

Tests marked `full` run only with --full, or if -m chooses tests by their marks. Tests marked `gpu`
run only if -m names them; all others hide the GPUs. With CI=true a skipped test fails.

With pytest-xdist (`-n 2`) one worker runs a group of tests, one after the other. A file is a group,
since its tests share fixtures. What looks at the whole machine, or measures it, is one group. Long
groups come first, so that no worker is left with one at the end.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

pytest.register_assert_rewrite(
    "kills", "planted", "real", "support"
)  # so that they show what differs

import kills
import real
import support

from bench.backends import installed
from bench.ladder import TECHNIQUES
from bench.process import environment, run

# A background job of a shell ignores Ctrl-C, and one under nohup the end of its terminal. All
# processes that it starts would ignore them, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A thread of OpenMP that waits would keep a core busy, which the other worker's processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# These end processes of harnesses that were killed, measure how fast the machine is, or install.
MACHINE = "bench harness horovod processes schedule setup slurm".split()
A_RUN = {"test_a_run_on_a_gpu_has_its_table", "test_its_cells_run_in_order"}  # of the benchmark
LONG = "machine equality imagenet on_gpus resume libraries pieces gate pipeline site".split()
TOGETHER = {"interrupted": "imagenet"}  # both compare with one run

CI = os.environ.get("CI") == "true"


def with_gpus(config) -> bool:
    """Whether -m asks for the tests that need a GPU."""
    return bool(re.search(r"(?<!not )\bgpu\b", config.option.markexpr))


def group(nodeid: str, config) -> str:
    """The group of a test."""
    path, test = nodeid.split("::")[:2]
    name = Path(path).stem.removeprefix("test_")
    whole = name in MACHINE or test.partition("[")[0] in A_RUN or with_gpus(config)
    return "machine" if whole else TOGETHER.get(name, name)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="all tests: 25 to 50 minutes on two cores")
    text = "install what tests need: Slurm and Chromium by apt-get; Horovod, Sphinx and the "
    text += "libraries of techniques/ into this Python, OneFlow into .cache/; CI=true does the same"
    parser.addoption("--install", action="store_true", help=text)


def pytest_configure(config):
    if not with_gpus(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not (config.option.full or config.option.markexpr):
        real.shorten_epoch()
    support.INSTALL = config.option.install or CI
    worker = hasattr(config, "workerinput")  # of pytest-xdist: it starts behind this
    if support.INSTALL and config.option.full and not worker and not with_gpus(config):
        env = environment(PYTHON=sys.executable)
        for script in (
            ["bench/install_techniques.sh"],
            ["bench/install_oneflow.sh", support.ONEFLOW],
        ):
            done = run(["bash", *script], 1200, env)
            if done.code:  # the tests that need them fail with a reason
                print(done.last_line, file=sys.stderr)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Deals groups of tests to the workers. (pytest-xdist 3.8's own loadgroup finds no groups with
    pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid, config)

    config.option.loadscopereorder = False  # pytest_collection_modifyitems has ordered them
    return Groups(config, log)


def pytest_collection_modifyitems(config, items):
    hidden = [] if with_gpus(config) else ["gpu"]
    hidden += [] if config.option.full or config.option.markexpr else ["full"]
    left_out = [item for item in items if any(map(item.get_closest_marker, hidden))]
    # test_ladder.py repeats tests of other files, to run them without these.
    homes = {item.module.__name__ for item in items} - {"test_ladder"}
    left_out += [
        item
        for item in items
        if item.module.__name__ == "test_ladder" and item.function.__module__ in homes
    ]
    items[:] = [item for item in items if item not in left_out]
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(group(item.nodeid, config), len(LONG)))
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"with CI=true nothing may be skipped: {call.excinfo.value}"
    return report


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> list:
    """The flags for a small ImageFolder tree: 36 photographs to train on, 18 to test on."""
    folder = support.write_photos(tmp_path_factory.mktemp("photos"))
    flags = ["--dataset", "imagenet", "--data", folder, "--batch-size", 12, "--image-size", 32]
    return [*flags, "--epochs", 2, "--log-every", 1, "--device", "cpu"]


@pytest.fixture(scope="session")
def small_run(tmp_path_factory) -> list:
    """imagenet.py's flags for 12 steps in four epochs, on 36 small pictures."""
    return kills.small_run(tmp_path_factory.mktemp("small-run"))


@pytest.fixture(scope="session")
def whole_folder(small_run, tmp_path_factory) -> Path:
    """That run of two processes, which nobody interrupts."""
    out = tmp_path_factory.mktemp("whole")
    support.succeeded(*support.world(2, "imagenet.py", *small_run, "--out", out))
    return out


@pytest.fixture(scope="session")
def whole(whole_folder) -> dict:
    """Its numbers."""
    return kills.numbers(whole_folder)


@pytest.fixture(scope="module")
def slurm():
    """The environment of a two-node Slurm; at the end, nothing of it may be left."""
    if os.geteuid() or not Path("/etc/debian_version").exists():
        real.lacking("a Slurm of its own needs root, on Debian or Ubuntu")
    install = ["--install"] * support.INSTALL
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # short: it holds a socket
        with support.one_at_a_time("install"):
            up = run(["bash", "bench/slurm/up.sh", *install, "--gpus", 2, folder], 300)
        if up.code == 2:
            real.lacking(up.last_line)
        assert up.code == 0, up.err
        variable, value = re.fullmatch(r"export (\w+)=(.+)\n", up.out).groups()
        pids = [int(file.read_text()) for file in Path(folder, "run").glob("*.pid")]
        assert len(pids) == 4
        yield {variable: value}
        down = run(["bash", "bench/slurm/down.sh", folder], 240)
        assert down.code == 0, down.err
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="session")
def libraries():
    """The libraries of techniques/, DALI among them."""
    libraries = [s.library for s in TECHNIQUES if s.library and s.launcher != "oneflow"]
    missing = [name for name in libraries if not installed(name)]
    if missing:
        real.lacking(f"{', '.join(missing)} not installed: --install installs them")


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium that finds no host; --install installs Debian's packages."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        if os.geteuid() or not shutil.which("apt-get") or not support.INSTALL:
            real.lacking("no chromium and chromedriver: --install installs them, as root")
        apt = ["apt-get", "-qq", "-oDPkg::Lock::Timeout=120"]
        subprocess.run([*apt, "update"], capture_output=True, timeout=300)
        install = [*apt, "install", "--no-install-recommends", "chromium", "chromium-driver"]
        done = subprocess.run(install, capture_output=True, text=True, timeout=600)
        if done.returncode:
            real.lacking(
                f"chromium could not be installed: {done.stderr.strip().splitlines()[-1:]}"
            )
    options = webdriver.ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{flag}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()
