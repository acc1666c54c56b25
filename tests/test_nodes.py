"""python -m bench doctor: on two hosts made of network namespaces, sound and with faults."""

import re
import sys
import threading

import hosts
import pytest
from plant import FAULTS, both, possible, verdict
from real import lacking
from support import ROOT, free_port, refused, succeeded, write_idx

from bench.nodes import doctor, facts, findings
from bench.nodes.findings import Seen
from bench.nodes.meeting import Lost, Meeting
from bench.process import run

SECONDS = 90  # a run of doctor, with Python's start on a busy machine; its own limit is 55


@pytest.fixture
def lab():
    if reason := hosts.lacking():
        lacking(reason)
    with hosts.lab() as made:
        yield made


# Of tests/plant.py's faults, one of each part of doctor; that script plants all of them.
PLANTED = "mtu firewall-a ipv6-host clock-behind code no-flock shm cut other-count".split()


@pytest.mark.full
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(lab, name):
    fault = FAULTS[name]
    if not possible(fault):
        lacking(f"{name} needs {fault.needs}")
    reports = lab.doctor(*fault.plant(lab), limit=SECONDS)
    assert verdict(fault, reports) == "found", [report.out for report in reports]


@pytest.mark.full
def test_its_cures_make_torchrun_train(tmp_path):
    """As Debian has it: without them, no host can join. One clock is 25 s behind, too."""
    if reason := hosts.lacking():
        lacking(reason)
    with hosts.lab("--debian") as lab:
        reports = lab.doctor(*both(), limit=SECONDS)
        cures = [each["cure"] for each in reports[0].findings if each["kind"] == "address"]
        exports = [re.search(r"export (\w+)=(\w+)", cure).groups() for cure in cures]
        assert exports == [("GLOO_SOCKET_IFNAME", "eth0")] * 2
        data = write_idx(tmp_path / "data", 192, 101)
        late = {"LD_PRELOAD": str(hosts.build_shim(tmp_path)), "CLOCK_OFFSET": "-25"}
        jobs = []
        for k, host in enumerate(lab.hosts()):
            command = f"{sys.executable} -m torch.distributed.run --nnodes 2 --node-rank {k} "
            command += "--nproc-per-node 1 --master-addr hosta mnmc_ddp_launch.py --device cpu "
            command += f"--dataset fashion-mnist --arch shufflenet_v2_x0_5 --data {data} "
            command += "--epochs 1 --batch-size 64 --log-every 1"
            jobs.append(lab.start(host, f"exec {command}", dict(exports) | (late if k else {})))
        done = [lab.finish(host, job, 150) for host, job in zip(lab.hosts(), jobs, strict=True)]
    assert [each.code for each in done] == [0, 0], done
    assert "world_size=2" in done[0].out


@pytest.mark.full
def test_sound_hosts_under_torchrun(lab):
    """It takes number and address of each host from torchrun; a second rank has nothing to do. Both
    say the same: nothing found, and the all-reduce was right.
    """
    jobs = []
    for k, host in enumerate(lab.hosts()):
        command = f"exec {sys.executable} -m torch.distributed.run --nnodes 2 --node-rank {k} "
        command += "--nproc-per-node 2 --master-addr 10.77.0.1 -m bench doctor"
        jobs.append(lab.start(host, command, {}))
    done = [lab.finish(host, job, 150) for host, job in zip(lab.hosts(), jobs, strict=True)]
    assert [each.code for each in done] == [0, 0], done
    assert all(each.out.count("doctor: nothing found") == 1 for each in done), done
    assert all("all-reduce by gloo: 1 KB" in each.out for each in done), done


# Without hosts


@pytest.mark.parametrize(("host", "kind"), [("127.0.0.1", "own"), ("nowhere.invalid", "unknown")])
def test_nobody_is_there(host, kind):
    """It gives up, and says why; the first address is this machine's."""
    with pytest.raises(Lost) as lost:
        Meeting(2, 1, host, free_port(), 0.5)
    assert lost.value.kind == kind


def meet(count: int, act) -> list:
    """What `act` gives each of so many nodes that meet."""
    port, given = free_port(), [None] * count

    def one(k):
        given[k] = act(Meeting(count, k, "127.0.0.1", port, 10))

    threads = [threading.Thread(target=one, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return given


def test_a_node_that_leaves_is_named():
    def act(meeting):
        if meeting.node == 2:
            meeting.lines[0].socket.close()
            return None
        return meeting.exchange("a step", meeting.node, 5), meeting.notes

    given = meet(3, act)
    assert given[0] == ([0, 1, None], [[2, "went silent: a step"]])
    assert given[1][0] == [0, 1, None]


def test_the_only_other_node_leaves():
    def act(meeting):
        if meeting.node == 1:
            return meeting.lines[0].socket.close()
        with pytest.raises(Lost) as lost:
            doctor.look(meeting, {}, {}, None)
        return lost.value.kind

    assert meet(2, act) == ["left", None]


FACTS = {
    "name": "a",
    "interfaces": [{"name": "eth0", "addresses": ["10.0.0.1"], "mtu": 1500}],
    "own_name": ["10.0.0.1"],
    "gloo": "10.0.0.1",
    "gloo_ifname": None,
    "nccl": "eth0",
    "torch": "2.15.0",
    "nccl_version": "2.30",
    "python": "3.11.7",
    "gpus": ["H200, 580"] * 8,
    "cores": 64,
    "all_cores": 64,
    "shm_free": 2**35,
    "open_files": 65536,
    "infiniband": False,
    "memlock": -1,
    "variables": {},
    "command": "",
    "has_address": True,
}


def judged(address="10.0.0.2", **changed) -> list[tuple]:
    """The findings of two nodes, of which the second one has other facts, or is reached by another
    of its addresses.
    """
    other = FACTS | {"name": "b", "own_name": ["10.0.0.2"], "gloo": address}
    other["interfaces"] = [{"name": "eth0", "addresses": ["10.0.0.2", "fd77::2"], "mtu": 1500}]
    addresses, good = ["10.0.0.1", address], {"failed": None, "gloo": False, "port": 1}
    probes = [[good | {"node": 1 - k, "who": 1 - k}] for k in (0, 1)]
    clocks = [[0.0, 0.0], [0.001, 0.001]]
    seen = Seen([FACTS, other | changed], addresses, [], probes, clocks, None, {})
    return [(each.kind, each.level, each.node, each.cure) for each in findings.judge(seen)]


def test_equal_nodes_have_no_findings():
    assert judged() == []


@pytest.mark.parametrize(
    ("changed", "kind", "level", "cure"),
    [
        ({"torch": "2.14.0"}, "torch", "error", "install"),
        ({"nccl_version": "2.29"}, "nccl_version", "error", "install"),
        ({"gpus": ["H100, 580"] * 8}, "gpus", "warning", "equal nodes"),
        ({"nccl": "virbr0"}, "nccl", "error", "NCCL_SOCKET_IFNAME=eth0"),
        ({"nccl": "virbr0", "address": "fd77::2"}, "nccl", "error", "NCCL_SOCKET_IFNAME=eth0"),
        ({"infiniband": True, "memlock": 2**16}, "memlock", "warning", "ulimit -l unlimited"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_planted_here(changed, kind, level, cure):
    """Made-up facts: this machine has no GPU, no InfiniBand, and one torch."""
    ((found, how_bad, node, text),) = judged(**changed)
    assert (found, how_bad, node) == (kind, level, 1) and cure in text


@pytest.mark.parametrize(
    ("turns", "slow"),
    [
        ({0: [9, 9, 9], 1: [9, 9, 9]}, []),
        ({0: [9, 9, 9], 1: [1, 9, 1]}, []),  # other programs were busy in two turns
        ({0: [40, 9, 9], 1: [9, 9, 9]}, []),  # lucky in one
        ({0: [9, 9, 9], 1: [1, 2, 1]}, [1]),
    ],
)
def test_a_node_is_slow_in_every_turn(turns, slow):
    """Made-up MB/s; each node has received from the other one."""
    results = [{"sizes": [], "received": {1 - k: turns[1 - k]}} for k in (0, 1)]
    seen = Seen([FACTS, FACTS], ["10.0.0.1"] * 2, [], [], [], None, {}, results)
    assert [each.node for each in findings.speed(seen)] == slow


@pytest.mark.parametrize(
    ("nodes", "first"), [("node[07-09,12]", "node07"), ("a1,b2", "a1"), ("gpu-1", "gpu-1")]
)
def test_the_first_node_without_scontrol(nodes, first, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert facts.first_node(nodes) == first


@pytest.mark.parametrize(
    ("flags", "variables", "several"),
    [
        ([], {}, False),
        (["--nodes", "a,b"], {}, True),
        ([], {"GROUP_WORLD_SIZE": "2"}, True),
        ([], {"GROUP_WORLD_SIZE": "1", "SLURM_STEP_NUM_NODES": "2"}, False),
        ([], {"SLURM_STEP_NUM_NODES": "2"}, True),
    ],
)
def test_one_machine_or_several(flags, variables, several, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert doctor.several(flags) == several


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "29500"], "--host, --nnodes and --node"),
        (["--host", "a", "--nnodes", "2", "--node", "2"], "--node from 0 to"),
        (["--nodes", "nowhere1.invalid,nowhere2.invalid"], "--node"),
    ],
)
def test_mistakes_are_one_line(flags, said):
    done = run([sys.executable, "-m", "bench", "doctor", *flags], 60)
    refused(done, said, code=2)


@pytest.mark.parametrize("command", ["doctor", "comm", "watch"])
def test_the_folder_runs_by_itself(command, tmp_path):
    """Copied to a cluster, without the rest of the project."""
    (tmp_path / "nodes").symlink_to(ROOT / "bench/nodes")
    done = run([sys.executable, "-m", f"nodes.{command}", "--help"], 60, cwd=tmp_path)
    succeeded(done)
    assert "exit code" in done.out.lower()
