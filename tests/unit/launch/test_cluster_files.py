"""The files for Kubernetes and SkyPilot: their fields by the schemas of their owners, and what
launch/torchrun.py makes of the environment that they give it.

The fields are after manifests/base/crds of kubeflow/training-operator (release-1.9), the core API
of Kubernetes, and sky/utils/schemas.py of skypilot-org/skypilot.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from tests.tiny_task import REPO
from tlt_megatron.runtime.rendezvous import Place, meeting_place
from tlt_megatron.trainer.before.command_line import read_command

# Each field that is used, with its type or with a value that its owner knows. REPLICA stands for
# Master and Worker, POD for the specification of their pods.
KNOWN_FIELDS = {
    "kubernetes/pytorchjob.yaml": """
        apiVersion=kubeflow.org/v1 kind=PyTorchJob metadata.name=tlt
        spec.nprocPerNode:str spec.runPolicy.backoffLimit:int
        REPLICA.replicas:int REPLICA.restartPolicy=OnFailure
        POD.terminationGracePeriodSeconds:int
        POD.containers[].name:str POD.containers[].image:str POD.containers[].workingDir:str
        POD.containers[].command[]:str POD.containers[].resources.limits.nvidia.com/gpu:int
        POD.containers[].volumeMounts[].name:str POD.containers[].volumeMounts[].mountPath:str
        POD.volumes[].name:str POD.volumes[].persistentVolumeClaim.claimName:str
        POD.volumes[].emptyDir.medium=Memory
    """,
    "skypilot/train.yaml": """
        name:str num_nodes:int run:str envs.CONFIG:str envs.OPTIONS:str volumes./shared:str
        resources.accelerators:str resources.image_id:str
        resources.job_recovery.max_restarts_on_errors:int
    """,
}


def read(name: str) -> Any:
    return yaml.safe_load((REPO / "launch" / name).read_text(encoding="utf-8"))


def fields_of(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield each field below `path` as `path:type` and as `path=value`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from fields_of(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from fields_of(inner, f"{path}[]")
    else:
        path = re.sub(r"^\.spec\.pytorchReplicaSpecs\.(Master|Worker)", "REPLICA", path)
        path = path.replace("REPLICA.template.spec", "POD").removeprefix(".")
        yield f"{path}:{type(value).__name__}", f"{path}={value}"


@pytest.mark.parametrize("name", KNOWN_FIELDS)
def test_fields_are_those_that_their_owner_knows(name: str) -> None:
    known = set(KNOWN_FIELDS[name].split())
    unknown = [each for each in fields_of(read(name), "") if known.isdisjoint(each)]
    assert unknown == []


def check_command(command: list[str]) -> Place | None:
    """Check that the launcher takes the command, and return where it meets the other nodes."""
    options = parse_args(command)
    with contextlib.chdir(REPO):
        config, given = read_command([*options.training_script_args, "--print-config"])
    assert given.resume == "auto"
    assert config.run.dir.startswith("/shared/")
    assert options.nproc_per_node == "8"
    return meeting_place(options)


def test_the_operator_starts_a_node_per_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read("kubernetes/pytorchjob.yaml")["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    number = sum(each["replicas"] for each in replicas.values())
    # As pkg/controller.v1/pytorch/envvar.go and master.go of the operator set it for worker 2.
    monkeypatch.setenv("PET_NPROC_PER_NODE", spec["nprocPerNode"])
    monkeypatch.setenv("PET_NNODES", str(number))
    monkeypatch.setenv("PET_NODE_RANK", "3")
    monkeypatch.setenv("PET_MASTER_ADDR", "tlt-master-0")
    monkeypatch.setenv("PET_MASTER_PORT", "23456")
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert check_command(container["command"][2:]) == Place("tlt-master-0", 23456, 3, 4)


def test_skypilot_starts_a_node_per_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = read("skypilot/train.yaml")
    (tmp_path / "python").write_text('#!/usr/bin/env bash\nenv > env.txt\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    sky = {
        "SKYPILOT_NUM_NODES": "4",
        "SKYPILOT_NODE_RANK": "3",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
    }
    script = content["run"].replace("cd /opt/tlt_megatron", f"cd {tmp_path}")
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"} | sky | content["envs"],
        capture_output=True,
        text=True,
    )
    launcher, *command = done.stdout.splitlines()
    assert launcher == "launch/torchrun.py", done.stderr
    for line in (tmp_path / "env.txt").read_text().splitlines():
        if line.startswith("PET_"):
            monkeypatch.setenv(*line.split("=", 1))
    assert check_command(command) == Place("10.0.0.1", 29500, 3, 4)
