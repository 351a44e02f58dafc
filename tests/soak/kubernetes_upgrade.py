"""Are totals exact through upgrades from the chart's version before this one, back, and forth again, while actors push?

The former chart is taken from the history of this repository, or is the folder $MEMOIRE_PREVIOUS_CHART; $MEMOIRE_PREVIOUS_IMAGE
(NAME:TAG) is its image, else both have the same. Every change replaces every Pod, as a new image does. Values are given anew, and by
`--reset-then-reuse-values`, as people do; by `--reuse-values`, which takes the former chart's defaults along, it works where these
lack nothing, and else is refused by name. At the end every actor's own counts are compared with the cluster's.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _kit import ROOT
from _kubernetes import ACTORS_ONLY, Trial, kubekit, trial

WAIT = ("--wait", "--timeout", "150s")
FOLDER = "deploy/helm/memoire"


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def version(text: str) -> str:
    return next(line.split()[1] for line in text.splitlines() if line.startswith("version:"))


def previous(to: Path) -> Path | None:
    """The chart's folder as it was under the version before this one; None where there is none to be had."""
    if given := os.environ.get("MEMOIRE_PREVIOUS_CHART"):
        return Path(given)
    now = version((ROOT / FOLDER / "Chart.yaml").read_text(encoding="utf-8"))
    try:
        for commit in git("log", "--format=%H", "--", FOLDER).split():
            if version(git("show", f"{commit}:{FOLDER}/Chart.yaml")) != now:
                archive = subprocess.run(
                    ["git", "archive", commit, FOLDER], cwd=ROOT, stdout=subprocess.PIPE, check=True
                )
                subprocess.run(["tar", "-x", "-C", str(to)], input=archive.stdout, check=True)
                return to / FOLDER
    except (OSError, subprocess.CalledProcessError):
        pass
    return None


def play(release: Trial, former: Path) -> None:
    image = os.environ.get("MEMOIRE_PREVIOUS_IMAGE", "").rpartition(":")
    old = ("--set", f"image.repository={image[0]},image.tag={image[2]}") if image[0] else ()
    name = version((former / "Chart.yaml").read_text(encoding="utf-8"))
    release.install(*ACTORS_ONLY, *old, chart=former)
    release.note(f"chart {name} installed")
    with release.last_words() as words:
        release.goes_on("the installation")
        steps = release.steps()
        for what, change in (
            ("upgraded, with its values", lambda: release.install(*ACTORS_ONLY, *replaced("one"))),
            ("rolled back", lambda: release.helm("rollback", release.name, "1", *WAIT)),
            ("upgraded, with --reset-then-reuse-values", lambda: reuse(release, "--reset-then-reuse-values")),
            ("rolled back again", lambda: release.helm("rollback", release.name, "1", *WAIT)),
            ("upgraded, with --reuse-values", lambda: reuse_alone(release)),
        ):
            change()
            release.goes_on(what)
            before, steps = steps, release.steps()
            release.check(steps > before, f"{before} steps became {steps}: {what}")
            release.note(what)
        release.helm("test", release.name)
        release.note("helm test")
        release.end_actors(*ACTORS_ONLY)
    for trouble in release.differences(words):
        release.check(False, trouble)
    release.note("actors, each counted exactly", len(words))
    release.note("steps", f"{release.totals()['steps']:,}")


def replaced(name: str) -> list[str]:
    """Values that replace every Pod."""
    components = ("server", "proxy", "dashboard", "actors")
    return [word for each in components for word in ("--set", f"{each}.podAnnotations.upgrade={name}")]


def reuse_alone(release: Trial) -> None:
    try:
        reuse(release, "--reuse-values")
    except AssertionError as error:
        if "missing prop" not in str(error):
            raise
        release.note("--reuse-values was refused: the former defaults lack what is new")
        reuse(release, "--reset-then-reuse-values")


def reuse(release: Trial, how: str) -> None:
    release.helm("upgrade", release.name, str(kubekit.CHART), how, *replaced(how), *WAIT)


def main() -> int:
    with tempfile.TemporaryDirectory() as to:
        former = previous(Path(to))
        why_not = (
            "there is no former version of the chart: no history of git here, and MEMOIRE_PREVIOUS_CHART is not set"
        )
        return trial(lambda release: play(release, former or Path()), lambda: "" if former else why_not)


if __name__ == "__main__":
    sys.exit(main())
