"""bench/nodes/pytorchjob.yaml: its fields are those of the operator's schema, and torchrun and
imagenet.py understand its command. It was not run on a cluster.
"""

import pytest
import yaml
from support import ROOT, forked

# Of the PyTorchJob resource in Kubeflow's Training Operator 1.9: the fields that the file uses. A
# set has all values that are allowed; a list has items of one kind; None is a quantity, of which
# Kubernetes takes numbers and strings; `required` fields must be there.
CONTAINER = {
    "required": ["name"],
    "name": {"pytorch"},
    "image": str,
    "workingDir": str,
    "command": [str],
    "args": [str],
    "env": [{"required": ["name"], "name": str, "value": str}],
    "ports": [{"required": ["containerPort"], "name": {"pytorchjob-port"}, "containerPort": int}],
    "resources": {
        kind: {"cpu": None, "memory": None, "nvidia.com/gpu": None}
        for kind in ("requests", "limits")
    },
    "volumeMounts": [
        {"required": ["name", "mountPath"], "name": str, "mountPath": str, "readOnly": bool}
    ],
}
VOLUME = {
    "required": ["name"],
    "name": str,
    "persistentVolumeClaim": {"required": ["claimName"], "claimName": str, "readOnly": bool},
    "emptyDir": {"medium": {"", "Memory"}, "sizeLimit": None},
}
REPLICA = {
    "replicas": int,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template": {
        "metadata": {"annotations": {"sidecar.istio.io/inject": str}},
        "spec": {"required": ["containers"], "containers": [CONTAINER], "volumes": [VOLUME]},
    },
}
SCHEMA = {
    "apiVersion": {"kubeflow.org/v1"},
    "kind": {"PyTorchJob"},
    "metadata": {"name": str},
    "spec": {
        "required": ["pytorchReplicaSpecs"],
        "nprocPerNode": str,
        "runPolicy": {"cleanPodPolicy": {"All", "Running", "None"}, "backoffLimit": int},
        "pytorchReplicaSpecs": {"Master": REPLICA, "Worker": REPLICA},
    },
}


@pytest.fixture(scope="module")
def job() -> dict:
    return yaml.safe_load((ROOT / "bench/nodes/pytorchjob.yaml").read_text())


def check(value, schema, path: str = "") -> None:
    """Asserts that a value has only the schema's fields, of its types."""
    if isinstance(schema, dict):
        assert isinstance(value, dict) and value.keys() <= schema.keys() - {"required"}, path
        assert value.keys() >= {*schema.get("required", [])}, path
        for key, each in value.items():
            check(each, schema[key], f"{path}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, path
        for each in value:
            check(each, schema[0], path)
    elif isinstance(schema, set):
        assert value in schema, (path, value)
    else:
        kinds = (int, str) if schema is None else schema
        assert isinstance(value, kinds) and (schema is bool or value is not True), (path, value)


def test_the_fields_are_those_of_the_schema(job):
    check(job, SCHEMA)
    wrong = job["spec"] | {"nprocPerNode": 4}
    with pytest.raises(AssertionError, match="nprocPerNode"):
        check(job | {"spec": wrong}, SCHEMA)


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
