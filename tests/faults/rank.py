"""What torchrun starts in the fault tests: launch/pretrain_rl.py, watched by the probe."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.faults.probe import Plan
from tests.faults.processes import run_program

if __name__ == "__main__":
    text = os.environ["TLT_FAULTS_PLAN"]
    sys.exit(
        run_program(
            Path(os.environ["TLT_FAULTS_FOLDER"]),
            int(os.environ["RANK"]),
            sys.argv[1:],
            Plan.from_json(text) if text else None,
        )
    )
