"""What `memoire launch` is told: which programs, how many, and where."""

import socket

import pytest

from memoire.errors import EndpointError, ParameterError
from memoire.nodes.local import LaunchOptions, Nodes, free_ports, program, seed_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "learner.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "actor.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learner.py", ("learner.py",)),
        ("learner.py --lr 1e-3 --name 'a b'", ("learner.py", "--lr", "1e-3", "--name", "a b")),
        ("package.actor --x", ("package.actor", "--x")),
        ("memoire.rl.demo.actor", ("memoire.rl.demo.actor",)),
        ("-", ()),
    ],
)
def test_a_program_is_a_file_or_a_module_with_arguments(folder, text, words):
    assert program("LEARNER", text) == words


@pytest.mark.parametrize(
    "text", ["", "  ", "lerner.py", "no.such.module", "learner.py 'open", "--actors", "/no/such.py"]
)
def test_what_is_no_program_is_refused_by_its_place(folder, text):
    with pytest.raises(ParameterError, match="^ACTOR must be a "):
        program("ACTOR", text)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"actors": 0, "learner": ("a",)}, "--actors must be at least 1, got 0"),
        ({"restarts": -1, "learner": ("a",)}, "--restarts must be at least 0, got -1"),
        ({}, "LEARNER must be a program, or an ACTOR beside it"),
        ({"actor": ("a",)}, "LEARNER must be a program that makes a memoire.Server, or --env"),
    ],
)
def test_what_cannot_be_launched_is_refused(given, words):
    with pytest.raises(ParameterError) as caught:
        LaunchOptions(**given)
    assert words in str(caught.value)


def test_actors_alone_need_a_cluster_of_somebody():
    assert LaunchOptions(actor=("a",), endpoint="tcp://a:1", actors=2).names == ["actor-0", "actor-1"]
    assert LaunchOptions(actor=("a",), nodes=Nodes(tables="{}")).names == ["actor-0"]
    assert LaunchOptions(learner=("a",)).names == ["learner"] and LaunchOptions(learner=("a",)).embeds


def test_every_process_of_nearby_runs_has_a_seed_of_its_own():
    seeds = [seed_of(run, "learner", 0) for run in range(3)]
    seeds += [seed_of(run, "actor", rank) for run in range(3) for rank in range(900)]
    assert len(set(seeds)) == len(seeds)


def test_free_ports_are_a_row_that_nobody_listens_at():
    first = free_ports(0)
    assert first > 0 and free_ports(first) == first
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EndpointError, match=r"in use.*\. Give another --port \(0 finds 3 free ones in a row\)"):
            free_ports(port)
    with pytest.raises(EndpointError):
        free_ports(65535)
