"""The JSON Schema of a config."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.tiny_task import REPO, python
from tlt_megatron.config.load import dump_config
from tlt_megatron.config.schema import RunConfig


@pytest.fixture(scope="module")
def schema() -> dict:
    return json.loads(python("-m", "tlt_megatron.cli", "schema").stdout)


def problems(schema: dict, text: str) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema)
    return [error.message for error in validator.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("path", sorted((REPO / "examples").rglob("*.yaml")), ids=lambda p: p.name)
def test_examples_are_valid(schema: dict, path: Path) -> None:
    assert problems(schema, path.read_text()) == []


def test_defaults_are_valid(schema: dict) -> None:
    assert problems(schema, dump_config(RunConfig())) == []


@pytest.mark.parametrize(
    "text, said",
    [
        ("rollout: {num_promts: 3}", "num_promts"),
        ("rollouts: {}", "rollouts"),
        ("rollout: {num_prompts: three}", "is not of type 'integer'"),
        ("model: {dtype: float8}", "is not one of"),
        ("data: {eval: [1]}", "is not valid under any"),
        ("rollout: {num_prompts: -5}", "-5 is less than the minimum of 1"),
        ("rollout: {engine: vllm}", "'vllm' is not valid under any"),
        ("rollout: {temperature: 11}", "11 is greater than the maximum of 10"),
        ("run: {heartbeat_timeout_s: 0.5}", "0.5 is less than the minimum of 1"),
        ("eval: {temperature: -1}", "-1 is less than the minimum of 0"),
        ("algorithm: {advantage: grpoo}", "'grpoo' is not valid under any"),
        ("logging: {trackers: [mlflow]}", "'mlflow' is not valid under any"),
        ("reward: {function: {maths: 1.0}}", "is not valid under any"),
        ("optimizer: {lr: 0}", "0 is less than or equal to the minimum of 0"),
    ],
)
def test_mistakes_are_found(schema: dict, text: str, said: str) -> None:
    (found,) = problems(schema, text)
    assert said in found


@pytest.mark.parametrize(
    "text",
    [
        "rollout: {engine: my.py:build, environment: ''}",
        "reward: {function: {math: 1, my.py:f: 0.5}}",
        "reward: {function: package.module:f}",
        "logging: {trackers: [tensorboard, examples/trackers.py:MlFlow]}",
    ],
)
def test_code_of_ones_own_is_valid(schema: dict, text: str) -> None:
    assert problems(schema, text) == []


def test_every_setting_is_described(schema: dict) -> None:
    settings = [
        (f"{section}.{key}", setting.get("description"))
        for section, about in schema["properties"].items()
        for key, setting in about["properties"].items()
    ]
    assert len(settings) > 100
    assert [key for key, description in settings if not description] == []
