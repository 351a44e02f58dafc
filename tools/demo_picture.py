"""Picture of the dashboard for the README: the overview page during a run of the demo.

    python tools/demo_picture.py docs/pictures/overview.png

Starts `memoire demo --keep`, waits until the mean return is at least `MIN_RETURN`, and takes the picture. Ends the demo
in any case. Needs playwright, pillow, and chromium on the path.
"""

import argparse
import contextlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

SIZE = {"width": 1360, "height": 860}
COLOURS = 128
MIN_RETURN = 150.0
"""Mean return of the demo's episodes at which the picture is taken."""
DEADLINE = 240.0
SETTLE = 4_000
"""Milliseconds that the page gets to draw its curves."""
FLAGS = ("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync")


def address_of(demo: "subprocess.Popen[str]") -> str:
    """Return the dashboard's URL, from the demo's output."""
    assert demo.stdout is not None
    for line in demo.stdout:
        if match := re.search(r"dashboard: (http://\S+)", line):
            return match[1]
    raise SystemExit("the demo ended before it printed its dashboard's address: run `memoire demo` to see why")


def wait_for(url: str) -> float:
    """Wait until the mean return is at least `MIN_RETURN`; return it."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.HTTPError):  # 503 until the dashboard has asked the nodes
            with urllib.request.urlopen(f"{url}/api/overview", timeout=10.0) as answer:
                mean = json.load(answer)["learning"]["return_mean"]
            if mean is not None and mean >= MIN_RETURN:
                return float(mean)
        time.sleep(1.0)
    raise SystemExit(f"the demo's mean return did not reach {MIN_RETURN:g} within {DEADLINE:.0f} s")


def taken(url: str) -> bytes:
    """Return a screenshot of the overview page, as PNG bytes."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(f"{url}/#/overview")
        page.wait_for_selector(".hero .uplot canvas")
        page.wait_for_timeout(SETTLE)
        picture = page.screenshot()
        browser.close()
    return picture


def main() -> int:
    """Take the picture and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    args.file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "memoire", "demo", "--keep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as demo:
        try:
            url = address_of(demo)
            mean = wait_for(url)
            picture = Image.open(io.BytesIO(taken(url))).convert("RGB").quantize(COLOURS)
        finally:
            demo.send_signal(signal.SIGINT)
    picture.save(args.file, optimize=True)
    print(f"{args.file}: mean return {mean:.1f}, {args.file.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
