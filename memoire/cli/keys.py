"""Keys from the command line: made, listed, let in and taken away (`memoire keys`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from memoire.errors import KeyFileError, ParameterError
from memoire.security import provision
from memoire.security.keys import Key, Keys, folders_in, make

Say = Callable[[str], object]


def new(
    folder: str | None, role: str | None, name: str, server: str | None, kubernetes: str | None, say: Say = print
) -> int:
    """Make the keys of a whole cluster, as folders or as Secrets in YAML; or with `role` one more key.

    Raises:
        KeyFileError: something is there already; nothing was changed.
        ParameterError: the name is none, or it is not said where the keys should go.
    """
    if kubernetes is not None and folder is None and role is None:
        say(provision.secrets(kubernetes).rstrip("\n"))
        return 0
    if folder is None or kubernetes is not None:
        raise ParameterError("FOLDER", folder, "where to write keys, or left out with --kubernetes NAME")
    if role is None:
        for made in provision.write_cluster(Path(folder)):
            say(f"{made}: {_line(Keys(made).own)}")
        say(f"Give each process its own folder (--keys {folder}/actor, ...), and none of the others.")
        return 0
    try:
        key = make(role, name)
    except ValueError as error:
        raise ParameterError("--name", name, f"a name: {error}") from error
    dialled = "" if server is None else "".join(key.text() for key in provision.public_keys(Path(server)))
    provision.write_one(Path(folder), key, dialled)
    say(f"{folder}: {_line(key)}")
    say(f"Let it in: memoire keys authorize SERVERS_FOLDER {folder}")
    return 0


def show(folder: str, say: Say = print) -> int:
    """Print what is in a keys folder, or in those of a cluster's folder: never a secret."""
    for found in folders_in(Path(folder)):
        keys = Keys(found)
        say(f"{found}: {_line(keys.own)}")
        for key in keys.servers:
            say(f"  dials  {_line(key)}")
        for key in sorted(keys.authorized.values(), key=lambda key: (key.role, key.name, key.created)):
            say(f"  admits {_line(key)}")
    return 0


def export(folder: str, kubernetes: str, say: Say = print) -> int:
    """Print the keys of a cluster's folder, or of one process', as Secrets in YAML, secret halves and all.

    Raises:
        KeyFileError: what is there is no keys folder.
    """
    found = [(Keys(path).own.role, path) for path in folders_in(Path(folder))]
    say(provision.secrets(kubernetes, {role: provision.files_in(path) for role, path in found}).rstrip("\n"))
    return 0


def authorize(folder: str, files: Sequence[str], say: Say = print) -> int:
    """Let the keys in these files in, at the process of a keys folder, or at a cluster's servers and proxies."""
    keys = [key for path in files for key in provision.public_keys(Path(path))]
    for found in _listening(folder):
        for key in keys:
            say(f"{provision.authorize(found, key)}: {_line(key)}")
    return 0


def revoke(folder: str, which: Sequence[str], say: Say = print) -> int:
    """Let these keys in no more; processes that run cut them off within seconds.

    Raises:
        KeyFileError: one of them is not let in anywhere there; the others are gone.
    """
    missing = []
    for one in which:
        gone = [(found, key) for found in _listening(folder) for key in provision.revoke(found, one)]
        for found, key in gone:
            say(f"{found}: no more {_line(key)}")
        missing += [one] * (not gone)
    if missing:
        advice = "`memoire keys list` shows fingerprints, and names as ROLE/NAME."
        raise KeyFileError(folder, f"does not let in {', '.join(missing)}", advice)
    return 0


def _listening(folder: str) -> list[Path]:
    """Keys folders of processes that others come to: of a cluster's folder those of its servers and proxies."""
    found = folders_in(Path(folder))
    return found if len(found) == 1 else [path for path in found if path.name in provision.ADMITTED]


def _line(key: Key) -> str:
    return f"{key.fingerprint}  {key.peer.principal}{f'  made {key.created}' if key.created else ''}"
