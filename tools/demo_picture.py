"""The picture of the dashboard at work that README shows: the overview beside a real run of the demo.

    python tools/demo_picture.py docs/pictures/overview.png

Starts `memoire demo --keep`, waits until its episodes return much, and takes the picture. Needs playwright, pillow, and
chromium on the path. Ends the demo whatever happens.
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
ENOUGH = 150.0
"""Mean return from which on the curve has something to show."""
DEADLINE = 240.0
SETTLE = 4_000
"""Milliseconds in which the page draws its curves."""
FLAGS = ("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync")


def address_of(demo: "subprocess.Popen[str]") -> str:
    """Where the demo's dashboard is, as it prints it."""
    assert demo.stdout is not None
    for line in demo.stdout:
        if found := re.search(r"dashboard: (http://\S+)", line):
            return found[1]
    raise SystemExit("the demo ended without a dashboard; does `memoire demo` work here?")


def wait_for(url: str) -> float:
    """The mean return once it is `ENOUGH`."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.HTTPError):  # 503 until the nodes were asked once
            with urllib.request.urlopen(f"{url}/api/overview", timeout=10.0) as answer:
                mean = json.load(answer)["learning"]["return_mean"]
            if mean is not None and mean >= ENOUGH:
                return float(mean)
        time.sleep(1.0)
    raise SystemExit(f"the demo's episodes did not return {ENOUGH} within {DEADLINE:.0f} s")


def taken(url: str) -> bytes:
    """The overview as a PNG."""
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
    """Take the picture; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    given.file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "memoire", "demo", "--keep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as demo:
        try:
            url = address_of(demo)
            mean = wait_for(url)
            picture = Image.open(io.BytesIO(taken(url))).convert("RGB").quantize(COLOURS)
        finally:
            demo.send_signal(signal.SIGINT)
    picture.save(given.file, optimize=True)
    print(f"{given.file}: mean return {mean:.1f}, {given.file.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
