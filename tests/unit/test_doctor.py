"""What the doctor says of this machine, of broken packages and of missing ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny_task import REPO, python
from tlt_megatron import doctor
from tlt_megatron.mcore.model import has_transformer_engine


def install(folder: Path, name: str, version: str, source: str) -> None:
    """A package `name` of this version, whose module `pytorch` is `source`."""
    module = folder / name.replace("-", "_")
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "pytorch.py").write_text(source)
    facts = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def run_doctor(*folders: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (REPO, *folders)))
    return python("-m", "tlt_megatron.doctor", PYTHONPATH=path)


def test_doctor_says_what_runs_here() -> None:
    done = run_doctor()
    assert done.returncode == 0, done.stderr
    for name in ("Python", "torch", "megatron-core", "GPUs", "SGLang"):
        assert f" {name} " in done.stdout
    runs, command = done.stdout.splitlines()[-2:]
    assert runs.startswith("This machine runs: policy: Megatron")
    assert command == "try: make quickstart"
    assert done.stderr == ""


def test_missing_packages_are_named_with_the_way_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: "")
    assert doctor.main() == 1
    printed = capsys.readouterr().out
    assert "pip install megatron-core==0.16.1" in printed
    assert "can run nothing yet: torch, megatron-core" in printed


def test_a_megatron_that_cannot_be_imported_is_said(tmp_path: Path) -> None:
    """As with SGLang's CUDA packages on a host without a driver: Megatron imports one of them."""
    source = "raise OSError('flash_mla.so') from OSError('libcuda.so.1: cannot open')"
    (tmp_path / "flash_mla.py").write_text(source)
    done = run_doctor(tmp_path)
    assert done.returncode == 1
    assert "cannot be imported: OSError: libcuda.so.1: cannot open" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(
        "This machine can run nothing yet: megatron-core"
    )


def test_a_torch_of_another_version_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    true_version = doctor._version
    for version in ("2.10.1", "2.15.0+cpu"):
        own = {"torch": version}
        monkeypatch.setattr(
            doctor, "_version", lambda name, own=own: own.get(name) or true_version(name)
        )
        assert doctor.main() == 1
        printed = capsys.readouterr().out
        assert f"MISSING torch               {version}" in printed
        assert "pip install 'torch>=2.11,<2.15'" in printed


@pytest.mark.parametrize(
    ("version", "source", "said"),
    [
        ("2.20.2", "", "version 2.20.2: must be"),
        (
            "2.10.0",
            "raise OSError('libcudart.so.13')",
            "cannot be imported: OSError: libcudart.so.13",
        ),
    ],
)
def test_broken_transformer_engine_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, source: str, said: str
) -> None:
    install(tmp_path, "transformer-engine", version, source)
    assert said in run_doctor(tmp_path).stdout
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="transformer-engine " + said.partition(":")[0]):
        has_transformer_engine(torch.bfloat16)
    assert not has_transformer_engine(torch.float32)
    sys.modules.pop("transformer_engine", None)  # later tests of this process import Megatron


def test_the_registrys_apex_is_not_nvidias(tmp_path: Path) -> None:
    install(tmp_path, "apex", "0.9.10", "")
    assert "not NVIDIA's" in run_doctor(tmp_path).stdout
