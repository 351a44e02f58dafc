"""Small worlds, searched in all orders of events: no rule is broken, and each rule is needed.

`make protocol` searches larger worlds, with every rule taken out in turn (docs/development/protocol.md).
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from netkit import DEADLINE
from protocol.canonical import name_of
from protocol.ends import CLIENTS, ClientEnd, ServerEnd
from protocol.explore import Search
from protocol.worlds import SMALL, WORLDS

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture
def still():
    """Replace the monotonic clock by a constant."""
    with mock.patch.object(time, "monotonic", lambda: 0.0):
        yield


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_a_small_world_keeps_all_rules(name: str) -> None:
    result = Search(SMALL[name]).run()
    assert (result.violation, result.example, result.is_whole) == ("", [], True)
    assert result.settled and result.states > 30 and name in WORLDS


@pytest.mark.usefixtures("still")
def test_a_search_that_is_cut_off_says_so() -> None:
    result = Search(SMALL["counts"], max_states=10).run()
    assert not result.is_whole and "the first 12 states" in str(result)


@pytest.mark.usefixtures("still")
def test_what_differs_in_one_attribute_has_another_name() -> None:
    one, two = ClientEnd(), ClientEnd()
    assert name_of(one) == name_of(two)
    two.session.counts.episodes += 1
    assert name_of(one) != name_of(two)
    server, other = ServerEnd(0, True), ServerEnd(0, True)
    assert name_of(server) == name_of(other)
    other.dispatcher.ledger.register_guest(CLIENTS[0], 0.0)
    assert name_of(server) != name_of(other)


def python(*words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(TESTS), str(TESTS / "support")]))
    command = [sys.executable, "-m", *words]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("answer_before_its_save", "was told that 1 episodes are safe, and 0 are on disk"),
        ("caches_without_since", "has pushed 1 caches to its account there, and it has pushed 0"),
        ("clients_without_an_account", "was told that 1 episodes are safe, and 0 are on disk"),
        ("epoch_of_an_answer", "takes its home for the one that was killed"),
    ],
)
def test_a_rule_that_is_taken_out_does_harm(word: str, what: str) -> None:
    done = python("protocol.run", "--only", word, "--workers", "1", "--states", "20000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert what in done.stdout and "1 searches" in done.stdout
    assert any(line.split()[:1] == ["1"] for line in done.stdout.splitlines()), "there is no example"
