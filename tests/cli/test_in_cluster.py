"""Tests of `memoire keys in-cluster` against an API server on real sockets, and of `memoire keys check`."""

import base64
import contextlib
import http.server
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.parse

import pytest

from memoire.cli import keys as in_cluster
from memoire.cli import main
from memoire.cli.keys import ApiServer, Secret, ServiceAccount
from memoire.errors import AuthError, KeyFileError, MemoireTimeout, ParameterError, Refused
from memoire.security import keys as keypairs
from memoire.security import provision
from memoire.security.access import Tokens
from memoire.security.keys import Keys, read_blocks
from memoire.security.provision import ADMITTED, cluster_files, public_keys, secret_files, write_new
from memoire.security.roles import ROLES

pytestmark = pytest.mark.slow

NAMES = {*(f"k-{role}" for role in ROLES), "t"}
"""Names of all Secrets that the command creates."""


class FakeApi(http.server.ThreadingHTTPServer):
    """Fake API server of Kubernetes: versioned Secrets, received tokens, and refusals."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, context=None, port=0):
        super().__init__(("127.0.0.1", port), ApiRequestHandler)
        self.secrets, self.asked, self.tokens = {}, [], []
        self.refused: dict[str, tuple[int, float]] = {}  # status and end time of refusals, by method
        self.before = lambda method, name: None
        """Called before each answer, in place of another writer."""
        self.lock, self._version = threading.RLock(), 0
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def handle_error(self, *_):
        """Ignore errors of clients that hang up, as some tests do."""

    def put(self, name, data, labels=None):
        with self.lock:
            self._version += 1
            metadata = {"name": name, "labels": labels or {}, "resourceVersion": str(self._version)}
            self.secrets[name] = {"kind": "Secret", "metadata": metadata, "data": data}

    def files(self, name):
        return {key: base64.b64decode(text).decode() for key, text in self.secrets[name]["data"].items()}

    def close(self):
        self.shutdown()
        self.server_close()
        self._thread.join(10.0)


class ApiRequestHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Print nothing; tests read `asked` instead."""

    def answer(self, status, reply):
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_one(self):
        api = self.server
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
        prefix, _, name = self.path.partition("/secrets")
        name = name.lstrip("/") or body["metadata"]["name"]
        with api.lock:
            api.before(self.command, name)
            api.asked.append((self.command, name))
            api.tokens.append(self.headers.get("Authorization"))
            status, until = api.refused.get(self.command, (0, 0.0))
            if status and time.monotonic() < until:
                text = f'{name} is forbidden: User "system:serviceaccount:rl:memoire-keys" cannot {self.command}'
                return self.answer(status, {"kind": "Status", "message": text})
            assert prefix == "/api/v1/namespaces/rl", prefix
            return self.answer(*getattr(self, self.command.lower())(api, name, body))

    do_GET = do_POST = do_PATCH = handle_one

    def get(self, api, name, _):
        secret = api.secrets.get(name)
        return (200, secret) if secret else (404, {"kind": "Status", "message": "not found"})

    def post(self, api, name, body):
        if name in api.secrets:
            return 409, {"kind": "Status", "message": "already exists"}
        assert (body["kind"], body["apiVersion"], body["type"]) == ("Secret", "v1", "Opaque")
        api.put(name, body["data"], body["metadata"]["labels"])
        return 201, api.secrets[name]

    def patch(self, api, name, body):
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        secret = api.secrets.get(name)
        if secret is None:
            return 404, {"kind": "Status", "message": "not found"}
        if body["metadata"]["resourceVersion"] != secret["metadata"]["resourceVersion"]:
            return 409, {"kind": "Status", "message": "the object has been modified"}
        api.put(name, secret["data"] | body["data"], secret["metadata"]["labels"])
        return 200, api.secrets[name]


@pytest.fixture
def api():
    server = FakeApi()
    yield server
    server.close()


def encoded(files):
    return {name: base64.b64encode(text.encode()).decode() for name, text in files.items()}


def make(api, timeout=20.0, patience=0.0, keys="k", tokens="t"):
    """Run the command and return its lines."""
    lines = []
    at = ApiServer(ServiceAccount(api.url, "rl"), timeout, patience)
    assert in_cluster.make_secrets(keys, tokens, at, lines.append) == 0
    return lines


def folders(api, tmp_path):
    """Write each role's Secret to a folder, as mounted, and return the Keys of each role."""
    keys = {}
    for role in ROLES:
        folder = tmp_path / f"{role}-{time.monotonic_ns()}"
        folder.mkdir()
        for name, text in api.files(f"k-{role}").items():
            write_new(folder / name, text)
        keys[role] = Keys(folder)
    return keys


def assert_whole(api, tmp_path):
    """Check that all roles dial the present server and proxy and are admitted, and that both tokens are valid."""
    by_role = folders(api, tmp_path)
    for role, keys in by_role.items():
        assert keys.own.role == role and keys.own.secret is not None
        assert {by_role["server"].own.public, by_role["proxy"].own.public} <= {key.public for key in keys.servers}
    for role, others in ADMITTED.items():
        assert {by_role[other].own.public for other in others} <= by_role[role].authorized.keys()
    tokens = tmp_path / f"tokens-{time.monotonic_ns()}"
    for name in ("dashboard", "nodes"):
        tokens.write_text(api.files("t")[name])
        assert len(Tokens(tokens).accepted()) == 1
    assert api.files("t")["dashboard"] != api.files("t")["nodes"]


def test_keys_and_tokens_are_made_where_there_are_none_and_else_kept_and_not_even_written(api, tmp_path):
    lines = make(api)
    assert api.secrets.keys() == NAMES and all("created" in line for line in lines) and len(lines) == 7
    assert_whole(api, tmp_path)
    assert all(one["metadata"]["labels"] == {"app.kubernetes.io/part-of": "memoire"} for one in api.secrets.values())
    text = "\n".join(lines)
    assert "BEGIN" not in text and api.files("t")["nodes"] not in text  # the output has no secret
    # The command writes exactly the files that a person creates by hand.
    by_hand = {role: secret_files(role, files) for role, files in cluster_files().items()}
    for role in ROLES:
        assert by_hand[role].keys() == api.files(f"k-{role}").keys()
        dialled = [key.role for key in read_blocks(api.files(f"k-{role}")["server.pub"].encode())]
        assert dialled == [key.role for key in read_blocks(by_hand[role]["server.pub"].encode())]
    before, api.asked = json.dumps(api.secrets), []
    lines = make(api)
    assert json.dumps(api.secrets) == before and {method for method, _ in api.asked} == {"GET"}
    assert len(lines) == 7 and all("exists" in line for line in lines)


@pytest.mark.parametrize(
    "gone", [["actor"], ["server"], ["proxy", "reader"], ["server", "proxy"], ["learner", "server"]]
)
def test_a_secret_that_is_missing_is_made_anew_and_the_others_keep_their_keys(api, tmp_path, gone):
    make(api)
    own = {role: api.files(f"k-{role}")["own.key"] for role in ROLES}
    before = {role: api.files(f"k-{role}") for role in ROLES}
    for role in gone:
        del api.secrets[f"k-{role}"]
    api.asked = []
    make(api)
    assert_whole(api, tmp_path)
    now = {role: api.files(f"k-{role}")["own.key"] for role in ROLES}
    assert {role for role in ROLES if now[role] != own[role]} == set(gone)
    for role in set(ROLES) - set(gone):  # the other roles keep their entries, so that no node is locked out
        for name, text in before[role].items():
            assert api.files(f"k-{role}")[name].startswith(text.rstrip("\n")), (role, name)
    order = [method for method, _ in api.asked if method != "GET"]
    assert order == sorted(order), "the others learn of a key before it is there"  # PATCH before POST


def test_a_key_that_somebody_revoked_is_not_let_in_again(api):
    make(api)
    api.put("k-server", api.secrets["k-server"]["data"] | encoded({"authorized-actor.pub": "# nobody\n"}))
    make(api)
    assert api.files("k-server")["authorized-actor.pub"] == "# nobody\n"


@pytest.mark.parametrize("count", range(1, len(ROLES)))
def test_what_another_one_made_before_it_ended_is_gone_on_with(api, tmp_path, count):
    """Another process writes the first `count` Secrets just before the command, and is killed."""
    theirs = {one.name: one.files for one in provision.missing_keys(dict.fromkeys(ROLES))[:count]}

    def meanwhile(method, name):
        if method == "POST" and not api.secrets:
            for role, files in theirs.items():
                api.put(f"k-{role}", encoded(files))

    api.before = meanwhile
    lines = make(api)
    assert_whole(api, tmp_path)
    for role in theirs:
        assert api.files(f"k-{role}")["own.key"] == theirs[role]["own.key"] and f"secret/k-{role}: created" not in lines


def test_a_secret_that_changes_while_it_is_changed_is_looked_at_again(api, tmp_path):
    make(api)
    del api.secrets["k-actor"]
    changed = []

    def meanwhile(method, name):
        if method == "PATCH" and not changed:
            changed.append(name)
            text = api.files(name)["authorized-reader.pub"] + "# mine\n"
            api.put(name, api.secrets[name]["data"] | encoded({"authorized-reader.pub": text}))

    api.before = meanwhile
    make(api)
    assert_whole(api, tmp_path)
    assert "# mine" in api.files(changed[0])["authorized-reader.pub"]


def test_somebody_who_changes_everything_all_the_time_is_given_up_on(api):
    make(api)
    del api.secrets["k-actor"]
    api.before = lambda method, name: api.put(name, api.secrets[name]["data"]) if method == "PATCH" else None
    with pytest.raises(Refused, match="during each of 20 attempts"):
        make(api)


@pytest.mark.parametrize("status", [401, 403])
def test_who_may_not_is_told_what_the_account_needs(api, status):
    api.refused["POST"] = (status, float("inf"))
    with pytest.raises(AuthError) as caught:
        make(api)
    text = str(caught.value)
    assert "system:serviceaccount:rl:memoire-keys" in text and "cannot POST" in text and str(status) in text
    assert "get and patch of these Secrets, and create" in text and "security.keys and security.tokens" in text
    assert not api.secrets


@pytest.mark.parametrize("status", [403, 429, 503])
def test_a_refusal_that_is_only_early_is_asked_again(api, tmp_path, status, times):
    times(api_server=0.05)
    api.refused["POST"] = (status, time.monotonic() + 0.2)
    make(api, patience=10.0)
    assert_whole(api, tmp_path)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_nobody_there_is_said_at_the_deadline():
    began = time.monotonic()
    at = ApiServer(ServiceAccount(f"http://127.0.0.1:{free_port()}", "rl"), 1.0)
    with pytest.raises(MemoireTimeout, match=r"within 1\.0 s.*NetworkPolicy"):
        in_cluster.make_secrets("k", "t", at, str)
    assert 0.9 < time.monotonic() - began < 10.0


def test_a_server_that_comes_late_is_found(times):
    times(api_server=0.05)
    port, came = free_port(), []
    at = ApiServer(ServiceAccount(f"http://127.0.0.1:{port}", "rl"), 20.0)
    later = threading.Timer(0.2, lambda: came.append(FakeApi(port=port)))
    later.start()
    try:
        assert at.read("k-actor") is None
    finally:
        later.join(10.0)
        for one in came:
            one.close()


def certify(certificate, key, *more):
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kubernetes"]
    subprocess.run([*command, *more, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)


@pytest.fixture
def account(tmp_path):
    """Return the folder that the kubelet mounts for an account, and a TLS context of 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    certify(folder / "ca.crt", tmp_path / "tls.pem", "-addext", "subjectAltName=IP:127.0.0.1")
    (folder / "token").write_text("first\n")
    (folder / "namespace").write_text("rl\n")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.crt", tmp_path / "tls.pem")
    return folder, context


def in_pod(api):
    port = urllib.parse.urlsplit(api.url).port
    return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}


def test_a_pod_knows_the_api_server_and_shows_its_token_as_it_is_now(account):
    folder, context = account
    with contextlib.closing(FakeApi(context)) as api:
        service_account = ServiceAccount.of_pod(in_pod(api), folder)
        assert (service_account.url, service_account.namespace) == (api.url, "rl")
        at = ApiServer(service_account, 20.0)
        assert in_cluster.make_secrets("k", "", at, str) == 0 and set(api.tokens) == {"Bearer first"}
        (folder / "token").write_text("second\n")  # the kubelet renews the token
        assert at.read("k-actor") is not None and api.tokens[-1] == "Bearer second"
        (folder / "token").unlink()
        with pytest.raises(ParameterError, match="the account's token"):
            at.read("k-actor")


def test_an_api_server_with_another_certificate_hears_no_token(account, tmp_path):
    folder, context = account
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    certify(other / "ca.crt", tmp_path / "other.pem")
    with contextlib.closing(FakeApi(context)) as api:
        with pytest.raises(MemoireTimeout, match="certificate verify failed"):
            ApiServer(ServiceAccount.of_pod(in_pod(api), other), 1.0).read("k-actor")
        assert not api.asked


def test_without_encryption_no_token_is_sent(api, tmp_path):
    (tmp_path / "token").write_text("secret")
    ApiServer(ServiceAccount(api.url, "rl", tmp_path), 20.0).read("k-actor")
    assert api.tokens == [None]


def test_elsewhere_than_in_a_pod_it_says_what_to_give(tmp_path, account):
    with pytest.raises(ParameterError, match="KUBERNETES_SERVICE_HOST must be set, as in a Pod.*--api-server"):
        in_cluster.account("", "", {})
    with pytest.raises(ParameterError, match="mounted into the Pod"):
        ServiceAccount.of_pod({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path / "nothing")
    with pytest.raises(ParameterError, match="--api-server"):
        in_cluster.account("127.0.0.1:8001", "", {})
    assert ServiceAccount.of_pod({"KUBERNETES_SERVICE_HOST": "fd00::1"}, account[0]).url == "https://[fd00::1]:443"
    (account[0] / "ca.crt").write_text("none")
    with pytest.raises(ParameterError, match="the account's certificates"):
        ApiServer(ServiceAccount("https://127.0.0.1:1", "rl", account[0]), 1.0).read("k-actor")


def test_the_command_makes_them_by_an_address_that_is_named(api, capsys):
    words = ["--secrets", "k", "--tokens", "t", "--namespace", "rl", "--api-server", api.url]
    assert main.main(["keys", "in-cluster", *words]) == 0
    assert api.secrets.keys() == NAMES and "secret/k-actor: created" in capsys.readouterr().out
    api.refused["GET"] = (400, float("inf"))
    assert main.main(["keys", "in-cluster", *words]) == 1
    assert "memoire: http://127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("secret", "data", "words"),
    [
        ("k-actor", {}, "secret/k-actor has no own.key"),
        ("k-proxy", {"own.key": "rubbish"}, "secret/k-proxy has an own.key that is not a file of keys"),
        ("k-proxy", {"own.key": keypairs.make("actor").text(secret=True)}, "with one key of the role proxy"),
        ("t", {"nodes": "short", "dashboard": "x" * 40}, r"secret/t \(nodes\) is not .*16 to 256"),
        ("t", {"nodes": ""}, r"secret/t \(nodes\) is not"),
    ],
)
def test_a_secret_that_cannot_be_used_is_named_and_nothing_is_changed(api, secret, data, words):
    api.put(secret, encoded(data))
    with pytest.raises(KeyFileError, match=words) as caught:
        make(api, keys="k" if secret != "t" else "")
    assert "short" not in str(caught.value) and api.secrets.keys() == {secret}


def test_what_is_no_text_is_refused_by_name(api):
    api.put("t", {"nodes": base64.b64encode(b"\xff\xfe").decode()})
    with pytest.raises(Refused, match="the Secret t has data that is not text"):
        make(api, keys="")


def test_secrets_are_not_shown():
    shown = repr(Secret({"nodes": "abcdefgh"}, "7")) + repr(provision.missing_keys(dict.fromkeys(ROLES)))
    assert "abcdefgh" not in shown and "BEGIN" not in shown


# ------------------------------------------------------------------------------------------------- mounted Secrets


@pytest.fixture
def mounted(tmp_path):
    """Write own.pub of each role and the tokens, as the chart mounts them."""
    for role, files in cluster_files().items():
        write_new(tmp_path / role / "own.pub", files["own.pub"])
    (tmp_path / "tokens").mkdir()
    for name in ("dashboard", "nodes"):
        (tmp_path / "tokens" / name).write_text("0123456789abcdef\n")
    return tmp_path


def check(folder, capsys, *words):
    status = main.main(["keys", "check", str(folder), "--secrets", "k", "--tokens", "t", *words])
    return status, capsys.readouterr().out


def test_secrets_that_can_be_used_are_told_with_their_fingerprints(mounted, capsys):
    status, output = check(mounted, capsys)
    assert status == 0 and "secret/t: has both tokens" in output
    for role in ROLES:
        (key,) = public_keys(mounted / role)
        assert key.fingerprint in output


def test_keys_from_before_there_were_inference_nodes_are_enough(mounted, capsys):
    shutil.rmtree(mounted / "inference")
    status, output = check(mounted, capsys)
    assert status == 0 and "secret/k-inference: does not exist: no node of the role inference" in output
    status, output = check(mounted, capsys, "--require=inference")
    assert status == 1 and "secret/k-inference" in output and "memoire keys new --kubernetes" in output


def test_every_secret_that_is_missing_or_wrong_is_said_at_once(mounted, capsys):
    shutil.rmtree(mounted / "actor")
    (mounted / "reader" / "own.pub").unlink()  # without its Secret, an optional volume is an empty folder
    (mounted / "proxy" / "own.pub").write_text(keypairs.make("learner").text())
    (mounted / "tokens" / "nodes").write_text("too-short")
    status, output = check(mounted, capsys)
    assert status == 1
    assert "secret/k-actor does not exist" in output and "secret/k-reader does not exist" in output
    assert "memoire keys new --kubernetes NAME" in output
    assert "secret/k-proxy has no own.pub with one key of the role proxy" in output
    assert "secret/t (nodes) is not a file with a token on each line: 16 to 256" in output and "too-short" not in output
    shutil.rmtree(mounted / "tokens")
    status, output = check(mounted, capsys)
    assert status == 1 and "secret/t does not exist, or has no dashboard and no nodes" in output
    assert "kubectl create secret generic NAME" in output
