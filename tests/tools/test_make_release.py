"""Release: each part reports its result or its failure; the workflow publishes the results without a password."""

import re
from pathlib import Path

import pytest
import yaml

import release

ROOT = Path(__file__).resolve().parents[2]

WORKFLOWS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
RELEASE = yaml.safe_load(WORKFLOWS["release"])


def raising(error):
    def fail():
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "status", "shown", "last"),
    [
        (release.NotHere("no docker"), 0, "NOT MADE HERE: no docker", "not made here: one, because no docker"),
        (release.Failed("too new"), 1, "FAILED: too new", "failed: one"),
    ],
)
def test_a_part_that_fails_or_cannot_be_made_here_is_named_and_the_others_are_made(error, status, shown, last, capsys):
    assert release.make_all({"one": raising(error), "two": lambda: "made two"}) == status
    lines = [f"one      {shown}", "two      made two", "1 of 2 parts are made", last]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_command_that_fails_shows_what_it_printed():
    with pytest.raises(release.Failed, match=r"(?s)sh -c echo why; exit 3\nwhy\n\nended with 3"):
        release.run(["sh", "-c", "echo why; exit 3"])


def test_every_place_that_names_the_version_names_the_same():
    assert len(set(release.numbers().values())) == 1
    assert set(release.numbers().values()) == {release.version()}
    with pytest.raises(release.Failed, match="one version is needed everywhere"):
        release.agreed({"CHANGELOG.md": "1", "memoire/version.py": "2"})


SAYS = """
x.whl is consistent with the following platform
tag: "{}".
"""


@pytest.mark.parametrize("platform", ["manylinux_2_34_x86_64", "manylinux_3_1_aarch64", "linux_x86_64"])
def test_a_wheel_that_asks_for_more_is_refused(platform):
    with pytest.raises(release.Failed, match="asks for more than manylinux_2_28"):
        release.oldest_platform(SAYS.format(platform))


def test_the_notes_are_the_newest_section_of_the_changelog():
    assert release.newest("# Changelog\n\nwords\n\n## 2 (today)\n\n- new\n\n## 1\n\n- old\n") == "- new\n"


def jobs(text):
    return yaml.safe_load(text)["jobs"].items()


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_read_unless_a_job_says_so_and_shells_see_values_of_the_event_as_variables_only(name):
    assert yaml.safe_load(WORKFLOWS[name])["permissions"] == {"contents": "read"}
    for job, about in jobs(WORKFLOWS[name]):
        assert about["timeout-minutes"] <= 90, job
        writes = {scope for scope, level in about.get("permissions", {}).items() if level == "write"}
        assert not writes or about.get("if") == "github.ref_type == 'tag'" or job == "sums", job
        assert not [step["run"] for step in about["steps"] if "${{" in step.get("run", "")], job


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_by_commit_and_no_secret_is_used(name):
    used = re.findall(r"uses: (\S+)(.*)", WORKFLOWS[name])
    assert used
    for action, note in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) and re.fullmatch(r"  # v[\d.]+", note), action
    assert "secrets." not in WORKFLOWS[name]
    pins = dict(action.split("@") for action, _ in used)
    assert all(pins[action.split("@")[0]] == action.split("@")[1] for action, _ in used), "one version of each"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_targets_and_parts_that_a_workflow_names_exist(name):
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    assert set(re.findall(r"\bmake ([a-z-]+)", re.sub(r"#.*", "", WORKFLOWS[name]))) <= targets
    for parts in re.findall(r"parts: ([a-z0-9 ]+)\}", WORKFLOWS[name]):
        assert set(parts.split()) <= set(release.PARTS)


def test_the_index_is_reached_by_trusted_publishing_alone():
    job = RELEASE["jobs"]["index"]
    assert job["environment"] == "pypi" and job["permissions"] == {"id-token": "write"}
    assert job["steps"][-1]["with"] == {"attestations": True}


def test_images_are_built_for_both_processors_and_the_dockerfile_names_none():
    assert "--platform linux/amd64,linux/arm64" in WORKFLOWS["release"]
    assert not re.findall(r"amd64|x86_64|arm64|aarch64", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
