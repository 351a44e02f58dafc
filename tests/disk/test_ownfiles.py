"""Tests of file modes: a server's files are for its owner or group; files of an earlier form are refused by name."""

import os
import stat

import pytest

import memoire
from memoire.dashboard.collect.history import History
from memoire.disk import files
from memoire.errors import StateForeign
from netkit import SCHEMA

SHARED = stat.S_ISGID | 0o770
BODY = b"a model that is too large for the database" * 1000


@pytest.fixture(autouse=True)
def umask(request):
    former = os.umask(getattr(request, "param", 0))
    yield
    os.umask(former)


def modes(folder):
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in files}


def lived(folder):
    """Write every kind of file to a state folder with a server; return the files' modes while it runs and after."""
    with (
        memoire.Server("tcp://127.0.0.1:0", SCHEMA, state=folder) as server,
        memoire.connect(server.endpoint) as client,
    ):
        server.publish("policy", BODY)
        client.log("a line")
        client.update(60.0)
        server.snapshot(folder / "own.snapshot")
        modes_open = modes(folder)
    return modes_open | modes(folder)


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0, 0o077], indirect=True)
@pytest.mark.parametrize(
    ("folder_mode", "file_mode"), [(0o755, 0o600), (0o777, 0o600), (0o775, 0o600), (SHARED, 0o660)]
)
def test_files_of_a_folder_that_was_there_are_their_owners_or_its_group_s(tmp_path, folder_mode, file_mode):
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(folder_mode)
    mode_of = lived(folder)
    assert {
        "state.db",
        "state.db-wal",
        "state.db-shm",
        "state.db.backup-1",
        "committed",
        "lock",
        "own.snapshot",
    } <= set(mode_of)
    assert any(name.startswith("models/") for name in mode_of) and any(name.startswith("log/") for name in mode_of)
    assert set(mode_of.values()) == {file_mode}, {name: oct(mode) for name, mode in mode_of.items()}
    assert stat.S_IMODE(folder.stat().st_mode) == folder_mode, "the folder is its owner's business"


@pytest.mark.parametrize(("parent_mode", "folder_mode"), [(0o755, 0o700), (SHARED, SHARED)])
def test_a_folder_is_made_for_the_owner_or_for_the_group_of_the_one_it_is_in(tmp_path, parent_mode, folder_mode):
    """The chart's state is in a folder of a volume whose group is the Pod's fsGroup."""
    tmp_path.chmod(parent_mode)
    lived(tmp_path / "state")
    folders = [tmp_path / "state", tmp_path / "state" / "log", tmp_path / "state" / "models"]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [folder_mode] * 3


@pytest.mark.slow
def test_what_a_former_version_let_everybody_read_is_closed_at_the_next_start(tmp_path):
    folder = tmp_path / "state"
    names = lived(folder)
    for name in names:
        if (folder / name).exists():
            (folder / name).chmod(0o644)
    assert set(lived(folder).values()) == {0o600}


@pytest.mark.parametrize("content", [b"", b"what others need", b'{"pid": 0, "host": "x"}'])
def test_a_lock_that_is_a_link_is_refused_and_what_it_names_is_as_it_was(tmp_path, content):
    target, folder = tmp_path / "target", tmp_path / "state"
    target.write_bytes(content)
    folder.mkdir()
    (folder / "lock").symlink_to(target)
    with pytest.raises(StateForeign, match=r"lock is a symbolic link.*Nothing was changed"):
        memoire.Server(None, SCHEMA, state=folder)
    assert target.read_bytes() == content
    (folder / "lock").unlink()
    os.link(target, folder / "lock")
    with pytest.raises(StateForeign, match="another program's file"):
        memoire.Server(None, SCHEMA, state=folder)
    assert target.read_bytes() == content


def test_a_lock_that_holds_something_else_is_refused_and_left(tmp_path):
    (tmp_path / "lock").write_text("my padlock's number")
    with pytest.raises(StateForeign, match="another program's file"):
        memoire.Server(None, SCHEMA, state=tmp_path)
    assert (tmp_path / "lock").read_text() == "my padlock's number"


@pytest.mark.parametrize("content", [b'{"pi', b'{"pid": 71, "ho', b'{"pid": 71' + bytes(20), bytes(34)])
def test_a_lock_that_a_power_failure_has_torn_is_taken(tmp_path, content):
    """Lock files are not synced: a power failure cuts them off or fills them with zeros."""
    (tmp_path / "lock").write_bytes(content)
    with memoire.Server(None, SCHEMA, state=tmp_path):
        assert f'"pid": {os.getpid()}'.encode() in (tmp_path / "lock").read_bytes()


NAMES = ["state.db.new", "committed.new", "state.db.new-backup", "state.db.backup-1.new", "state.db.probe", "a.model",
         "models/a.model", "models/a.new", "models/1-2-3.new", "memory.snapshot.new", "snapshots/a.new"]  # fmt: skip


@pytest.mark.slow
def test_files_of_the_user_s_whose_names_drafts_might_have_stay_as_they_are(tmp_path):
    target, folder = tmp_path / "target", tmp_path / "state"
    target.write_text("what others need")
    for place, name in enumerate(NAMES):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target) if place % 2 else path.write_text("what others need")
        if name == NAMES[0]:
            lived(folder)
    (folder / "committed").unlink()
    lived(folder)
    assert [(folder / name).read_text() for name in NAMES] == ["what others need"] * len(NAMES)
    assert not [path for path in folder.rglob("*") if "draft" in path.name]


def test_append_and_create_refuse_links(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for opened in (files.append, files.create):
        with pytest.raises(OSError):
            opened(tmp_path / "link")
    assert not (tmp_path / "nowhere").exists()


def test_the_history_of_a_dashboard_is_its_owner_s(tmp_path):
    path = tmp_path / "history.db"
    for former in (None, 0o644):
        if former is not None:
            path.chmod(former)
        history = History(str(path))
        assert set(modes(tmp_path).values()) == {0o600}
        history.close()
