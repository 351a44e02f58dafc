"""Are totals exact through upgrades from the chart's version before this one, back, and forth again, while actors push?

The former chart is taken from the history of this repository, or is the folder $MEMOIRE_PREVIOUS_CHART. Its images are
$MEMOIRE_PREVIOUS_IMAGE and, for actors, $MEMOIRE_PREVIOUS_DEMO (NAME:TAG); else both have the same. $MEMOIRE_PREVIOUS_ACTOR
is the module that the former actors run. Every change replaces every Pod, as a new image does. Values are given again, and
by `--reset-then-reuse-values`, as people do. `--reuse-values` takes the former chart's defaults along: it works if these lack
nothing, and else is refused by name. At the end every actor's own counts are compared with the cluster's and the dashboard's.
An actor may end while its home is replaced, too. If that takes longer than the actor waits, its log says how many steps
were not acknowledged, and no more than these may be missing. A former program's proxies may give the clients of a server
that is away to another one: then some caches are missing, which their former home never heard of.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
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
    old = former_programs()
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
    for trouble in release.differences(words, may_move=bool(old)):
        release.check(False, trouble)
    shown = lambda: release.overview()["totals"]["steps"] == release.totals()["steps"]  # noqa: E731
    kubekit.until(shown, 60.0, "a dashboard with the cluster's total")
    untold = [one["untold"][0] for one in words.values() if "untold" in one]
    moved = sum("moved" in one for one in words.values())
    release.note("actors, each counted exactly", len(words) - len(untold) - moved)
    release.note("actors that a former proxy gave to another server, with all steps and not all caches", moved)
    release.note("actors that ended while their home was away too long", len(untold))
    release.note("steps that they said were not acknowledged", f"{sum(untold):,}")
    release.note("steps", f"{release.totals()['steps']:,}")


def named(variable: str) -> dict[str, str]:
    """An image as the chart's values have it; {} if the variable is not set."""
    name, _, tag = os.environ.get(variable, "").rpartition(":")
    return {"repository": name, "tag": tag} if name else {}


def former_programs() -> list[str]:
    """Values that give the former release its own images, and its actors their own program."""
    said: dict[str, object] = {"image": named("MEMOIRE_PREVIOUS_IMAGE"), "actors.image": named("MEMOIRE_PREVIOUS_DEMO")}
    if module := os.environ.get("MEMOIRE_PREVIOUS_ACTOR"):
        said["actors.command"] = ["python3", "-m", module]
    return as_words({name: value for name, value in said.items() if value})


def todays_programs() -> list[str]:
    """Values that take these away from a release whose values are used again."""
    said = yaml.safe_load(kubekit.VALUES.read_text(encoding="utf-8"))["actors"]
    actors = {"actors.image": {"tag": ""} | said["image"], "actors.command": said["command"]}
    return as_words({"image": {"repository": "memoire", "tag": ""}} | actors)


def as_words(values: dict[str, object]) -> list[str]:
    """Values as helm's command line has them."""
    return [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]


def replaced(name: str) -> list[str]:
    """Values that replace every Pod."""
    components = ("server", "proxy", "dashboard", "actors")
    return [word for each in components for word in ("--set", f"{each}.podAnnotations.upgrade={name}")]


def reuse_alone(release: Trial) -> None:
    try:
        reuse(release, "--reuse-values")
    except AssertionError as error:
        if not any(words in str(error) for words in ("missing prop", "is required")):
            raise
        release.note("--reuse-values was refused: the former defaults lack what is new")
        reuse(release, "--reset-then-reuse-values")


def reuse(release: Trial, how: str) -> None:
    today = todays_programs() if former_programs() else []
    release.helm("upgrade", release.name, str(kubekit.CHART), how, *today, *replaced(how), *WAIT)


def main() -> int:
    with tempfile.TemporaryDirectory() as to:
        former = previous(Path(to))
        why_not = (
            "there is no former version of the chart: no history of git here, and MEMOIRE_PREVIOUS_CHART is not set"
        )
        return trial(lambda release: play(release, former or Path()), lambda: "" if former else why_not)


if __name__ == "__main__":
    sys.exit(main())
