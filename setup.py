"""Packaging. CPU set-up installs torch==2.13.0 first (see Makefile); megatron-core is pinned: mcore/cpu.py adapts
exactly that version. NVIDIA apex is detected at run time; the package of that name on the registry is another."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildWithPrograms(build_py):
    """A wheel holds launch/, tools/ and examples/ inside the package, where the command `tlt` finds them."""

    def run(self) -> None:
        """Copy them, unless the install is editable: then they stand beside the package."""
        super().run()
        if self.editable_mode:
            return
        for folder in ("launch", "tools", "examples"):
            shutil.copytree(
                Path(__file__).with_name(folder),
                Path(self.build_lib, "tlt_megatron", "programs", folder),
                ignore=shutil.ignore_patterns("__pycache__"),
                dirs_exist_ok=True,
            )


setup(
    name="tlt_megatron",
    version="0.1.0",
    description="Reasoning-RL training that tames the long tail: TLT on Megatron-core, one torchrun program",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["tlt_megatron", "tlt_megatron.*"]),
    package_data={"tlt_megatron": ["py.typed", "config/other_names.txt"]},
    install_requires=[
        "torch>=2.11,<2.15",
        "megatron-core==0.16.1",
        "transformers>=5.10,<6",
        "numpy",
        "safetensors",
        "pyyaml",
        "tensorboard",
        "rich",
        "math-verify>=0.8",
        "pyarrow",
        "psutil",
        "packaging",
    ],
    cmdclass={"build_py": BuildWithPrograms},
    entry_points={
        "console_scripts": ["tlt = tlt_megatron.cli:main"],
        # SGLang loads it in each of its processes; it acts in engines that this package starts, and in no other.
        "sglang.srt.plugins": ["tlt_megatron = tlt_megatron.engines.sglang.plugin:register"],
    },
    extras_require={
        "dev": [
            "pytest>=9",
            "pytest-xdist",
            "hypothesis",
            "ruff==0.17.6",
            "basedpyright==1.40.2",
            "pre-commit",
        ],
        "report": ["jinja2>=3.1", "plotly>=6"],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10"],
        "wandb": ["wandb"],
        "sglang": ["sglang==0.5.23"],
        # The range of megatron-core 0.16.1. It builds against the torch that is there: --no-build-isolation.
        "cuda": ["transformer-engine[core_cu13,pytorch]>=2.9,<2.12"],
    },
)
