"""Damage to a state folder, which must then open with exactly its former content, or be refused and stay unchanged."""

import hashlib
import logging
import random
import shutil
from collections import Counter
from contextlib import contextmanager

from memoire.disk.state_folder import Store
from memoire.errors import StateError
from memoire.models.model import make
from statekit import CLIENTS, account, contents, keeper_of_all

VERDICTS = ("exact", "refused", "a model less")
TRUTH = ("state.db", "state.db-wal", "state.db-shm", "state.db-journal")


def flip(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def cut(data, rng):
    return data[: rng.randrange(len(data))]


def blank(data, rng):
    """Zero one sector, as if it were lost."""
    at = rng.randrange(0, len(data), 512)
    return data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :]


def swap(data, rng):
    """Exchange two pages of the database."""
    pages = [data[at : at + 4096] for at in range(0, len(data), 4096)]
    one, other = rng.randrange(len(pages)), rng.randrange(len(pages))
    pages[one], pages[other] = pages[other], pages[one]
    return b"".join(pages)


def append(data, rng):
    return data + rng.randbytes(rng.randrange(1, 5000))


def remove(data, rng):
    return None


MUTATIONS = (flip, flip, flip, cut, blank, swap, append, remove)


def mutate(folder, rng, again=False):
    """Damage one file of the folder, mostly the database; return what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    weights = [8 if path.name in TRUTH[:2] else 1 for path in files]
    (path,) = rng.choices(files, weights)
    how = rng.choice(MUTATIONS)
    if again and path.name == "committed":
        how = flip  # damage goes unnoticed if this counter is also removed
    data = path.read_bytes()
    changed = how(data, rng)
    if changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)
    return f"{how.__name__} {path.relative_to(folder)}"


def stale(folder, older, rng):
    """Replace one database file by its older version, as if the last writes never reached the disk."""
    name = rng.choice(["state.db", "state.db-wal"])
    shutil.copy(older / name, folder / name)
    return f"stale {name}"


def digest(folder):
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("state.db", "state.db-wal")
        if (folder / name).exists()
        and (folder / name).stat().st_size  # SQLite creates an empty log if the log is missing
    }


def make_folders(base):
    """Return the folders of a killed server, of an earlier moment, and of a closed server, and the saved contents."""
    keeper = keeper_of_all(base / "open")
    for n in range(10, 40):
        lines = [(client, n, f"line {n}") for client in CLIENTS]
        keeper.save(accounts=[account(client, n, n) for client in CLIENTS], lines=lines)
        if n == 35:
            shutil.copytree(base / "open", base / "older")
    keeper.store.back_up()
    keeper.save(models=[make("policy", b"\x02" * 50_000, 8)], settings={"last": "one"})
    shutil.copytree(base / "open", base / "killed")
    truth = contents(keeper.store)
    keeper.close()
    return base / "killed", base / "older", base / "open", truth


def judge(folder, truth):
    """Open a damaged folder and return the verdict; raise AssertionError if it opens with other contents."""
    before = digest(folder)
    content = text = None
    try:
        store = Store(folder, "home")
    except StateError as error:
        text = str(error)
        assert digest(folder) == before, "a refused folder was changed"
    else:
        with store:
            try:
                content = contents(store)
            except StateError as error:  # reads check models' files and log lines
                text = str(error)
    if content is None:
        assert str(folder) in text and len(text) > 80, text
        return "refused"
    # The body of a removed file is missing, but the store knows the model's version.
    missing = [model for model in truth["models"] if model not in content["models"]]
    assert {**content, "models": truth["models"]} == truth
    assert len(content["models"]) == len(truth["models"]) - len(missing)
    return "a model less" if missing else "exact"


@contextmanager
def quiet():
    """Suppress the hundreds of expected warnings."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@quiet()
def run(source, older, truth, work, rounds, seed):
    """Damage copies of `source` and judge each; return the count of each verdict."""
    verdicts: Counter[str] = Counter()
    for number in range(rounds):
        rng = random.Random(f"{seed} {number}")
        folder = work / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        twice = rng.random() < 0.2
        done = stale(folder, older, rng) if rng.random() < 0.05 else mutate(folder, rng, twice)
        if twice:
            done += ", " + mutate(folder, rng, twice)
        try:
            verdicts[judge(folder, truth)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, round {number}: {done}: {error!r}") from error
    return verdicts
