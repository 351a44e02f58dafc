"""The programs of both sides of docs/migrate.md run, and draw the true transitions of the same steps."""

import re
from pathlib import Path

import numpy as np
import pytest

import memoire

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate.md"
BLOCK = re.compile(r"^## From ([\w-]+)|^```python (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MISSING = "{} is not installed: docs/migrate.md compares it with memoire"
MULTI_STEP = {"cpprb": 3, "torchrl": 3, "ray": 3}


def blocks():
    """(peer, side, first line, code) of every block, in the page's order; the first one has no peer."""
    text = PAGE.read_text(encoding="utf-8")
    peer, heading = "", ""
    for found in BLOCK.finditer(text):
        if found.group(1):
            heading = found.group(1)
            continue
        peer = "" if not heading else found.group(2) if found.group(2) != "memoire" else peer
        yield peer, found.group(2), text.count("\n", 0, found.start(3)), found.group(3)


BLOCKS = list(blocks())
WITH_TORCH = "stable_baselines3"
"""The other side that is installed where torch is."""


def run(block, names):
    _, _, line, code = block
    exec(compile("\n" * line + code, str(PAGE), "exec"), names)  # noqa: S102 - code of our own page
    return names


@pytest.fixture
def names():
    return run(BLOCKS[0], {"__name__": "page"})


def rows_of(side, names):
    """What was drawn: obs, action, reward, discount (None where there is none) and next_obs of each sample."""
    batch = names["batch"]
    if side == "memoire":
        return batch.obs, batch.action, batch.reward, batch.discount, batch.next_obs
    if side == "cpprb":
        is_whole = batch["rew"] > 2.0  # windows of fewer than three steps have no later entry
        return batch["obs"], batch["act"][:, 0], batch["rew"][:, 0], None, np.where(is_whole, batch["next_obs"], np.nan)
    if side == "reverb":
        keys = sorted(("obs", "action", "reward", "discount", "next_obs"))
        columns = {key: np.stack([sample.data[place] for sample in batch]) for place, key in enumerate(keys)}
        return tuple(columns[key] for key in ("obs", "action", "reward", "discount", "next_obs"))
    if side == "torchrl":
        after = batch["next"]
        return batch["observation"], batch["action"], after["reward"][:, 0], None, after["observation"]
    if side == "stable_baselines3":
        discount = 0.99 * (1 - batch.dones[:, 0])
        return batch.observations, batch.actions[:, 0], batch.rewards[:, 0], discount, batch.next_observations
    assert side == "ray"
    obs, after = zip(*(episode.get_observations() for episode in batch), strict=True)
    actions, rewards = ([getattr(each, name)()[0] for each in batch] for name in ("get_actions", "get_rewards"))
    return np.stack(obs), np.array(actions), np.array(rewards), None, np.stack(after)


def truth(steps, at, multi_step):
    """reward, discount and next observation of the window that begins there, slowly."""
    total, discount = 0.0, 1.0
    for _, _, reward, terminated, truncated, next_obs in steps[at : at + multi_step]:
        total += discount * reward
        discount *= 0.99
        if terminated or truncated:
            return total, 0.0 if terminated else discount, next_obs
    return total, discount, next_obs


def are_true(rows, steps, multi_step):
    place = {obs.tobytes(): number for number, (obs, *_) in enumerate(steps)}
    drawn = [None if column is None else np.asarray(column) for column in rows]
    for row in range(len(drawn[0])):
        obs, action, reward, discount, next_obs = (None if column is None else column[row] for column in drawn)
        at = place[obs.tobytes()]
        expected = truth(steps, at, multi_step)
        assert action == steps[at][1]
        assert reward == pytest.approx(expected[0], rel=1e-6)
        assert discount is None or discount == pytest.approx(expected[1], rel=1e-6)
        if not np.isnan(next_obs).all():
            np.testing.assert_array_equal(next_obs, expected[2])
    assert len(drawn[0]) == 32 and len(set(map(bytes, drawn[0]))) > 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id="-".join(block[:2]), marks=[pytest.mark.torch] if block[1] == WITH_TORCH else [])
        for block in BLOCKS[1:]
    ],
)
def test_what_is_drawn_are_the_true_transitions(names, block):
    peer, side, _, _ = block
    if side != "memoire":
        pytest.importorskip(side, reason=MISSING.format(side))
    are_true(rows_of(side, run(block, names)), names["steps"], MULTI_STEP.get(peer, 1))


WORDS = [
    (call, wanted)
    for calls, names in re.findall(
        r"^\| (`\w[^|]*\)`) \| (`[^|]+`) \| [^|]+ \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    for call in re.findall(r"`([^`]+)`", calls)
    for wanted in [re.findall(r"`([^`]+)`", names)]
]


@pytest.mark.parametrize(("call", "wanted"), WORDS, ids=[call for call, _ in WORDS])
def test_whoever_writes_the_other_word_is_told_ours(call, wanted):
    names = {name: getattr(memoire, name) for name in memoire.__all__}
    names["buffer"] = memoire.Buffer({"obs": (np.float32, (2,)), "reward": np.float32}, 100)
    with pytest.raises(TypeError) as caught:
        eval(call, names)  # noqa: S307 - code of our own page
    assert any(word in str(caught.value) for word in wanted), str(caught.value)
    assert len(WORDS) > 40


def test_every_peer_has_both_sides():
    peers = ["cpprb", "reverb", "torchrl", "stable_baselines3", "ray"]
    assert BLOCKS[0][:2] == ("", "steps")
    assert [block[:2] for block in BLOCKS[1:]] == [(peer, side) for peer in peers for side in (peer, "memoire")]


# ----------------------------------------------------------------------------------------------- on-policy algorithms

ON_POLICY = re.compile(r"^```python on-policy (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def programs():
    """(library, first line, code) of every program that learns on-policy."""
    text = PAGE.read_text(encoding="utf-8")
    return [(each.group(1), text.count("\n", 0, each.start(2)), each.group(2)) for each in ON_POLICY.finditer(text)]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", programs(), ids=[library for library, _, _ in programs()])
def test_every_program_learns_from_as_many_steps(names, program):
    library, line, code = program
    pytest.importorskip("torch", reason=MISSING.format("torch"))
    if library != "memoire":
        pytest.importorskip(library, reason=MISSING.format(library))
    assert run(("", library, line, code), names)["steps"] == 1024


def test_every_library_with_a_program_is_named():
    assert [library for library, _, _ in programs()] == ["memoire", "torchrl", "stable_baselines3", "ray"]
