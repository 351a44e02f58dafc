"""Damage to a state folder, and what may come of it: it opens with exactly what was in it, or is refused untouched."""

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
    """A lost sector."""
    at = rng.randrange(0, len(data), 512)
    return data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :]


def swap(data, rng):
    """Two pages in each other's place."""
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
    """Damage one file of the folder, those that count most often; returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    weights = [8 if path.name in TRUTH[:2] else 1 for path in files]
    (path,) = rng.choices(files, weights)
    how = rng.choice(MUTATIONS)
    if again and path.name == "committed":
        how = flip  # who removes the witness as well as damaging what it watches is believed
    found = path.read_bytes()
    changed = how(found, rng)
    if changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)
    return f"{how.__name__} {path.relative_to(folder)}"


def stale(folder, older, rng):
    """One file as it was some transactions ago: a write that never reached the disk."""
    name = rng.choice(["state.db", "state.db-wal"])
    shutil.copy(older / name, folder / name)
    return f"stale {name}"


def digest(folder):
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("state.db", "state.db-wal")
        if (folder / name).exists() and (folder / name).stat().st_size  # SQLite makes an empty log where none is
    }


def make_folders(base):
    """A folder as a killed server leaves it, the same some transactions earlier, one that was closed, and the truth."""
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
    """How a damaged folder is met. Raises AssertionError where something else than the truth is served."""
    before = digest(folder)
    found = text = None
    try:
        store = Store(folder, "home")
    except StateError as error:
        text = str(error)
        assert digest(folder) == before, "a refused folder was changed"
    else:
        with store:
            try:
                found = contents(store)
            except StateError as error:  # of a model's file, or a log line: found when it is read
                text = str(error)
    if found is None:
        assert str(folder) in text and len(text) > 80, text
        return "refused"
    # A body that somebody took away is missing, its version is not.
    missing = [model for model in truth["models"] if model not in found["models"]]
    assert {**found, "models": truth["models"]} == truth
    assert len(found["models"]) == len(truth["models"]) - len(missing)
    return "a model less" if missing else "exact"


@contextmanager
def quiet():
    """Without the hundreds of warnings that are expected."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@quiet()
def run(source, older, truth, work, rounds, seed):
    """Damage copies of `source` and judge each; returns how often each verdict came."""
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
