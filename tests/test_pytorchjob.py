"""bench/nodes/pytorchjob.yaml: torchrun and imagenet.py understand its command. It was not run on
a cluster.
"""

import pytest
import yaml
from support import ROOT, forked


@pytest.fixture(scope="module")
def job() -> dict:
    return yaml.safe_load((ROOT / "bench/nodes/pytorchjob.yaml").read_text())


def pods(job: dict) -> list[dict]:
    return [each["template"]["spec"] for each in job["spec"]["pytorchReplicaSpecs"].values()]


def test_volumes_and_gpus_fit(job):
    for pod in pods(job):
        (container,) = pod["containers"]
        mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
        assert mounted["shm"] == "/dev/shm"
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert str(resources["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]


def test_torchrun_and_the_script_understand_the_command(job, monkeypatch, tmp_path):
    """With the variables that the operator sets in the second pod."""
    from torch.distributed.run import get_args_parser

    variables = {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": job["spec"]["nprocPerNode"]}
    variables |= {"MASTER_ADDR": "imagenet-master-0", "MASTER_PORT": "23456"}
    for name, value in variables.items():
        monkeypatch.setenv(f"PET_{name}", value)
    (container,) = pods(job)[1]["containers"]
    assert container["command"] == ["torchrun"]
    args = get_args_parser().parse_args(container["args"])
    assert (args.nnodes, args.node_rank, args.nproc_per_node) == ("2", 1, "4")
    assert (args.master_addr, args.master_port) == ("imagenet-master-0", 23456)
    assert (args.rdzv_backend, args.training_script) == ("static", "imagenet.py")
    done = forked("imagenet.py", *args.training_script_args)
    assert "/data/imagenet" in done.err and done.code == 2, done  # all flags are known
