"""Records `tlt watch` while a run goes on, as docs/figures/watch.gif: `make figures`."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from docs.picture import BROWSER_OPTIONS
from tools.commands.watch import WatchServer
from tools.run_report.live import LiveRun

REPO = Path(__file__).resolve().parent.parent
TARGET = REPO / "docs" / "figures" / "watch.gif"
_WINDOW, _WIDTH, _COLOURS = (1100, 900), 880, 48
_SECONDS = 20.0


def main() -> None:
    """Start a run, take pictures until it ends, and join them. RuntimeError if the run fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", required=True)
    browser = parser.parse_args().browser
    frames: list[Image.Image] = []
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = (
            "--config",
            "examples/quickstart.yaml",
            f"run.dir={run_dir}",
            "run.num_steps=20",
        )
        command = ("launch/torchrun.py", "--standalone", "--nproc-per-node", "2")
        run = subprocess.Popen(
            [sys.executable, *command, "launch/pretrain_rl.py", *settings],
            cwd=REPO,
            stdout=subprocess.DEVNULL,
        )
        while not (run_dir / "metrics.jsonl").exists() and run.poll() is None:
            time.sleep(0.2)
        server = WatchServer([LiveRun(run_dir, "quickstart")], port=0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        is_last = False
        while not is_last:
            is_last = run.poll() is not None  # then one more, of the end
            times.append(time.monotonic())
            frames.append(take(browser, f"http://127.0.0.1:{server.port}/0/"))
        server.shutdown()
    if run.returncode:
        raise RuntimeError(f"the run ended with {run.returncode}: see what it printed above")
    join(frames, times)
    print(f"figures: {TARGET}, {len(frames)} pictures of {times[-1] - times[0]:.0f} s")


def take(browser: str, address: str) -> Image.Image:
    """Return a picture of the page."""
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "page.png"
        size = ",".join(map(str, _WINDOW))
        command = [
            *(browser, *BROWSER_OPTIONS, f"--user-data-dir={folder}/profile"),
            *(f"--window-size={size}", f"--screenshot={picture}"),
            *("--virtual-time-budget=2000", address),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        with Image.open(picture) as image:
            height = image.height * _WIDTH // image.width
            return image.convert("RGB").resize((_WIDTH, height), Image.Resampling.LANCZOS)


def join(frames: list[Image.Image], times: list[float]) -> None:
    """Write the pictures one after the other, each for its share of 20 seconds, the last for 3."""
    whole = times[-1] - times[0]
    shares = [(end - start) / whole for start, end in itertools.pairwise(times)]
    durations = [round(1000 * (_SECONDS - 3) * share) for share in shares] + [3000]
    palette = frames[-1].quantize(_COLOURS)
    first, *others = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
    first.save(TARGET, save_all=True, append_images=others, duration=durations, loop=0)


if __name__ == "__main__":
    main()
