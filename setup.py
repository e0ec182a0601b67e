"""What pyproject.toml cannot say: the programs inside a wheel, and a README with absolute links."""

import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

URL = os.environ.get("REPO_URL", "").rstrip(
    "/"
)  # of the repository that publishes; docs use it too


class BuildWithPrograms(build_py):
    """A wheel holds launch/, tools/ and examples/ inside the package, where the command `tlt` finds
    them.
    """

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


def readme() -> str:
    """Return README.md. With REPO_URL set, its links and pictures also work on a package registry's
    page.
    """
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    if not URL:
        return text
    kind = {"": "blob", "!": "raw"}
    text = re.sub(
        r"(!?)(\[[^]]*\])\((?!https?:|#)", lambda m: f"{m[1]}{m[2]}({URL}/{kind[m[1]]}/main/", text
    )
    return re.sub(r'(src|srcset)="(?!https?:)', rf'\1="{URL}/raw/main/', text)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls={"Paper": "https://arxiv.org/abs/2511.16665"}
    | ({"Repository": URL} if URL else {}),
    cmdclass={"build_py": BuildWithPrograms},
)
