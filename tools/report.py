"""Writes a report of a run: one HTML page that needs no network.

    python tools/report.py runs/quickstart-20260101-120000 --steps 40-41

Reads metrics.jsonl, summary.json, config.yaml, trace.json, speculation.jsonl and rollouts/ of the run folder. The page goes
to <run folder>/report.html, or to `--out`. For things the run did not do, the page has a sentence. Needs `pip install -e .[report]`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0 written, 2 if a file is absent or broken or a plotting package is absent."""
    options = _parse(arguments)
    out = options.out or options.run_dir / "report.html"
    try:
        from tools.run_report.data import read_run
        from tools.run_report.page import render_page
        from tools.run_report.panels import build_panels
        from tools.run_report.responses import NUM_SHOWN, read_responses

        run = read_run(options.run_dir)
        responses = read_responses(options.run_dir, NUM_SHOWN)
        page = render_page(run, build_panels(run, options.steps), responses)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except ValueError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"report: needs the package {error.name}: pip install -e .[report]", file=sys.stderr)
        return 2
    print(f"report: {out} ({out.stat().st_size / 2**20:.1f} MiB)")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a finished run")
    parser.add_argument("--out", type=Path, help="HTML file; default RUN_DIR/report.html")
    parser.add_argument(
        "--steps", type=_steps, metavar="A-B", help="of the timeline; default the last two"
    )
    return parser.parse_args(arguments)


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a step such as 7, or steps such as 7-8"
        )
    return int(match[1]), int(match[2] or match[1])


if __name__ == "__main__":
    sys.exit(main())
