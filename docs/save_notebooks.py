"""Runs the notebooks of examples/notebooks and keeps what they print and plot, after `make
quickstart-policy`.

    python docs/save_notebooks.py

`--python` names the interpreter of another environment, such as one with the wheel and without
this checkout.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "notebooks"


def main() -> None:
    """Run each notebook in its folder and write it with what it printed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("notebooks", type=Path, nargs="*", default=sorted(FOLDER.glob("*.ipynb")))
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    for path in options.notebooks:
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(
            notebook, timeout=900, resources={"metadata": {"path": path.parent}}
        )
        client.create_kernel_manager()
        client.km.kernel_spec.argv[0] = options.python
        started = time.monotonic()
        client.execute()
        for number, cell in enumerate(notebook.cells):
            cell.id = f"cell-{number}"
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = kept(cell.outputs, str(path.resolve().parents[2]))
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, path)
        print(f"{path}: {time.monotonic() - started:.0f} s")


def kept(outputs: list[nbformat.NotebookNode], root: str) -> list[nbformat.NotebookNode]:
    """Return one output with all text of a cell, without paths of this machine, and its plots.

    What the kernel itself writes to stderr is left out: packages warn there of its environment. A
    run's warnings are in its output.
    """
    outputs = [each for each in outputs if each.get("name") != "stderr"]
    plots = [each for each in outputs if "image/png" in each.get("data", {})]
    for plot in plots:
        plot.data.pop("text/plain", None)
    texts = [
        each.text if "text" in each else each.data["text/plain"]
        for each in outputs
        if each not in plots
    ]
    text = re.sub(r"\S*/bin/tlt\b", "tlt", "".join(texts).replace(f"{root}/", ""))
    text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    stream = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
    return stream + plots


if __name__ == "__main__":
    main()
