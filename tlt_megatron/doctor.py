"""Says what this machine can run, what is missing and how to get it.

    tlt doctor

Exit code 1 if it can run nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from tlt_megatron.rewards.sandbox import find_level
from tlt_megatron.runtime.typed_command import pip_command, tlt_command

PINS = {"megatron-core": ("0.16.1", "0.19.2"), "sglang": ("0.5.23",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: what was looked at, what is there, and what to do if it is missing or wrong."""

    name: str
    found: str
    advice: str = ""
    is_needed: bool = False  # without it nothing runs

    def __str__(self) -> str:
        mark = "ok" if not self.advice else "MISSING" if self.is_needed else "-"
        text = f"{mark:8}{self.name:20}{self.found}"
        return f"{text}\n{'':28}{self.advice}" if self.advice else text


def examine() -> list[Finding]:
    """Look at the interpreter, the packages and the devices. Imports torch and Megatron."""
    findings = [_python(), _torch()]
    has_torch = importlib.util.find_spec("torch") is not None
    findings.append(_megatron(has_torch))
    if has_torch:
        findings += [_memory(), _gpus()]
    install = pip_command(f"sglang=={PINS['sglang'][0]}")
    how = f"only for rollout.engine=sglang: {install} (make setup-sglang on a CPU)"
    sglang = _package("sglang", how, name="SGLang", is_needed=False)
    how = f"on a CPU, for fast decoding and rollout.batch_invariant: {pip_command('numba')}"
    numba = _package("numba", how, is_needed=False)
    findings += [numba, _transformer_engine(has_torch), _apex(), sglang, _sandbox()]
    return findings


def main() -> int:
    """Print the findings and what follows from them."""
    findings = examine()
    for finding in findings:
        print(finding)
    missing = [f.name for f in findings if f.is_needed and f.advice]
    if missing:
        print(
            f"This machine can run nothing yet: {', '.join(missing)}. On a fresh clone `make setup` installs them."
        )
        return 1
    present = {f.name for f in findings if not f.advice}
    policy = "Megatron on GPUs" if "GPUs" in present else "Megatron on CPU (gloo)"
    engines = "embedded and sglang" if "SGLang" in present else "embedded"
    print(f"This machine runs: policy: {policy}; rollout.engine: {engines}")
    is_checkout = Path("launch/torchrun.py").is_file()
    print(f"try: {'make quickstart' if is_checkout else tlt_command('init', '--help')}")
    return 0


def _python() -> Finding:
    advice = "" if (3, 11) <= sys.version_info[:2] <= (3, 12) else "must be Python 3.11 or 3.12"
    found = f"{platform.python_version()}, {platform.machine()}"
    return Finding(name="Python", found=found, advice=advice, is_needed=True)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _package(package: str, how: str, *, name: str = "", is_needed: bool = True) -> Finding:
    version = _version(package)
    advice = "" if version in PINS.get(package, (version or None,)) else how
    found = version or "not installed"
    return Finding(name=name or package, found=found, advice=advice, is_needed=is_needed)


def _torch() -> Finding:
    finding = _package("torch", "")
    numbers = re.match(r"(\d+)\.(\d+)", finding.found)
    is_known = numbers is not None and (2, 11) <= tuple(map(int, numbers.groups())) < (2, 15)
    return replace(finding, advice="" if is_known else pip_command("torch>=2.11,<2.15"))


def _megatron(has_torch: bool) -> Finding:
    finding = _package("megatron-core", pip_command("megatron-core==0.16.1"))
    if finding.advice or not has_torch:
        return finding
    from tlt_megatron.mcore.model import import_problem

    return replace(finding, advice=import_problem())


def _memory() -> Finding:
    from tlt_megatron.runtime.device import host_available_bytes

    free = host_available_bytes() / 2**30
    advice = "" if free >= 4 else "the quickstart takes about 4 GiB with its two ranks"
    found = f"{free:.1f} GiB, {os.cpu_count()} cores"
    return Finding(name="free memory", found=found, advice=advice)


def _gpus() -> Finding:
    from tlt_megatron.runtime.device import gpu_names

    names = gpu_names()
    advice = "" if names else "runs on the CPU. With a GPU: a driver and a CUDA build of torch"
    return Finding(name="GPUs", found="; ".join(names) or "torch sees none", advice=advice)


def _transformer_engine(has_torch: bool) -> Finding:
    package = "transformer-engine[core_cu13,pytorch]>=2.9,<2.12"
    how = f"GPUs only: {pip_command('--no-build-isolation', package)}"
    version = _version("transformer-engine")
    if not version or not has_torch:
        return Finding(name="Transformer Engine", found=version or "not installed", advice=how)
    from tlt_megatron.mcore import transformer_engine

    return Finding(name="Transformer Engine", found=version, advice=transformer_engine.problem())


def _apex() -> Finding:
    """The registry's package of this name is another one; NVIDIA's has fused kernels."""
    found, advice = "installed", ""
    if importlib.util.find_spec("apex") is None:
        found, advice = "not installed", "optional: github.com/NVIDIA/apex"
    elif importlib.util.find_spec("amp_C") is None:
        advice = "this is the registry's package of that name, not NVIDIA's: pip uninstall apex"
    return Finding(name="NVIDIA apex", found=found, advice=advice)


def _sandbox() -> Finding:
    level, why = find_level()
    kinds = {
        "bwrap": "bwrap: no network, files and programs of its own",
        "landlock": "landlock: no network, files or programs",
        "none": "none: rollout.tools=[python] is refused",
    }
    advice = f"for a stronger one: apt-get install bubblewrap ({why})" if why else ""
    return Finding(name="Python sandbox", found=kinds[level], advice=advice)


if __name__ == "__main__":
    raise SystemExit(main())
