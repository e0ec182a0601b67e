"""The files for Kubernetes and SkyPilot: their fields by the schemas of their owners, and what
launch/torchrun.py makes of the environment that they give it.

The schemas hold the fields that are used here alone, after manifests/base/crds of
kubeflow/training-operator (release-1.9), the core API of Kubernetes, and sky/utils/schemas.py of
skypilot-org/skypilot.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from torch.distributed.run import parse_args

from tests.tiny_task import REPO
from tlt_megatron.runtime.rendezvous import Place, meeting_place
from tlt_megatron.trainer.command_line import read_command

TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}


def record(*required: str, **properties: object) -> dict[str, object]:
    """The schema of an object with these properties and no others."""
    kinds = {"type": "object", "additionalProperties": False}
    return kinds | {"properties": properties, "required": list(required)}


def listed(items: object) -> dict[str, object]:
    return {"type": "array", "items": items}


CONTAINER = record(
    *("name", "image"),
    name=TEXT,
    image=TEXT,
    workingDir=TEXT,
    command=listed(TEXT),
    resources=record(limits={"type": "object", "additionalProperties": {"type": "integer"}}),
    volumeMounts=listed(record("name", "mountPath", name=TEXT, mountPath=TEXT)),
)
VOLUME = record(
    "name",
    name=TEXT,
    persistentVolumeClaim=record("claimName", claimName=TEXT),
    emptyDir=record(medium={"enum": ["", "Memory", "HugePages"]}),
)
POD = record(
    "containers",
    terminationGracePeriodSeconds=COUNT,
    containers=listed(CONTAINER),
    volumes=listed(VOLUME),
)
NAME = record("name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"})
REPLICA = record(
    replicas=COUNT,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=record(spec=POD),
)
PYTORCHJOB = record(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=NAME,
    spec=record(
        "pytorchReplicaSpecs",
        nprocPerNode=TEXT,
        runPolicy=record(backoffLimit=COUNT),
        pytorchReplicaSpecs=record("Master", Master=REPLICA, Worker=REPLICA),
    ),
)
SKYPILOT = record(
    name=TEXT,
    num_nodes=COUNT,
    resources=record(
        accelerators=TEXT, image_id=TEXT, job_recovery=record(max_restarts_on_errors=COUNT)
    ),
    envs={"type": "object", "additionalProperties": {"type": ["string", "number", "null"]}},
    volumes={"type": "object"},
    run=TEXT,
)
SCHEMAS = {"kubernetes/pytorchjob.yaml": PYTORCHJOB, "skypilot/train.yaml": SKYPILOT}


def read(name: str) -> Any:
    return yaml.safe_load((REPO / "launch" / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_fields_are_those_that_their_owner_knows(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    jsonschema.validate(read(name), SCHEMAS[name])


def check_command(command: list[str]) -> Place | None:
    """The launcher takes the command, with settings that exist; where it meets the others."""
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
