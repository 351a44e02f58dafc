"""Key management (`memoire keys`): keys in folders, and Secrets of keys and tokens in a Kubernetes cluster.

The chart's hooks run two of the actions before they install nodes: `memoire keys in-cluster` creates missing Secrets,
and `memoire keys check` verifies existing ones.

Secrets are read and written at the API server of the Kubernetes cluster that this process runs in, by plain HTTPS. The
address comes from the Pod's environment; the token, certificate and namespace of the account come from files that the
kubelet mounts. A write names the version of the Secret that it changes, so that the second of two writers gets a
conflict and retries.
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
"""Folder where the kubelet mounts the token, certificate and namespace of a Pod's service account."""
REQUEST_TIMEOUT = 5.0
"""Seconds to wait for the answer to one request."""
RETRY_INTERVAL = 0.5
"""Seconds between two attempts of a request."""
FORBIDDEN_PATIENCE = 5.0
"""Seconds for which "forbidden" is retried: a new Role may not have reached every API server yet."""
MAX_ANSWER_BYTES = 4 << 20
"""Bytes read of an answer: more than a Secret's limit of 1 MiB takes in base64 and JSON."""
RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
"""HTTP statuses of a busy or failing API server, after which a request is retried."""
UNREACHABLE_ADVICE = (
    "Does the API server run, and does a NetworkPolicy block this Pod? The Pod connects to the address in "
    "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT."
)
PERMISSION_ADVICE = (
    "The account needs get and patch of these Secrets, and create of Secrets in the namespace. Or create the Secrets "
    "yourself (`memoire keys new --kubernetes NAME`), and set security.keys and security.tokens."
)


@dataclass(frozen=True)
class Secret:
    """Data of a Kubernetes Secret as read, and the resource version that a patch has to name."""

    data: Mapping[str, str]
    version: str

    def __repr__(self) -> str:
        return f"Secret({sorted(self.data)}, version={self.version!r})"  # the text never shows a secret's content


@dataclass(frozen=True)
class ServiceAccount:
    """Credentials of a process at the API server, and the server's address.

    Args:
        url: Address such as "https://10.96.0.1:443"; with http:// no token is sent, as for `kubectl proxy`.
        namespace: Namespace of the Secrets.
        folder: Folder with the files `token` and `ca.crt`. The files are read for each request: tokens change.
    """

    url: str
    namespace: str
    folder: Path = ACCOUNT

    @classmethod
    def of_pod(cls, environment: Mapping[str, str], folder: Path = ACCOUNT) -> ServiceAccount:
        """Return the account of the Pod that this process runs in.

        Raises:
            ParameterError: the process does not run in a Pod, or the Pod does not mount an account's files.
        """
        host, port = (environment.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host:
            expected = "set, as in a Pod; outside of a Pod give --api-server (such as that of `kubectl proxy`)"
            raise ParameterError("KUBERNETES_SERVICE_HOST", host, expected)
        try:
            namespace = (folder / "namespace").read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            expected = f"a folder that is mounted into the Pod ({error})"
            raise ParameterError("the folder of the service account", str(folder), expected) from None
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port or 443}", namespace, folder)


class ApiServer:
    """Client of the Kubernetes API server: reads and writes Secrets, and retries transient errors until a deadline.

    Args:
        account: Address and credentials.
        timeout: Seconds for all requests together, from the construction on.
        patience: Seconds for which "forbidden" is retried.
    """

    def __init__(self, account: ServiceAccount, timeout: float = 60.0, patience: float = FORBIDDEN_PATIENCE) -> None:
        self._account, self._timeout = account, timeout
        now = time.monotonic()
        self._deadline, self._forbidden_deadline = now + timeout, now + min(patience, timeout)
        self._path = f"/api/v1/namespaces/{urllib.parse.quote(account.namespace, safe='')}/secrets"

    def read(self, name: str) -> Secret | None:
        """Return a Secret, or None if it does not exist.

        Raises:
            AuthError: the account lacks the permission, or the API server rejects its token.
            MemoireTimeout: the API server did not answer in time.
            Refused: the API server gave another answer.
        """
        status, answer = self._ask("GET", f"{self._path}/{name}", expected={200, 404})
        if status == 404:
            return None
        data = answer.get("data") or {}
        try:
            texts = {key: base64.b64decode(text).decode() for key, text in data.items()}
        except (binascii.Error, ValueError, TypeError):
            raise Refused(self._account.url, str(status), f"the Secret {name} has data that is not text") from None
        return Secret(texts, str(answer.get("metadata", {}).get("resourceVersion", "")))

    def create(self, name: str, data: Mapping[str, str]) -> bool:
        """Create a Secret; False if a Secret of this name exists, which is left unchanged. Raises as `read`."""
        metadata = {"name": name, "labels": {"app.kubernetes.io/part-of": "memoire"}}
        secret = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": _base64(data)}
        status, _ = self._ask("POST", self._path, secret, expected={201, 409})
        return status == 201

    def patch(self, name: str, former: Secret, data: Mapping[str, str]) -> bool:
        """Write the keys of `data` to a Secret; False if the Secret has changed since `former`. Raises as `read`."""
        change = {"metadata": {"resourceVersion": former.version}, "data": _base64(data)}
        status, _ = self._ask("PATCH", f"{self._path}/{name}", change, expected={200, 404, 409})
        return status == 200

    def _ask(self, method: str, path: str, content: object = None, *, expected: set[int]) -> tuple[int, dict[str, Any]]:
        body = None if content is None else json.dumps(content)
        trouble = "nothing was tried"
        while (remaining := self._deadline - time.monotonic()) > 0.0:
            try:
                status, answer = self._request(method, path, body, min(REQUEST_TIMEOUT, remaining))
            except (OSError, http.client.HTTPException) as error:
                trouble = str(error) or type(error).__name__
            else:
                if status in expected:
                    return status, answer
                trouble = f"status {status}: {answer.get('message', '')}"
                self._raise_if_final(status, f"{method} {path}: {answer.get('message') or 'no message'}")
            time.sleep(min(RETRY_INTERVAL, max(0.0, self._deadline - time.monotonic())))
        raise MemoireTimeout(f"answer ({trouble})", self._account.url, self._timeout, UNREACHABLE_ADVICE)

    def _raise_if_final(self, status: int, text: str) -> None:
        if status in (401, 403):
            if time.monotonic() >= self._forbidden_deadline:
                raise AuthError(self._account.url, f"HTTP status {status}, {text}", PERMISSION_ADVICE)
        elif status not in RETRIED_STATUSES:
            raise Refused(self._account.url, str(status), text)

    def _request(self, method: str, path: str, body: str | None, timeout: float) -> tuple[int, dict[str, Any]]:
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
            content = json.loads(text)
        except ValueError:
            content = {}
        return answer.status, content if isinstance(content, dict) else {}

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        url = urllib.parse.urlsplit(self._account.url)
        connect: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        options: dict[str, Any] = {"timeout": timeout}
        if url.scheme == "https":
            connect = http.client.HTTPSConnection
            options["context"] = _tls_context(self._account.folder / "ca.crt")
        return connect(url.hostname or "", url.port, **options)


def _tls_context(authorities: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(authorities))
    except OSError as error:
        expected = f"a readable file with the certificate of the API server's authority ({error})"
        raise ParameterError("the account's certificates", str(authorities), expected) from None


def _token(folder: Path) -> str:
    try:
        return (folder / "token").read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ParameterError("the account's token", str(folder / "token"), f"a readable file ({error})") from None


def _base64(data: Mapping[str, str]) -> dict[str, str]:
    return {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}


Say = Callable[[str], object]
MAX_ATTEMPTS = 20
"""Attempts to write Secrets that other writers change at the same time."""


def account(api_server: str, namespace: str, environment: Mapping[str, str]) -> ServiceAccount:
    """Return the account at `api_server`, or at the Pod's own API server if `api_server` is "".

    Raises:
        ParameterError: `api_server` is not a valid address, or it is "" and the process does not run in a Pod.
    """
    if not api_server:
        of_pod = ServiceAccount.of_pod(environment)
        return ServiceAccount(of_pod.url, namespace or of_pod.namespace, of_pod.folder)
    parts = urllib.parse.urlsplit(api_server)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ParameterError("--api-server", api_server, "an address such as http://127.0.0.1:8001")
    return ServiceAccount(api_server, namespace or "default")


def make_secrets(keys: str, tokens: str, api: ApiServer, say: Say = print) -> int:
    """Create missing keys and tokens in the Secrets `keys`-ROLE and `tokens`; existing data stays. Returns 0.

    Args:
        keys: Prefix of the names of the Secrets with keys; "" creates no Secrets with keys.
        tokens: Name of the Secret with tokens; "" does not create it.
        say: Called with a line for each Secret; the lines contain no secrets.

    Raises:
        AuthError: the account lacks the permission.
        KeyFileError: an existing Secret cannot be used.
        MemoireTimeout: the API server did not answer in time.
        Refused: the API server gave another answer, or other writers changed the Secrets at every attempt.
    """
    if keys:
        _retry(lambda: _make_keys(keys, api, say))
    if tokens:
        _retry(lambda: _make_tokens(tokens, api, say))
    return 0


OPTIONAL: Final = frozenset({"inference"})
"""Roles whose keys may be missing: clusters made by older releases have no keys for them."""


def make_in_cluster(secrets: str, tokens: str, namespace: str, timeout: float, api_server: str) -> int:
    """Create missing Secrets at `api_server`, or at the Pod's own API server if that is "". See `make_secrets`."""
    return make_secrets(secrets, tokens, ApiServer(account(api_server, namespace, os.environ), timeout))


def check(secrets: str, tokens: str, folder: str | Path, require: Collection[str] = (), say: Say = print) -> int:
    """Check mounted Secrets: own.pub of each role in FOLDER/ROLE, and the tokens in FOLDER/tokens.

    Returns the exit status: 1 if a Secret is missing or cannot be used, after a line for each fault.

    Args:
        secrets: Prefix of the names of the Secrets with keys; "" checks no Secrets with keys.
        tokens: Name of the Secret with tokens; "" does not check it.
        require: `OPTIONAL` roles that have nodes, so that their keys are needed.
        say: Called with a line for each Secret; the lines contain no secrets.
    """
    faults = 0
    for role in ROLES if secrets else ():
        describe = functools.partial(_mounted_key, role, Path(folder, role), role in OPTIONAL and role not in require)
        faults += _report(f"secret/{secrets}-{role}", describe, say)
    if tokens:
        faults += _report(f"secret/{tokens}", functools.partial(_mounted_tokens, Path(folder, "tokens")), say)
    return 1 if faults else 0


def _report(name: str, describe: Callable[[str], str], say: Say) -> bool:
    """Report the state of one Secret; return True if it cannot be used."""
    try:
        say(f"{name}: {describe(name)}")
    except KeyFileError as error:
        say(f"memoire: {error}")
        return True
    return False


def _mounted_key(role: str, folder: Path, may_miss: bool, name: str) -> str:
    files = _texts(folder)
    if not files and may_miss:
        return f"does not exist: no node of the role {role} can run with these keys"
    if not files:
        advice = "Create the keys in this namespace: `memoire keys new --kubernetes NAME | kubectl apply -f -`."
        raise KeyFileError(name, "does not exist, or has no own.pub", advice)
    return _line(provision.own_key(role, files, name, "own.pub"))


def _mounted_tokens(folder: Path, where: str) -> str:
    files = _texts(folder)
    missing = [name for name in TOKENS if name not in files]
    if missing:
        advice = "Create it in this namespace: `kubectl create secret generic NAME --from-literal=dashboard=TOKEN "
        raise KeyFileError(
            where, f"does not exist, or has no {' and no '.join(missing)}", f"{advice}--from-literal=nodes=TOKEN`."
        )
    for name in TOKENS:
        provision.check_tokens(files[name], f"{where} ({name})")
    return "has both tokens"


def _texts(folder: Path) -> dict[str, str]:
    try:
        paths = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
        return {path.name: path.read_text(encoding="ascii", errors="replace") for path in paths}
    except FileNotFoundError:
        return {}


def _make_keys(name: str, api: ApiServer, say: Say) -> bool:
    secrets = {role: api.read(f"{name}-{role}") for role in ROLES}
    changes = provision.missing_keys(
        {role: secret.data if secret else None for role, secret in secrets.items()}, f"secret/{name}-"
    )
    if not all(_write(f"{name}-{change.name}", change, secrets[change.name], api, say) for change in changes):
        return False
    for role in ROLES if not changes else ():
        say(f"secret/{name}-{role}: exists")
    return True


def _make_tokens(name: str, api: ApiServer, say: Say) -> bool:
    secret = api.read(name)
    files = provision.missing_tokens(secret.data if secret else None, f"secret/{name}")
    if not files:
        say(f"secret/{name}: exists")
        return True
    return _write(name, SecretChange(name, files, is_new=secret is None), secret, api, say)


def _write(name: str, change: SecretChange, former: Secret | None, api: ApiServer, say: Say) -> bool:
    """Write one Secret; False if another writer has changed it since `former` was read."""
    is_written = api.create(name, change.files) if former is None else api.patch(name, former, change.files)
    if is_written:
        action = "created" if former is None else f"added keys to {', '.join(sorted(change.files))}"
        say(f"secret/{name}: {action}")
    return is_written


def _retry(attempt: Callable[[], bool]) -> None:
    """Call `attempt` until it returns True; raise Refused after `MAX_ATTEMPTS` calls."""
    for _ in range(MAX_ATTEMPTS):
        if attempt():
            return
    text = f"other writers changed the Secrets during each of {MAX_ATTEMPTS} attempts"
    raise Refused("the API server", "conflict", text)


# ------------------------------------------------------------------------------------------------- keys in folders


def new(
    folder: str | None, role: str | None, name: str, server: str | None, kubernetes: str | None, say: Say = print
) -> int:
    """Create the keys of a whole cluster, as folders or as Secrets in YAML; with `role`, create one more key.

    Raises:
        KeyFileError: a file exists already; nothing was changed.
        ParameterError: the name is not valid, or both or neither of `folder` and `kubernetes` are given.
    """
    if kubernetes is not None and folder is None and role is None:
        say(provision.secrets(kubernetes).rstrip("\n"))
        return 0
    if folder is None or kubernetes is not None:
        raise ParameterError("FOLDER", folder, "the folder to write keys to, or left out with --kubernetes NAME")
    if role is None:
        for path in provision.write_cluster(Path(folder)):
            say(f"{path}: {_line(Keys(path).own)}")
        say(f"Give each process only its own folder: --keys {folder}/actor for an actor, and so on.")
        return 0
    try:
        key = make(role, name)
    except ValueError as error:
        raise ParameterError("--name", name, f"a valid name ({error})") from error
    dialled = "" if server is None else "".join(key.text() for key in provision.public_keys(Path(server)))
    provision.write_one(Path(folder), key, dialled)
    say(f"{folder}: {_line(key)}")
    say(f"Let the key in: memoire keys authorize SERVERS_FOLDER {folder}")
    return 0


def show(folder: str, say: Say = print) -> int:
    """Print the public keys of a keys folder, or of each keys folder of a cluster, and return 0."""
    for path in folders_in(Path(folder)):
        keys = Keys(path)
        say(f"{path}: {_line(keys.own)}")
        for key in keys.servers:
            say(f"  dials  {_line(key)}")
        for key in sorted(keys.authorized.values(), key=lambda key: (key.role, key.name, key.created)):
            say(f"  admits {_line(key)}")
    return 0


def export(folder: str, kubernetes: str, say: Say = print) -> int:
    """Print the keys of a cluster's folder, or of one process, as Secrets in YAML, with their secret halves. Returns 0.

    Raises:
        KeyFileError: `folder` is not a keys folder and has none.
    """
    folders = [(Keys(path).own.role, path) for path in folders_in(Path(folder))]
    say(provision.secrets(kubernetes, {role: provision.files_in(path) for role, path in folders}).rstrip("\n"))
    return 0


def authorize(folder: str, files: Sequence[str], say: Say = print) -> int:
    """Authorize the keys in `files` at one process, or at a cluster's servers and proxies. Returns 0."""
    keys = [key for path in files for key in provision.public_keys(Path(path))]
    for path in _listening_folders(folder):
        for key in keys:
            say(f"{provision.authorize(path, key)}: {_line(key)}")
    return 0


def revoke(folder: str, which: Sequence[str], say: Say = print) -> int:
    """Revoke keys, given by fingerprint or ROLE/NAME; running processes disconnect them within seconds. Returns 0.

    Raises:
        KeyFileError: one of the keys is not authorized in any of the folders; the other keys are revoked.
    """
    missing = []
    for name in which:
        revoked = [(path, key) for path in _listening_folders(folder) for key in provision.revoke(path, name)]
        for path, key in revoked:
            say(f"{path}: no more {_line(key)}")
        missing += [name] * (not revoked)
    if missing:
        advice = "`memoire keys list` shows fingerprints, and names as ROLE/NAME."
        raise KeyFileError(folder, f"does not admit {', '.join(missing)}", advice)
    return 0


def _listening_folders(folder: str) -> list[Path]:
    """Return the only keys folder, or those of a cluster's listening roles: servers and proxies."""
    folders = folders_in(Path(folder))
    return folders if len(folders) == 1 else [path for path in folders if path.name in provision.ADMITTED]


def _line(key: Key) -> str:
    return f"{key.fingerprint}  {key.peer.principal}{f'  made {key.created}' if key.created else ''}"
