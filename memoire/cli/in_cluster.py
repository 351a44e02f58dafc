"""Keys and tokens of a cluster on Kubernetes, which the chart's hooks see to before they install anything.

`memoire keys in-cluster` makes those that are not there; `memoire keys check` looks at those that somebody gave.
"""

from __future__ import annotations

import functools
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

from memoire.errors import KeyFileError, ParameterError, Refused
from memoire.security import provision
from memoire.security.keypairs import Key
from memoire.security.permissions import ROLES
from memoire.security.provision import TOKENS, SecretChange

from .api_server import ApiServer, Secret, ServiceAccount

Say = Callable[[str], object]
ROUNDS = 20
"""Times that all is looked at again because somebody else wrote it meanwhile."""


def account(api_server: str, namespace: str, environment: Mapping[str, str]) -> ServiceAccount:
    """Whom to ask: the API server of the Pod's own cluster, or the one that is named.

    Raises:
        ParameterError: the address is none, or this is no Pod and nothing is named.
    """
    if not api_server:
        found = ServiceAccount.of_pod(environment)
        return ServiceAccount(found.url, namespace or found.namespace, found.folder)
    parts = urllib.parse.urlsplit(api_server)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ParameterError("--api-server", api_server, "an address such as http://127.0.0.1:8001")
    return ServiceAccount(api_server, namespace or "default")


def make(keys: str, tokens: str, api: ApiServer, say: Say = print) -> int:
    """Make what is missing of the Secrets `keys`-ROLE and `tokens`, and leave everything that is there.

    Args:
        keys: What the keys' Secrets begin with; "" makes none.
        tokens: Name of the Secret with tokens; "" makes none.
        say: Takes a line for each Secret; never with anything secret.

    Raises:
        AuthError: the account may not.
        KeyFileError: something that is there cannot be used.
        MemoireTimeout: nobody answered in time.
        Refused: any other answer, or somebody else changed them all the time.
    """
    if keys:
        _settle(lambda: _make_keys(keys, api, say))
    if tokens:
        _settle(lambda: _make_tokens(tokens, api, say))
    return 0


OPTIONAL: Final = frozenset({"inference"})
"""Roles that a cluster can do without: keys that were made before there were such nodes have none for them."""


def check(keys: str, tokens: str, folder: Path, required: Collection[str] = (), say: Say = print) -> int:
    """Look at Secrets that somebody gave, as they are mounted: own.pub of each role in FOLDER/ROLE, and the tokens in
    FOLDER/tokens. The exit status: 1 where something cannot be used, with a line for each such thing.

    Args:
        keys: What the keys' Secrets begin with; "" looks at none.
        tokens: Name of the Secret with tokens; "" looks at none.
        required: Those of the `OPTIONAL` roles that have nodes.
        say: Takes a line for each Secret; never with anything secret.
    """
    faults = 0
    for role in ROLES if keys else ():
        may_miss = role in OPTIONAL and role not in required
        faults += _tell(f"secret/{keys}-{role}", functools.partial(_mounted_key, role, folder / role, may_miss), say)
    if tokens:
        faults += _tell(f"secret/{tokens}", functools.partial(_mounted_tokens, folder / "tokens"), say)
    return 1 if faults else 0


def _tell(where: str, look: Callable[[str], str], say: Say) -> bool:
    """Look at one Secret, and say how it is; whether it cannot be used."""
    try:
        say(f"{where}: {look(where)}")
    except KeyFileError as error:
        say(f"memoire: {error}")
        return True
    return False


def _mounted_key(role: str, folder: Path, may_miss: bool, where: str) -> str:
    files = _texts(folder)
    if not files and may_miss:
        return f"is not there: no node of this role, {role}, can run with these keys"
    if not files:
        advice = "Make the keys in this namespace: `memoire keys new --kubernetes NAME | kubectl apply -f -`."
        raise KeyFileError(where, "is not there, or has no own.pub", advice)
    return _line(provision.own_key(role, files, where, "own.pub"))


def _mounted_tokens(folder: Path, where: str) -> str:
    files = _texts(folder)
    missing = [name for name in TOKENS if name not in files]
    if missing:
        advice = "Make it in this namespace: `kubectl create secret generic NAME --from-literal=dashboard=TOKEN "
        raise KeyFileError(
            where, f"is not there, or has no {' and no '.join(missing)}", f"{advice}--from-literal=nodes=TOKEN`."
        )
    for name in TOKENS:
        provision.check_tokens(files[name], f"{where} ({name})")
    return "has both tokens"


def _texts(folder: Path) -> dict[str, str]:
    """The files of a mounted Secret; none where it is not there."""
    try:
        paths = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
        return {path.name: path.read_text(encoding="ascii", errors="replace") for path in paths}
    except FileNotFoundError:
        return {}


def _make_keys(name: str, api: ApiServer, say: Say) -> bool:
    found = {role: api.read(f"{name}-{role}") for role in ROLES}
    changes = provision.missing_keys(
        {role: secret.data if secret else None for role, secret in found.items()}, f"secret/{name}-"
    )
    if not all(_write(f"{name}-{change.name}", change, found[change.name], api, say) for change in changes):
        return False
    for role in ROLES if not changes else ():
        say(f"secret/{name}-{role}: is there")
    return True


def _make_tokens(name: str, api: ApiServer, say: Say) -> bool:
    found = api.read(name)
    files = provision.missing_tokens(found.data if found else None, f"secret/{name}")
    if not files:
        say(f"secret/{name}: is there")
        return True
    return _write(name, SecretChange(name, files, is_new=found is None), found, api, say)


def _write(name: str, change: SecretChange, former: Secret | None, api: ApiServer, say: Say) -> bool:
    """Write one Secret; False where it is no longer as it was."""
    written = api.create(name, change.files) if former is None else api.patch(name, former, change.files)
    if written:
        how = "made" if former is None else f"{', '.join(sorted(change.files))} has more beside what it had"
        say(f"secret/{name}: {how}")
    return written


def _settle(attempt: Callable[[], bool]) -> None:
    """Look and write again until nobody was in between."""
    for _ in range(ROUNDS):
        if attempt():
            return
    raise Refused("the API server", "conflict", f"the Secrets were changed {ROUNDS} times meanwhile by somebody else")


def _line(key: Key) -> str:
    return f"{key.fingerprint}  {key.peer.principal}"
