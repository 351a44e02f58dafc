"""A server over its real files: what it acknowledged is there after it was cut off, and a backup is healed by clients."""

import shutil

import numpy as np
import pytest

from memoire.accounting.logbook import LineFilter
from memoire.disk.state_folder import Store
from memoire.errors import StateCorrupt, StateForeign, StateLocked
from memoire.tables.table import Table
from netkit import QUICK, until

pytestmark = pytest.mark.slow


class OnDisk:
    """A server with a folder, that is cut off and started again at the same addresses."""

    def __init__(self, cluster, folder, store_by):
        self.cluster, self.folder, self.places = cluster, folder, {}
        self.store = None

        def opened(folder, name, default_name, limits, clock):
            self.store = Store(folder, name, default_name=default_name, limits=limits, clock=clock)
            return self.store

        store_by(opened)

    def start(self, **options):
        asked = {"name": "home", "state_dir": self.folder, "limits": QUICK} | self.places | options
        made = self.cluster.server(**asked)
        self.places = {
            "endpoint": made.endpoint, "push_endpoint": made.push_endpoint, "pub_endpoint": made.pub_endpoint
        }  # fmt: skip
        return made

    def put_back(self):
        """As the text of the error says."""
        (self.folder / "state.db").rename(self.folder / "state.db.away")
        for name in ("state.db-wal", "state.db-shm"):
            (self.folder / name).unlink(missing_ok=True)
        shutil.copy(self.folder / "state.db.backup-1", self.folder / "state.db")


@pytest.fixture
def on_disk(cluster, tmp_path, store_by):
    return OnDisk(cluster, tmp_path / "state", store_by)


def test_a_server_goes_on_where_it_ended(cluster, on_disk):
    server = on_disk.start()
    client = cluster.client(server, limits=QUICK)
    for n in range(5):
        client.on_episode(0, 10, 1.0)
        client.log(f"line {n}")
    client.update()
    server.publish("policy", b"x" * 50_000)
    server.close()
    server = on_disk.start()
    assert (server.total_episodes, server.stats().durable) == (5, True)
    assert [entry.line.text for entry in server.lines()] == [f"line {n}" for n in range(5)]
    assert server.model("policy").value == b"x" * 50_000
    client.on_episode(0, 10, 1.0)
    client.log("after")
    client.update()
    assert server.total_episodes == 6
    assert [entry.line.text for entry in on_disk.store.search(server.run, LineFilter(text="after"))] == ["after"]


def test_prompts_whose_answers_are_gone_wait_again_and_are_counted(cluster, on_disk):
    facts = {"schema": None, "tables": {"p": Table({"x": (np.uint8, (None,))}, storage="prompts", group=1)}}
    server = on_disk.start(**facts)
    prompts = server.prompts("p")
    prompts.add({0: b"a", 1: b"b"})
    lease = prompts.lease()[0]
    prompts.answer(lease, 0, {"x": np.zeros(100_000, np.uint8)})
    server.close()
    for path in (on_disk.folder / "prompts").iterdir():
        path.unlink()
    server = on_disk.start(**facts)
    stats = server.stats().tables["p"].prompts
    assert (stats.waiting, stats.incomplete) == (2, 1)
    assert "answers of 1 prompts are missing" in server.stats().missing[0]


def test_a_backup_that_was_put_back_is_healed_by_two_updates_of_each_client(cluster, on_disk):
    server = on_disk.start()
    clients = [cluster.client(server, limits=QUICK) for _ in range(3)]

    def count(episodes):
        for client in clients:
            for _ in range(episodes):
                client.on_entries(10)
                client.on_episode(0, 10, 1.0)
            client.update()

    count(4)
    on_disk.store.back_up()
    count(3)
    assert server.total_episodes == 21
    on_disk.folder.joinpath("state.db.backup-1").rename(on_disk.folder / "kept")
    server.close()
    (on_disk.folder / "kept").rename(on_disk.folder / "state.db.backup-1")
    on_disk.put_back()
    server = on_disk.start()
    assert server.stats().restored == 1
    for client in clients:
        client.update()
        client.update()
    assert (server.total_episodes, server.total_steps) == (21, 210)
    count(1)
    assert server.total_episodes == 24


def test_a_server_is_not_made_over_a_folder_that_is_not_its_own(cluster, on_disk, tmp_path):
    server = on_disk.start()
    with pytest.raises(StateLocked):
        on_disk.start(endpoint="tcp://127.0.0.1:0", push_endpoint=None, pub_endpoint=None)
    server.close()
    with pytest.raises(StateForeign):
        on_disk.start(name="another")
    damaged = bytearray((on_disk.folder / "state.db").read_bytes())
    damaged[damaged.index(b"default")] ^= 1
    (on_disk.folder / "state.db").write_bytes(damaged)
    with pytest.raises(StateCorrupt, match="Put a backup back"):
        on_disk.start()
    on_disk.put_back()
    on_disk.start()


def test_a_server_whose_disk_fails_acknowledges_nothing_more_and_says_why(cluster, on_disk):
    server = on_disk.start()
    client = cluster.client(server, limits=QUICK)
    client.update()

    def broken(point):
        if point == "before commit":
            raise OSError(5, "Input/output error")

    on_disk.store._file._at = broken
    client.on_episode(0, 10, 1.0)
    until(lambda: server.failure is not None)
    assert "Input/output error" in str(server.failure)
    assert any("Input/output error" in reason for reason in server.readiness())
    server.close()
    server = on_disk.start()
    client.update()
    assert server.total_episodes == 1
