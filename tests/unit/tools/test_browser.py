"""The live page in a real browser: it loads nothing from elsewhere, raises no error, and shows
figures and responses.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from docs.picture import BROWSER_OPTIONS
from tests.unit.tools.test_report import figures, make_run
from tests.unit.tools.test_run_responses import write_responses
from tests.unit.tools.test_running_step import RANKS, write
from tests.unit.tools.test_watch import get, serving

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LIMIT_S = 300.0  # for one page; a healthy machine needs seconds


def open_page(url: str, folder: Path, *, width: int, is_dark: bool) -> tuple[str, str]:
    """Return the page's elements after its scripts have run, and the browser's log.

    Skips without a browser that works.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser on PATH: {', '.join(BROWSERS)}")
    command = [
        *(browser, *BROWSER_OPTIONS, "--disable-dev-shm-usage", "--no-proxy-server"),
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        *("--enable-logging=stderr", "--v=0", f"--user-data-dir={folder / 'profile'}"),
        *(["--blink-settings=preferredColorScheme=0"] if is_dark else []),
        *(f"--window-size={width},1200", "--virtual-time-budget=2000", "--dump-dom", url),
    ]
    home = os.environ | {"HOME": str(folder)}
    try:
        done = subprocess.run(
            command, env=home, capture_output=True, text=True, errors="replace", timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{browser} does not end within {LIMIT_S:g} s")
    if done.returncode != 0 or "</html>" not in done.stdout:
        pytest.skip(f"{browser} does not work here ({done.returncode}): {done.stderr[-500:]}")
    return done.stdout, done.stderr


@pytest.mark.parametrize("width, is_dark", [(1400, False), (400, True)])
def test_the_live_page_in_a_browser(tmp_path: Path, width: int, is_dark: bool) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "summary.json").unlink()
    write_responses(run_dir, 3, ["first", "second"])
    write(run_dir, *RANKS)
    with serving(run_dir) as url:
        source = get(f"{url}/0/")
        page, log = open_page(f"{url}/0/", tmp_path, width=width, is_dark=is_dark)
    # an exception, or a resource that is not on this machine
    assert re.findall(r".*CONSOLE.*(?:Uncaught|net::ERR_).*", log) == []
    shown = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"""(src|href)=["'](\w+:)?//""", shown)
    drawn = re.findall(r'<div id="plot-(\w+)" class="plot js-plotly-plot">', shown)
    assert drawn == list(figures(source))
    names = [t["name"] for f in figures(source).values() for t in f["data"] if "name" in t]
    assert len(re.findall(r"<button aria-pressed=.true.>", shown)) == len(names)
    assert ("fill: rgb(230, 233, 237)" in shown) == is_dark  # the ink of the figures
    widest = max(map(float, re.findall(r'<svg class="main-svg"[^>]* width="([\d.]+)"', shown)))
    assert (widest > 600) == (width == 1400)
    assert "<h1>run</h1>" in shown
    assert "<h2>Step 5 is under way</h2>" in shown
    assert shown.count("<td>math</td>") == 2
