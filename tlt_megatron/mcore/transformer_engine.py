"""Whether Transformer Engine can be used here. megatron-core hides a failed import, and then fails
with a NameError.
"""

from __future__ import annotations

import importlib
import importlib.metadata

from packaging.specifiers import SpecifierSet

SUPPORTED = SpecifierSet(">=2.9,<2.12")  # the range in megatron-core 0.16.1's own requirements


def installed_version() -> str:
    """Return the version of the installed package; "" without one."""
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return ""


def problem() -> str:
    """Return why the installed Transformer Engine cannot be used; "" if it can. Imports it."""
    version = installed_version()
    if version not in SUPPORTED:
        return f"version {version}: must be {SUPPORTED} for megatron-core 0.16.1"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a wheel of another CUDA or torch fails in many ways
        return f"cannot be imported: {type(error).__name__}: {error}"
    return ""
