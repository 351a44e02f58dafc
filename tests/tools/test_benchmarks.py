"""Benchmarks, their pages and pictures."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pictures

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PAGES = FOLDER.parent / "docs" / "development" / "records"


@pytest.fixture
def modules(monkeypatch):
    """Import the benchmarks' modules; the import path stays set for their other modules."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import aims
    import measure
    import peers

    return aims, measure, peers


@pytest.fixture
def script(modules):
    import instructions

    return instructions


@pytest.fixture
def cliffwalk(modules):
    import cliffwalk

    return cliffwalk


class Timed:
    """Side of a contest whose turns take these seconds."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.most = list(seconds), 4

    def clock(self, count: int) -> float:
        assert count == 4
        return self.seconds.pop(0)


def test_ratios_are_taken_in_each_round(modules):
    _, measure, _ = modules
    theirs = {"slow": Timed(9.0, 2.0, 3.0, 20.0), "quick": Timed(9.0, 0.5, 0.5, 5.0)}  # the first turn does not count
    contests = measure.contest("x", Timed(9.0, 1.0, 1.0, 10.0), theirs, rounds=3, aims={"slow": "draw-W1-cpprb"})
    assert [(each.baseline, each.ratio.middle, each.ours.middle) for each in contests] == [
        ("slow", 2.0, 4.0),
        ("quick", 0.5, 4.0),
    ]
    assert [each.aim for each in contests] == ["draw-W1-cpprb", ""]


@pytest.mark.parametrize(("place", "page"), [("", "core"), ("core-16-cores.md", "core-16-cores")])
def test_a_report_goes_to_a_folder_or_to_a_page_that_says_of_which_machine_it_is(modules, tmp_path, place, page):
    _, measure, _ = modules
    one = measure.Spread(0.9, 1.0, 1.1)
    report = measure.Report("How fast?", ["A fact."], str(tmp_path / place))
    report.add(measure.Result("draw", "/s", one, one, one, "NumPy", aim="draw-W1-numpy"))
    report.finish("core")
    text = (tmp_path / f"{page}.md").read_text()
    title = "benchmarks/core.py" + ", 16 cores" * (page != "core")  # each page has another title
    assert text.startswith(f"# {title}\n\nHow fast?") and f"![ratios]({page}.svg)" in text
    assert json.loads((tmp_path / f"{page}.json").read_text())["aims"] == {"draw-W1-numpy": [0.9, 1.0, 1.1]}
    files = {f"{page}.{kind}" for kind in ("md", "svg", "json")} | {"results.md"}  # the table of all aims
    assert {each.name for each in tmp_path.iterdir()} == files


def test_the_page_of_aims_is_what_the_figures_make_of_it(modules):
    aims, *_ = modules
    assert (PAGES.parents[1] / "results.md").read_text(encoding="utf-8") == aims.render(), (
        "run: python benchmarks/aims.py"
    )


IMPORTS = """
import importlib, pathlib, sys
for path in sorted(pathlib.Path(".").glob("*.py")):
    try:
        importlib.import_module(path.stem)
    except ModuleNotFoundError as error:
        if error.name not in sys.argv[1:]:
            raise
    print(path.stem)
"""


def test_every_benchmark_finds_what_it_imports():
    """Only modules that tests do not install may be missing."""
    optional = ("ale_py", "gymnasium", "stable_baselines3", "torch")
    command = [sys.executable, "-c", IMPORTS, *optional]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(path.stem for path in FOLDER.glob("*.py"))


def test_an_aim_is_reached_missed_or_not_measured(modules, tmp_path):
    aims, measure, _ = modules
    known = aims.read()
    key = "draw-W1-numpy"
    assert "**missed**" not in aims.render(tmp_path) and "not measured" in aims.render(tmp_path)
    for ratio, missed in ((0.79, ", **missed**"), (0.8, "")):
        measure.record(str(tmp_path), "learner", {key: measure.Spread(ratio, ratio, ratio)})
        row = next(line for line in (tmp_path / "results.md").read_text().splitlines() if known[key].against in line)
        assert f"| 0.8 | {ratio} ({ratio} to {ratio}){missed} |" in row
    assert known["atari-bytes"].is_reached(0.2) and not known["atari-bytes"].is_reached(0.21)


def test_every_aim_names_one_bound_and_a_benchmark(modules):
    aims, *_ = modules
    for key, aim in aims.read().items():
        assert (aim.least is None) != (aim.most is None), key
        script = aim.shown_by.partition("-")[0]  # after the dash comes the machine
        assert (FOLDER / f"{script}.py").exists() or not (PAGES / f"{aim.shown_by}.json").exists(), key


def fake_peer(peers, monkeypatch, folder: Path, source: str):
    """Return a peer whose environment is this Python, and whose side is `source`."""
    (folder / "with_cpprb.py").write_text(source)
    for name in ("child.py", "tasks.py"):
        (folder / name).write_text((FOLDER / "peers" / name).read_text())
    monkeypatch.setattr(peers, "HERE", folder)
    monkeypatch.setattr(peers, "environment_of", lambda name: (Path(sys.executable).parent.parent, "1.2"))
    return peers.PeerGroup("cpprb")


def test_a_peer_takes_its_turns_in_a_process_of_its_own(modules, monkeypatch, tmp_path):
    source = """
class Side:
    def __init__(self, factor): self.factor = factor
    def clock(self, count): print("no answer"); return self.factor * count
side = Side
def plain(): return lambda: None
"""
    *_, peers = modules
    peer_group = fake_peer(peers, monkeypatch, tmp_path, source)
    sides = peer_group.sides({"cpprb": ("side", 0.5), "torchrl": ("side", 1)})
    assert list(sides) == ["cpprb 1.2"]  # torchrl was not asked for
    assert sides["cpprb 1.2"].clock(6) == 3.0
    assert peer_group.sides({"cpprb": ("plain",)})["cpprb 1.2"].clock(2) >= 0.0
    peer_group.stop()
    assert peer_group.facts() == [] and not peer_group.running


def test_the_benchmark_of_frames_runs_and_answers_its_aim(modules, tmp_path):
    command = [sys.executable, FOLDER / "frames.py", "--quick", "--only", "pong", "--write", tmp_path]
    subprocess.run(command, check=True, timeout=110, stdout=subprocess.DEVNULL)
    page = (tmp_path / "frames.md").read_text(encoding="utf-8")
    assert "| pong |" in page and "![shares](frames.svg)" in page
    (share, *_) = json.loads((tmp_path / "frames.json").read_text())["aims"]["atari-bytes"]
    assert 0.0 < share < 0.2
    assert (tmp_path / "frames.svg").stat().st_size < 60_000


def test_costs_are_the_line_through_the_points(modules):
    import scaling

    def point(messages, size, seconds):
        return scaling.Point("x", messages, 256 * messages, size * messages, 1.0, seconds * messages, 0.0)

    points = [point(count, size, 1e-4 + 5e-10 * size) for count, size in ((10, 1e4), (7, 1e5), (3, 1e7))]
    message, byte = scaling.line_through(points, lambda each: each.server)
    assert (message, byte) == (pytest.approx(1e-4), pytest.approx(5e-10))
    assert scaling.line_through([point(1, 1e3, 2e-4), point(1, 1e6, 1e-4)], lambda each: each.server)[1] == 0.0


def test_the_pictures_are_as_their_records_say():
    assert pictures.main(["--check"]) == 0, "make pictures"


def test_a_picture_that_differs_from_its_record_is_found(tmp_path):
    same, other, missing = (tmp_path / name for name in ("same.svg", "other.svg", "missing.svg"))
    same.write_text("<svg/>", encoding="utf-8")
    other.write_text("<svg/>", encoding="utf-8")
    assert pictures.stale({same: "<svg/>", other: "<g/>", missing: "<svg/>"}) == {other: "<g/>", missing: "<svg/>"}


DUMP = """# callgrind format
version: 1
creator: callgrind-3.19.0
desc: Trigger: Client Request: draw 256
positions: line
events: Ir
ob=/somewhere/memoire/_core.abi3.so
fl=_core.c
fn=tree_find
0 100
cfn=pow
cob=/usr/lib/libm.so.6
calls=3 0
0 999
0 20
ob=/usr/lib/libm.so.6
fn=pow
0 999
ob=/somewhere/memoire/pool/_draw.abi3.so
fn=gather
0 8
ob=/somewhere/msgspec/_core.cpython-311-x86_64-linux-gnu.so
fn=decode
0 4
ob=/usr/lib/libpython3.11.so.1.0
fn=eval
0 40
"""


def test_what_a_function_called_is_counted_once(script) -> None:
    name, counts = script.read_dump(DUMP)
    assert name == "draw 256"
    assert counts == {
        ("_core.abi3.so", "tree_find"): 120,
        ("libm.so.6", "pow"): 999,
        ("_draw.abi3.so", "gather"): 8,
        ("_core.cpython-311-x86_64-linux-gnu.so", "decode"): 4,
        ("libpython3.11.so.1.0", "eval"): 40,
    }


HERE = {"compiler": "x86_64, gcc 12", "python": "3.11.7", "numpy": "2.4.6"}
COUNTED = {"machine": HERE, "instructions": {"draw": {"engine": 1000, "with Python": 2000}}}


@pytest.mark.parametrize(
    ("here", "kinds", "start"),
    [
        (HERE, ["engine", "with Python"], ""),
        (HERE | {"numpy": "3.0.0"}, ["engine"], "only the engine was compared, the record is of numpy 2.4.6, here 3.0"),
        (HERE | {"compiler": "arm64, clang"}, [], "nothing was compared, the record is of compiler x86_64, gcc 12"),
    ],
)
def test_only_counts_of_equal_versions_are_compared(script, here: dict[str, str], kinds: list[str], start: str) -> None:
    compared, why = script.comparable(COUNTED, here)
    assert compared == kinds and why.startswith(start)


def test_more_than_the_tolerance_is_too_much(script) -> None:
    kinds = ["engine", "with Python"]
    assert script.too_many(COUNTED, {"draw": {"engine": 1040, "with Python": 1500}}, kinds) == []
    (complaint,) = script.too_many(COUNTED, {"draw": {"engine": 1100, "with Python": 2000}}, kinds)
    assert complaint == "draw: 1100 instructions (engine), 10.0% more than 1000"
    assert script.too_many(COUNTED, {"draw": {"engine": 9999, "with Python": 9999}}, []) == []
    assert script.too_many(COUNTED, {"new": {"engine": 1, "with Python": 1}}, ["engine"]) == ["new: not in the record"]


def test_the_memory_holds_every_sequence_of_actions_and_one_pays(cliffwalk):
    for length in (2, 5):
        steps = cliffwalk.walk(length)
        assert sum(last for *_, last in steps) == 2**length
        assert sum(reward for _, _, reward, _ in steps) == 1.0
        assert len(steps) == 2 ** (length + 1) - 2
    np.testing.assert_allclose(cliffwalk.truth(2), [[0.5, 0.0], [0.0, 1.0]])


def test_prioritized_draws_learn_in_fewer_updates_in_the_papers_order(cliffwalk):
    updates = cliffwalk.measure([8], 3, lambda line: None)
    median = {name: statistics.median(by_length[8]) for name, by_length in updates.items()}
    assert median["greedy"] < median["proportional"] < median["uniform"] / 2
    assert median["greedy"] < median["rank-based"] < median["uniform"] / 2
