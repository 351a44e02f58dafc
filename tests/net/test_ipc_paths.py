"""A Unix socket's path: what lies there is looked at first, for ZeroMQ would remove it."""

import contextlib
import socket
from pathlib import Path

import pytest

import memoire
from memoire.errors import EndpointError
from netkit import SCHEMA


def server(path: Path) -> memoire.Server:
    return memoire.Server(f"ipc://{path}", SCHEMA)


def proxy(path: Path) -> memoire.Proxy:
    return memoire.Proxy(f"ipc://{path}", ["tcp://127.0.0.1:9"])


@pytest.mark.parametrize("node", [server, proxy])
@pytest.mark.parametrize("ending", ["", ".push", ".pub"])
def test_a_file_at_the_path_is_refused_and_left(tmp_path: Path, node, ending: str) -> None:
    path = tmp_path / f"relay{ending}"
    path.write_text("my thesis")
    with pytest.raises(EndpointError, match="something else than a socket at .*relay"):
        node(tmp_path / "relay")
    assert path.read_text() == "my thesis"


@pytest.mark.parametrize("node", [server, proxy])
def test_a_link_at_the_path_is_refused_and_left(tmp_path: Path, node) -> None:
    (tmp_path / "relay").symlink_to(tmp_path / "nowhere")
    with pytest.raises(EndpointError, match="something else than a socket"):
        node(tmp_path / "relay")
    assert (tmp_path / "relay").is_symlink()


@pytest.mark.parametrize("node", [server, proxy])
def test_a_path_where_somebody_listens_is_not_taken_away(tmp_path: Path, node) -> None:
    with server(tmp_path / "relay") as first:
        with pytest.raises(EndpointError, match="in use"):
            node(tmp_path / "relay")
        with memoire.connect(first.endpoint) as client:
            client.update(60.0)


@pytest.mark.parametrize("node", [server, proxy])
def test_a_path_that_a_killed_one_left_is_taken_over(tmp_path: Path, node) -> None:
    for ending in ("", ".push", ".pub"):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as left:
            left.bind(f"{tmp_path}/relay{ending}")
    with node(tmp_path / "relay") as made:
        assert made.endpoint == f"ipc://{tmp_path}/relay"


def test_a_socket_of_another_kind_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as other:
        other.bind(f"{tmp_path}/relay")
        with pytest.raises(EndpointError, match="cannot be asked whether somebody listens"):
            server(tmp_path / "relay")
