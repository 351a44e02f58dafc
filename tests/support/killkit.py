"""What a state folder must hold after a process that saved steps was killed."""

from memoire.disk.logs import text_of
from memoire.disk.snapshot_file import Counts, EndRecord, SnapshotFile
from memoire.disk.state_folder import Store
from memoire.limits import Limits
from memoire.tables.prompts.columns import COLUMNS, PAYLOAD, ROW
from statekit import CLIENTS, RUN, lines_through, own_accounts, text_of_log


def check_state(folder, acknowledged):
    if (kept := folder / "memory.snapshot").exists():
        with SnapshotFile(kept) as file:
            assert not file.verify() and file.end == EndRecord(tables=[Counts(clients=1)])
    with Store(folder, "home", limits=Limits(log_bytes=600)) as store:
        step = int(store.settings().get("step", "0"))
        assert acknowledged <= step <= acknowledged + 1
        assert store.line_count(RUN) == 2 * step
        names = [facts.name for facts in store.runs()]
        assert names in ([], [RUN], [RUN, *(f"run {n}" for n in range(1, step + 1))])
        if step:
            accounts = {one.client: one.report for one in own_accounts(store)}
            for client in CLIENTS[1:]:
                newest = max([n for n in range(1, step + 1) if CLIENTS[n % 8] == client], default=None)
                assert newest is None or (accounts[client].episodes, accounts[client].steps) == (newest, newest**2)
            assert accounts[CLIENTS[0]].episodes == step
            assert lines_through(store) == {CLIENTS[0]: 2 * step}
            big, small = store.models(RUN)
            assert (big.version, big.value, small.value) == (step, bytes([step % 256]) * 20_000, f"{step}")
        stored = {(kind, key): body for kind, key, body in store.prompts("t")}
        payloads = {(PAYLOAD, b"%d" % n): bytes([n % 256]) * 70_000 for n in range(max(1, step - 1), step + 1)}
        answers = {(COLUMNS, b"%d" % n): b"answer %d" % n for n in range(max(1, step - 2), step + 1)}
        assert stored == ({(ROW, b"newest"): b"%d" % step} if step else {}) | payloads | answers
        found = store.search(RUN, most=10_000)
        assert [entry.line.number for entry in found] == list(range(2 * step - len(found) + 1, 2 * step + 1))
        assert text_of_log(folder).endswith(b"".join(map(text_of, found)))
    return step
