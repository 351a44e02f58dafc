"""Keys from the command line: made, listed, let in and taken away (`memoire keys`).

Keys and tokens of a cluster on Kubernetes, which the chart's hooks see to before they install anything: `memoire keys
in-cluster` makes those that are not there, and `memoire keys check` looks at those that somebody gave.

Secrets at the API server of the Kubernetes cluster that this process runs in, by plain HTTPS.

A Pod finds everything by itself: the address in its environment, and the token, the certificate and the namespace of
its account in files that the kubelet mounts. A write says which version of a Secret it changes, so that of two writers
one is told to look again.
"""

from __future__ import annotations

import base64
import binascii
import functools
import http.client
import json
import os
import ssl
import time
import urllib.parse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memoire.errors import AuthError, KeyFileError, MemoireTimeout, ParameterError, Refused
from memoire.security import provision
from memoire.security.keys import Key, Keys, folders_in, make
from memoire.security.provision import TOKENS, SecretChange
from memoire.security.roles import ROLES

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts what a Pod's account is known by."""
REQUEST_TIMEOUT = 5.0
"""Seconds that one request may be silent."""
PAUSE = 0.5
"""Seconds between two attempts."""
FORBIDDEN_PATIENCE = 5.0
"""Seconds after which "forbidden" is believed: a Role that was made a moment ago may not be known everywhere yet."""
MAX_ANSWER_BYTES = 4 << 20
"""More than a Secret may have (1 MiB), in base64 and in JSON."""
BUSY = frozenset({429, 500, 502, 503, 504})
"""Statuses of a server that may answer better in a moment."""
UNREACHABLE = (
    "Does the API server answer, and does a NetworkPolicy keep this Pod from it? It connects to the address in "
    "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT."
)
MAY = (
    "The account needs get and patch of these Secrets, and create of Secrets in the namespace. Or make the Secrets "
    "yourself (`memoire keys new --kubernetes NAME`), and set security.keys and security.tokens."
)


@dataclass(frozen=True)
class Secret:
    """A Secret as it was read: its data, and the version that a change of it has to name."""

    data: Mapping[str, str]
    version: str

    def __repr__(self) -> str:
        return f"Secret({sorted(self.data)}, version={self.version!r})"  # never what is in it


@dataclass(frozen=True)
class ServiceAccount:
    """Who a process is to the API server, and where that is.

    Args:
        url: Such as "https://10.96.0.1:443"; with http:// no token is sent, as `kubectl proxy` wants it.
        namespace: Of the Secrets.
        folder: With the files `token` and `ca.crt`. They are read for each request: tokens change.
    """

    url: str
    namespace: str
    folder: Path = ACCOUNT

    @classmethod
    def of_pod(cls, environment: Mapping[str, str], folder: Path = ACCOUNT) -> ServiceAccount:
        """The account of the Pod that this process runs in.

        Raises:
            ParameterError: this is no Pod, or one without an account's files.
        """
        host, port = (environment.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host:
            expected = "set, as in a Pod; elsewhere give --api-server (`kubectl proxy` opens one)"
            raise ParameterError("KUBERNETES_SERVICE_HOST", host, expected)
        try:
            namespace = (folder / "namespace").read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise ParameterError("the account's files", str(folder), f"mounted into the Pod: {error}") from None
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port or 443}", namespace, folder)


class ApiServer:
    """Reads and writes Secrets until a deadline; an attempt that may go better is repeated.

    Args:
        account: Where, and as whom.
        timeout: Seconds for everything that is asked of it.
        patience: Seconds for which "forbidden" may be an answer that is only early.
    """

    def __init__(self, account: ServiceAccount, timeout: float = 60.0, patience: float = FORBIDDEN_PATIENCE) -> None:
        self._account, self._timeout = account, timeout
        now = time.monotonic()
        self._deadline, self._believed_at = now + timeout, now + min(patience, timeout)
        self._path = f"/api/v1/namespaces/{urllib.parse.quote(account.namespace, safe='')}/secrets"

    def read(self, name: str) -> Secret | None:
        """A Secret; None where there is none of that name.

        Raises:
            AuthError: the account may not, or is not known.
            MemoireTimeout: nobody answered in time.
            Refused: any other answer.
        """
        status, said = self._ask("GET", f"{self._path}/{name}", expected={200, 404})
        if status == 404:
            return None
        data = said.get("data") or {}
        try:
            texts = {key: base64.b64decode(text).decode() for key, text in data.items()}
        except (binascii.Error, ValueError, TypeError):
            raise Refused(self._account.url, str(status), f"the Secret {name} holds what is no text") from None
        return Secret(texts, str(said.get("metadata", {}).get("resourceVersion", "")))

    def create(self, name: str, data: Mapping[str, str]) -> bool:
        """Make a Secret; False if there is one of this name already, which stays as it is. Raises as `read`."""
        metadata = {"name": name, "labels": {"app.kubernetes.io/part-of": "memoire"}}
        said = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": _packed(data)}
        status, _ = self._ask("POST", self._path, said, expected={201, 409})
        return status == 201

    def patch(self, name: str, former: Secret, data: Mapping[str, str]) -> bool:
        """Write these keys of a Secret and leave the others; False where it is no longer as it was read. Raises as
        `read`.
        """
        said = {"metadata": {"resourceVersion": former.version}, "data": _packed(data)}
        status, _ = self._ask("PATCH", f"{self._path}/{name}", said, expected={200, 404, 409})
        return status == 200

    def _ask(self, method: str, path: str, said: object = None, *, expected: set[int]) -> tuple[int, dict[str, Any]]:
        body = None if said is None else json.dumps(said)
        trouble = "nothing was tried"
        while (left := self._deadline - time.monotonic()) > 0.0:
            try:
                status, answer = self._once(method, path, body, min(REQUEST_TIMEOUT, left))
            except (OSError, http.client.HTTPException) as error:
                trouble = str(error) or type(error).__name__
            else:
                if status in expected:
                    return status, answer
                trouble = f"status {status}: {answer.get('message', '')}"
                self._judge(status, f"{method} {path}: {answer.get('message') or 'it says no more'}")
            time.sleep(min(PAUSE, max(0.0, self._deadline - time.monotonic())))
        raise MemoireTimeout(f"answer ({trouble})", self._account.url, self._timeout, UNREACHABLE)

    def _judge(self, status: int, text: str) -> None:
        """Raise what a status means that will not get better."""
        if status in (401, 403):
            if time.monotonic() >= self._believed_at:
                raise AuthError(self._account.url, f"status {status}, {text}", MAY)
        elif status not in BUSY:
            raise Refused(self._account.url, str(status), text)

    def _once(self, method: str, path: str, body: str | None, timeout: float) -> tuple[int, dict[str, Any]]:
        connection = self._connection(timeout)
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json", "Content-Type": kind}
        if isinstance(connection, http.client.HTTPSConnection):
            headers["Authorization"] = f"Bearer {_token(self._account.folder)}"
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = answer.read(MAX_ANSWER_BYTES)
        finally:
            connection.close()
        try:
            said = json.loads(text)
        except ValueError:
            said = {}
        return answer.status, said if isinstance(said, dict) else {}

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        where = urllib.parse.urlsplit(self._account.url)
        make: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        options: dict[str, Any] = {"timeout": timeout}
        if where.scheme == "https":
            make = http.client.HTTPSConnection
            options["context"] = _context(self._account.folder / "ca.crt")
        return make(where.hostname or "", where.port, **options)


def _context(authorities: Path) -> ssl.SSLContext:
    """Trust what the account's file of certificates says, and nothing else."""
    try:
        return ssl.create_default_context(cafile=str(authorities))
    except OSError as error:
        expected = f"a file of certificates that the API server is known by: {error}"
        raise ParameterError("the account's certificates", str(authorities), expected) from None


def _token(folder: Path) -> str:
    try:
        return (folder / "token").read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ParameterError("the account's token", str(folder / "token"), f"a file to read: {error}") from None


def _packed(data: Mapping[str, str]) -> dict[str, str]:
    return {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}


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


def make_secrets(keys: str, tokens: str, api: ApiServer, say: Say = print) -> int:
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


def make_in_cluster(secrets: str, tokens: str, namespace: str, timeout: float, api_server: str) -> int:
    """Make what is missing of these Secrets, at the API server of this Pod's cluster, or at the one that is named."""
    return make_secrets(secrets, tokens, ApiServer(account(api_server, namespace, os.environ), timeout))


def check(secrets: str, tokens: str, folder: str | Path, require: Collection[str] = (), say: Say = print) -> int:
    """Look at Secrets that somebody gave, as they are mounted: own.pub of each role in FOLDER/ROLE, and the tokens in
    FOLDER/tokens. The exit status: 1 where something cannot be used, with a line for each such thing.

    Args:
        secrets: What the keys' Secrets begin with; "" looks at none.
        tokens: Name of the Secret with tokens; "" looks at none.
        require: Those of the `OPTIONAL` roles that have nodes.
        say: Takes a line for each Secret; never with anything secret.
    """
    faults = 0
    for role in ROLES if secrets else ():
        look = functools.partial(_mounted_key, role, Path(folder, role), role in OPTIONAL and role not in require)
        faults += _tell(f"secret/{secrets}-{role}", look, say)
    if tokens:
        faults += _tell(f"secret/{tokens}", functools.partial(_mounted_tokens, Path(folder, "tokens")), say)
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


# ------------------------------------------------------------------------------------------------- keys in folders


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
