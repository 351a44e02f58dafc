"""Is a rising curve on the dashboard within two minutes of the one `helm install`, of which nothing is said?

The images are on the nodes; nothing else is there. The chart is installed as the guide has it, into a namespace that it
creates: with keys, tokens and policies, and the demo. Then the dashboard is opened as Helm's first three lines say, in a
real Chromium, and a picture is taken when the mean return is twice that of the first episodes: build/first-minutes.png.
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

from _kit import CANNOT, ROOT, end, table
from _kubernetes import kubekit

NAMESPACE, NAME = "first-minutes", "memoire"
WITHIN = 120.0
"""Seconds from the command to the picture."""
RISES = 2.0
"""Times the first mean return that the newest one is: a pole that is pushed at random falls after some 22 steps."""
POINTS = 8
"""Of the curve, at least: about one in two seconds."""
PICTURE = ROOT / "build" / "first-minutes.png"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def missing() -> str:
    """Why it cannot run here; "" if it can."""
    return kubekit.missing() or ("" if CHROMIUM else "chromium is not installed")


def command() -> list[str]:
    """The guide's first command, into this trial's namespace."""
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("helm install memoire") and "--create" in line]
    return line.replace(" rl ", f" {NAMESPACE} ").replace("helm", kubekit.HELM, 1).split()


def kubectl(*words: str) -> str:
    return str(kubekit.run("kubectl", "-n", NAMESPACE, *words))


@contextlib.contextmanager
def forwarded() -> Iterator[str]:
    """The dashboard's address, as `kubectl port-forward` says it."""
    words = ["kubectl", "-n", NAMESPACE, "port-forward", f"service/{NAME}-dashboard", ":80"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://localhost:{process.stdout.readline().partition(' -> ')[0].rpartition(':')[2]}"
        finally:
            process.kill()


def returns(url: str, token: str) -> list[float]:
    """The mean return over time, as the dashboard has it."""
    asked = urllib.request.Request(f"{url}/api/curves?name=return", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, timeout=10.0) as answer:
        found = json.load(answer)["mean"].get("return", [])
    return [float(point) for point in found if point is not None]


def rising(url: str, token: str) -> list[float]:
    """The curve, if it rises; nothing before."""
    found = returns(url, token)
    return found if len(found) >= POINTS and found[-1] >= RISES * found[0] else []


def look(url: str, token: str) -> list[float]:
    """Open the address in a browser and give the token; take a picture when the curve rises, and return that."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.goto(url)
        page.get_by_label("Token").fill(token)
        page.keyboard.press("Enter")
        page.wait_for_selector("#live[data-state=live]")
        curve: list[float] = kubekit.until(lambda: rising(url, token), 200.0, "a curve that rises")
        PICTURE.parent.mkdir(exist_ok=True)
        page.screenshot(path=str(PICTURE))
        browser.close()
    return curve


def main() -> int:
    if why := missing():
        print(f"It cannot run here: {why}.")
        return CANNOT
    os.chdir(ROOT)
    rows: list[tuple[str, str]] = []
    troubles: list[str] = []
    began = time.monotonic()

    def note(what: str) -> None:
        rows.append((what, f"{time.monotonic() - began:.0f}"))

    try:
        kubekit.run(*command(), timeout=250.0)
        note("helm install has ended")
        kubectl("wait", "pods", "--all", "--for=condition=Ready", "--timeout=200s")
        note("every Pod is ready")
        token = base64.b64decode(
            kubectl("get", "secret", f"{NAME}-tokens", "-o", "jsonpath={.data.dashboard}")
        ).decode()
        with forwarded() as url:
            kubekit.until(lambda: returns(url, token), 100.0, "the first episodes on the dashboard")
            note("the first episodes are on the dashboard")
            curve = look(url, token)
        note(f"the picture is taken: the mean return has risen from {curve[0]:.0f} to {curve[-1]:.0f}")
        if time.monotonic() - began > WITHIN:
            troubles.append(f"it took longer than {WITHIN:g} s")
    finally:
        kubekit.run(kubekit.HELM, "-n", NAMESPACE, "uninstall", NAME, timeout=120.0, check=False)
        kubekit.run("kubectl", "delete", "namespace", NAMESPACE, "--wait=false", check=False)
    print(f"`{' '.join(command())}`\n")
    print(table(["", "seconds since the command"], rows))
    return end(troubles)


if __name__ == "__main__":
    sys.exit(main())
