"""Seconds of each phase of an RL step: runs the trainer itself on 2 CPU ranks and reads its metrics.

`python tools/bench_step.py --steps 6 --out build/bench/step_phases.json`. The first step is left out (warm-up).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table


def main() -> None:
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(options.ranks), "launch/pretrain_rl.py"),
            *(
                "--config",
                options.config,
                f"run.dir={folder}",
                f"run.num_steps={options.steps + 1}",
            ),
            *("data.eval=", "checkpoint.export_hf=false", "logging.progress=none"),
            *options.overrides,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines][1:]
    result = {"steps": len(rows), "ranks": options.ranks, "config": options.config, "phases_s": {}}
    step = statistics.median(row["timing_s/step"] for row in rows)
    table = Table(title=f"seconds of an RL step, {options.ranks} ranks, {len(rows)} steps")
    for column in ("phase", "median", "min", "max", "share of step"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for name in sorted(k for k in rows[0] if k.startswith("timing_s/")):
        values = [row[name] for row in rows]
        spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        result["phases_s"][name.removeprefix("timing_s/")] = spread
        cells = [f"{value:.3f}" for value in spread.values()]
        table.add_row(name.removeprefix("timing_s/"), *cells, f"{spread['median'] / step:.0%}")
    Console().print(table)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/quickstart.yaml")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after one of warm-up")
    parser.add_argument("--out", default="build/bench/step_phases.json")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return parser.parse_args()


if __name__ == "__main__":
    main()
