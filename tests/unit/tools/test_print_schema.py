"""The JSON Schema of a config."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.tiny_task import REPO, python


@pytest.fixture(scope="module")
def schema() -> dict:
    return json.loads(python("-m", "tlt_megatron.cli", "schema").stdout)


def problems(schema: dict, text: str) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema)
    return [error.message for error in validator.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("path", sorted((REPO / "examples").rglob("*.yaml")), ids=lambda p: p.name)
def test_examples_are_valid(schema: dict, path: Path) -> None:
    assert problems(schema, path.read_text()) == []


@pytest.mark.parametrize(
    "text, said",
    [
        ("rollout: {num_promts: 3}", "num_promts"),
        ("rollouts: {}", "rollouts"),
        ("rollout: {num_prompts: three}", "is not of type 'integer'"),
        ("model: {dtype: float8}", "is not one of"),
        ("data: {eval: [1]}", "is not valid under any"),
    ],
)
def test_mistakes_are_found(schema: dict, text: str, said: str) -> None:
    (found,) = problems(schema, text)
    assert said in found
