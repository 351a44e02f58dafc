"""Keys, tokens and addresses: files that change while a process runs, refused permissions, and open addresses."""

import os
import socket
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import example, given
from hypothesis import strategies as st

import memoire
import netkit
from history.ports import block
from memoire.cli import main, operate
from memoire.cli.main import parser
from memoire.cli.options import page_options
from memoire.errors import InsecureWarning, KeyFileError, MemoireTimeout, ParameterError, ProtocolError, Refused
from memoire.limits import Limits
from memoire.nodes.http import NodePages
from memoire.security import access, roles
from memoire.security import keys as key_files
from memoire.security import provision as key_writer
from memoire.security.access import MAX_ADDRESSES, MAX_WRONG_TOKENS, PENALTY_INTERVAL, Tokens, WrongTokens, read_tokens
from memoire.security.keys import Keys
from memoire.security.roles import ConnectionClients, Peer, TokenBuckets
from memoire.wire import messages, types
from memoire.wire.frames import ROUNDTRIP, encode, name_hash, parse, table_number
from netkit import QUICK, in_thread, until
from poolkit import Clock

# --- Keys as text and files: a running process reads files again, and refuses files that other users may read


@pytest.fixture
def keys_folder(tmp_path):
    key_writer.write_cluster(tmp_path / "keys")
    return tmp_path / "keys"


def read_again(keys):
    """Call `refresh` as if a second had passed."""
    keys._checked_at = 0.0
    return keys.refresh()


def test_a_new_cluster_has_a_folder_for_each_role_and_knows_itself(keys_folder):
    for role in roles.ROLES:
        keys = Keys(keys_folder, role)
        assert keys.folder == keys_folder / role and keys.own.peer == Peer(role, key_files.default_key_name(role))
        assert {key.role for key in keys.servers} == {"server", "proxy", "inference"}
        assert (keys_folder / role / "own.key").stat().st_mode & 0o777 == 0o600
    admitted = {key.peer.principal for key in Keys(keys_folder / "server").authorized.values()}
    names = "actor/actors learner/learners reader/readers proxy/proxies server/servers inference/inference-nodes"
    assert admitted == set(names.split())
    assert Keys(keys_folder, "server").peer(Keys(keys_folder, "actor").own.public) == Peer("actor", "actors")
    assert not Keys(keys_folder / "actor").authorized
    (keys_folder / "actor" / "server.pub").unlink()
    assert Keys(keys_folder, "actor").servers == ()


def test_a_key_survives_its_text_and_never_shows_its_secret_half():
    key = key_files.make("learner", "team-b")
    (back,) = key_files.read_blocks(key.text(secret=True).encode())
    assert back == key and back.secret == key.secret
    (public,) = key_files.read_blocks(key.text().encode())
    assert public.public == key.public and public.secret is None and public.fingerprint == key.fingerprint
    assert key.secret.hex() not in repr(key).replace("\\x", "") and repr(key.secret)[2:-1] not in repr(key)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text.replace("Role: actor", "Role: king"), "not one of actor"),
        (lambda text: text.replace("Role: actor\n", "Role: " + text.splitlines()[-2] + "\n"), "not one of actor"),
        (lambda text: text.replace("Name: a1", "Name: ../a1"), "letters, digits"),
        (lambda text: text.replace("Name: a1\n", ""), "letters, digits"),
        (lambda text: text.replace("Name: a1\n", "Name: a1\nName: a2\n"), "each once"),
        (lambda text: text.replace("-----END", "----END"), "no line"),
        (lambda text: text[:-45], "no line"),
        (lambda text: "hello\n" + text, "outside of keys"),
        (lambda text: text.replace("=\n", "\n"), "base64"),
        (lambda text: text + "\N{SNOWMAN}", "not ASCII"),
        (lambda text: text * 8000, "the limit is 1000000"),
        (lambda text: text * 4097, "more than 4096"),
    ],
)
def test_what_is_wrong_with_a_file_of_keys_is_said_without_repeating_it(damage, words):
    key = key_files.make("actor", "a1")
    text = key.text(secret=True)
    with pytest.raises(ValueError, match=words) as caught:
        key_files.read_blocks(damage(text).encode())
    assert text.splitlines()[-2][:12] not in str(caught.value)


@given(st.binary(max_size=300))
@example(b"-----BEGIN MEMOIRE PUBLIC KEY-----")
@example(
    b"-----BEGIN MEMOIRE PUBLIC KEY-----\nName: a\nRole: actor\n\n" + b"A" * 43 + b"=\n-----END MEMOIRE PUBLIC KEY-----"
)
def test_any_bytes_are_keys_or_a_value_error(data):
    try:
        key_files.read_blocks(data)
    except ValueError:
        pass


@given(st.binary(max_size=140))
@example(roles.passport_frame(Peer("server", "a"))[:5] + bytes([len(roles.ROLES)]) + b"a")  # beyond the last role
@example(roles.passport_frame(Peer("server", "a"))[:5] + bytes([len(roles.ROLES) - 1]) + b"a")
def test_any_bytes_are_a_passport_or_a_protocol_error(data):
    try:
        peer = roles.read_passport(data)
    except ProtocolError as error:
        assert error.code == "passport"
    else:
        assert roles.passport_frame(peer) == data


def test_a_passport_says_whose_a_message_is():
    for role in roles.ROLES:
        assert roles.read_passport(roles.passport_frame(Peer(role, "a-1.b_2"))) == Peer(role, "a-1.b_2")


def test_a_secret_that_others_may_read_is_refused(keys_folder):
    own = keys_folder / "actor" / "own.key"
    for mode in (0o604, 0o660, 0o602):
        own.chmod(mode)
        with pytest.raises(KeyFileError, match=rf"other users may read \(mode 0{mode:o}\).*chmod 600"):
            Keys(keys_folder / "actor")
    own.chmod(0o440)  # a kubelet mounts keys for fsGroup with mode 440
    real = os.stat(own)
    root, other = (os.stat_result((*real[:4], uid, *real[5:])) for uid in (0, 1000))
    key_files.check_status(own, root)
    with pytest.raises(KeyFileError, match="0440"):
        key_files.check_status(own, other)


def test_a_folder_is_read_again_when_it_changes_and_a_damaged_file_changes_nothing(keys_folder):
    keys = Keys(keys_folder / "server")
    assert not read_again(keys) and keys.changes == 0
    one = key_files.make("actor", "team-b")
    path = key_writer.authorize(keys_folder / "server", one)
    assert read_again(keys) and keys.peer(one.public) == one.peer
    two = key_files.make("actor", "team-b")
    assert (
        key_writer.authorize(keys_folder / "server", two) == path
        and key_writer.authorize(keys_folder / "server", two) == path
    )
    assert read_again(keys) and keys.peer(one.public) == keys.peer(two.public) == one.peer
    path.write_text("nonsense")
    assert not read_again(keys) and str(path) in keys.problem and keys.peer(one.public) is not None
    path.unlink()
    assert read_again(keys) and not keys.problem and keys.peer(one.public) is None
    assert keys.changes == 3


def test_more_files_of_keys_than_are_read_are_refused_by_name_and_a_running_node_keeps_those_that_it_has(keys_folder):
    keys = Keys(keys_folder / "server")
    one = key_files.make("actor", "team-b")
    key_writer.authorize(keys_folder / "server", one)
    assert read_again(keys)
    folder, held = keys_folder / "server" / "authorized" / "actor", dict(keys.authorized)
    for number in range(key_files.MAX_FILES + 1):
        (folder / f"{number}.pub").touch()
    assert not read_again(keys) and "files of authorized keys, more than 4096" in keys.problem
    assert keys.authorized == held
    with pytest.raises(KeyFileError, match="Put the keys of a role into fewer files"):
        Keys(keys_folder / "server")
    for number in range(key_files.MAX_FILES + 1):
        (folder / f"{number}.pub").unlink()
    assert not read_again(keys) and not keys.problem and keys.authorized == held


def test_a_key_in_the_folder_of_another_role_lets_nobody_in_and_a_secret_among_public_keys_is_refused(keys_folder):
    authorized = keys_folder / "server" / "authorized"
    (authorized / "actor" / "actors.pub").rename(authorized / "learner" / "actors.pub")
    with pytest.raises(KeyFileError, match="of an actor, but admits clients as a learner.*Move it"):
        Keys(keys_folder / "server")
    (authorized / "learner" / "actors.pub").unlink()
    (authorized / "actor" / "actors.pub").write_text(key_files.make("actor").text(secret=True))
    with pytest.raises(KeyFileError, match="holds the secret key 'actors'"):
        Keys(keys_folder / "server")


def test_a_folder_without_keys_says_what_is_missing(tmp_path, keys_folder):
    with pytest.raises(KeyFileError, match=r"does not exist or is not a folder.*memoire keys new"):
        Keys(tmp_path / "nowhere", "actor")
    with pytest.raises(KeyFileError, match="has no own.key, nor boss/own.key"):
        Keys(keys_folder, "boss")
    (keys_folder / "actor" / "own.key").write_bytes((keys_folder / "actor" / "own.pub").read_bytes())
    with pytest.raises(KeyFileError, match="does not hold one secret key"):
        Keys(keys_folder / "actor")


def test_keys_are_given_by_value_path_or_environment(keys_folder, monkeypatch):
    monkeypatch.delenv("MEMOIRE_KEYS", raising=False)
    assert Keys.from_setting(None, "actor") is None
    keys = Keys.from_setting(str(keys_folder), "actor")
    assert keys.own.role == "actor" and Keys.from_setting(keys, "server") is keys
    monkeypatch.setenv("MEMOIRE_KEYS", str(keys_folder))
    assert Keys.from_setting(None, "learner").own.role == "learner"


def test_many_threads_may_look_whether_a_folder_has_changed(keys_folder):
    keys = Keys(keys_folder / "server")
    key_writer.authorize(keys_folder / "server", key_files.make("reader", "extra"))
    keys._checked_at = 0.0
    threads = [in_thread(keys.refresh) for _ in range(8)]
    for thread, _ in threads:
        thread.join(100)
    assert sorted(box["value"] for _, box in threads) == [False] * 7 + [True]


NAMES = ("actor", "reader", "publisher", "learner", "server", "proxy", "doctor", "client", "king", "inference", "")
ANYBODY = {"doctor", "client", "proxy"}  # roles that any process may take, for an attempt or as a relay
CALLED = {
    "actor": {"actor"} | ANYBODY,
    "reader": {"reader"} | ANYBODY,
    "proxy": ANYBODY,
    "inference": {"inference"} | ANYBODY,
    "learner": set(NAMES),
    "server": set(NAMES),
    "": set(NAMES),  # the server asks for no keys
}
"""Names that a process may use in HELLO, by the role of its key."""
LISTED = [line.split() for line in (Path(__file__).parents[1] / "wire" / "types.txt").read_text().splitlines()]
SENDS = {role: {row[1] for row in LISTED if role in row[5:]} for role in roles.ROLES}
SENDS[""] = {row[1] for row in LISTED}
"""Messages that a process may send, by role; an actor may also draw from the table of `memoire doctor`."""


def is_refused(check, *arguments):
    try:
        check(*arguments)
    except ProtocolError as error:
        assert error.code == "role"
        return True
    return False


@pytest.mark.parametrize("role", CALLED)
def test_every_pair_of_a_keys_role_and_a_name_is_taken_or_refused(role):
    for table, taken in (("", CALLED[role]), ("others", CALLED[role]), (ROUNDTRIP, CALLED[role])):
        taken = set(NAMES) if table == ROUNDTRIP and role == "actor" else taken
        for name in NAMES:
            hello = messages.Hello(role=name, table=table)
            assert is_refused(Peer(role, "x").check_hello, hello) == (name not in taken), (table, name)


@pytest.mark.parametrize("role", SENDS)
def test_every_pair_of_a_role_and_a_message_is_taken_or_refused(role):
    for table in (0, table_number("others"), table_number(ROUNDTRIP)):
        tries = {"SUMS", "DRAW"} if role == "actor" and table == table_number(ROUNDTRIP) else set()
        taken = SENDS[role] | tries
        for kind in types.TYPES.values():
            assert is_refused(Peer(role, "x").check, kind, table) == (kind.name not in taken), (table, kind.name)


# ------------------------------------------------------------------------------------------------ command line


def test_keys_are_made_listed_authorized_and_revoked_from_the_command_line(tmp_path, capsys):
    folder, extra = str(tmp_path / "keys"), str(tmp_path / "extra")
    assert main.main(["keys", "new", folder]) == 0
    assert main.main(["keys", "new", extra, "--role", "actor", "--name", "team-b", "--server", f"{folder}/proxy"]) == 0
    assert main.main(["keys", "authorize", folder, extra]) == 0
    key = Keys(extra).own
    assert [Keys(f"{folder}/{role}").peer(key.public) for role in ("server", "proxy")] == [key.peer] * 2
    assert [each.role for each in Keys(extra).servers] == ["proxy"]
    capsys.readouterr()
    assert main.main(["keys", "list", folder]) == 0
    shown = capsys.readouterr().out
    assert f"admits {key.fingerprint}  actor/team-b" in shown
    for role in roles.ROLES:
        assert (tmp_path / "keys" / role / "own.key").read_text().splitlines()[5] not in shown
    assert main.main(["keys", "revoke", folder, key.fingerprint, "reader/readers"]) == 0
    left = {each.role for each in Keys(f"{folder}/server").authorized.values()}
    assert left == {"actor", "learner", "proxy", "server", "inference"}
    assert main.main(["keys", "revoke", folder, key.fingerprint]) == 1
    assert "does not admit" in capsys.readouterr().err


def test_keys_that_are_there_are_never_written_over(tmp_path, capsys):
    folder = str(tmp_path / "keys")
    assert main.main(["keys", "new", folder]) == 0
    before = (tmp_path / "keys" / "server" / "own.key").read_bytes()
    assert main.main(["keys", "new", folder]) == 1
    assert main.main(["keys", "new", f"{folder}/server", "--role", "server"]) == 1
    assert "was not changed" in capsys.readouterr().err
    assert (tmp_path / "keys" / "server" / "own.key").read_bytes() == before


def test_secrets_for_kubernetes_are_keys_folders_when_they_are_mounted(tmp_path, capsys):
    yaml = pytest.importorskip("yaml")
    assert main.main(["keys", "new", "--kubernetes", "ant"]) == 0
    text = capsys.readouterr().out
    assert {(each["kind"], each["type"]) for each in yaml.safe_load_all(text)} == {("Secret", "Opaque")}
    mounted(text, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"ant-{role}" for role in roles.ROLES}
    assert len(Keys(tmp_path / "ant-server").authorized) == len(Keys(tmp_path / "ant-proxy").authorized) == 6
    assert Keys(tmp_path / "ant-proxy").peer(Keys(tmp_path / "ant-actor").own.public) == Peer("actor", "actors")


def mounted(text, where):
    """Write the files of these Secrets into folders, as they are in Pods; return the parent folder."""
    for secret in pytest.importorskip("yaml").safe_load_all(text):
        for path, content in secret["stringData"].items():
            key_writer.write_new(where / secret["metadata"]["name"] / path, content)
    return where


def test_a_folder_of_keys_is_exported_as_secrets_and_what_is_revoked_is_gone_from_them(tmp_path, capsys):
    folder, new = str(tmp_path / "keys"), str(tmp_path / "new")
    assert main.main(["keys", "new", folder]) == 0
    assert main.main(["keys", "new", new, "--role", "actor", "--server", f"{folder}/actor"]) == 0
    assert main.main(["keys", "authorize", folder, new]) == 0
    former, key = Keys(f"{folder}/actor").own, Keys(new).own
    capsys.readouterr()
    assert main.main(["keys", "export", folder, "--kubernetes", "ant"]) == 0
    there = mounted(capsys.readouterr().out, tmp_path / "both")
    assert sorted(path.name for path in there.iterdir()) == sorted(f"ant-{role}" for role in roles.ROLES)
    for role in roles.ROLES:
        own, exported = Keys(f"{folder}/{role}"), Keys(there / f"ant-{role}")
        assert own.own.text(secret=True) == exported.own.text(secret=True)
        assert (own.servers, own.authorized) == (exported.servers, exported.authorized)
    assert Keys(there / "ant-proxy").peer(key.public) == Keys(there / "ant-proxy").peer(former.public)
    assert main.main(["keys", "revoke", folder, key.fingerprint, "actor/actors"]) == 0
    capsys.readouterr()
    assert main.main(["keys", "export", folder, "--kubernetes", "ant"]) == 0
    text = capsys.readouterr().out
    # The file stays, without keys: applying a Secret removes no entry that stringData does not name.
    assert text.count("authorized-actor.pub: |\n    # no keys\n") == 3
    assert Keys(mounted(text, tmp_path / "after") / "ant-proxy").peer(former.public) is None


def test_one_process_keys_are_exported_as_the_secret_of_its_role(tmp_path, capsys):
    assert main.main(["keys", "new", str(tmp_path / "new"), "--role", "actor", "--name", "team-b"]) == 0
    capsys.readouterr()
    assert main.main(["keys", "export", str(tmp_path / "new"), "--kubernetes", "ant"]) == 0
    folder = mounted(capsys.readouterr().out, tmp_path / "made") / "ant-actor"
    assert Keys(folder).own.name == "team-b"
    assert main.main(["keys", "export", str(tmp_path / "nowhere"), "--kubernetes", "ant"]) == 1
    assert "does not exist or is not a folder" in capsys.readouterr().err


def test_the_command_line_knows_the_roles_of_keys():
    assert operate.ROLES == roles.ROLES


# --- Tokens in files that change during use, and the cost of wrong guesses

OLD, NEW = "old-token-old-token", "new-token-new-token"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "token"
    path.write_text(OLD + "\n")
    return path


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "short", "with a blank in the middle", f"{OLD}\nshort", "x" * 300, "ünprintable-token-x", "a\x00" * 16]
    + [f"{OLD}\n" * 17],
)
def test_a_file_that_holds_anything_but_tokens_is_refused(path, text):
    path.write_text(text)
    for read in (read_tokens, Tokens):
        with pytest.raises(
            ParameterError, match="a token on each line: 16 to 256 printable ASCII characters"
        ) as raised:
            read(path)
        assert OLD not in str(raised.value)


def test_a_changed_file_holds_from_the_next_question_on(path):
    tokens = Tokens(path)
    path.write_text(f"{OLD}\n{NEW}\n")
    assert tokens.holds(OLD) and tokens.holds(NEW)
    path.write_text(f"{NEW}\n")
    assert tokens.holds(NEW) and not tokens.holds(OLD) and tokens.first == NEW


def test_a_link_that_is_swapped_as_kubelet_does_is_a_changed_file(tmp_path):
    for name, token in (("one", OLD), ("two", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(token)
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "token").symlink_to("..data/token")
    tokens = Tokens(tmp_path / "token")
    assert tokens.first == OLD
    (tmp_path / "..new").symlink_to("two")
    os.replace(tmp_path / "..new", tmp_path / "..data")
    assert tokens.first == NEW and not tokens.holds(OLD)


@pytest.mark.parametrize("damage", ["gone", "no token"])
def test_a_file_that_is_damaged_lets_nobody_in_until_it_is_mended(path, damage, caplog):
    tokens = Tokens(path)
    path.unlink() if damage == "gone" else path.write_text("short")
    assert not tokens.holds(OLD) and not tokens.holds("") and not tokens.holds("short") and tokens.first is None
    assert len(caplog.records) == 1 and "no token is accepted" in caplog.text and OLD not in caplog.text
    path.write_text(OLD)
    assert tokens.holds(OLD)


def test_tokens_are_never_shown(path):
    tokens = Tokens(path)
    assert OLD not in repr(tokens) and OLD not in str(tokens) and OLD not in repr(Tokens.from_setting(OLD))
    assert (
        Tokens.from_setting(None) is None
        and Tokens.from_setting(tokens) is tokens
        and Tokens.from_setting(OLD).holds(OLD)
    )


def test_nothing_and_a_file_that_is_not_there_are_no_tokens(tmp_path):
    with pytest.raises(ParameterError, match="some characters, or None"):
        Tokens.from_setting("")
    assert not Tokens(given=("",)).holds("")
    with pytest.raises(ParameterError, match="No such file"):
        Tokens(tmp_path / "none")


# ------------------------------------------------------------------------------------------------------------- guesses


def test_some_mistakes_are_free_and_then_each_costs_time():
    clock = Clock(1000.0)
    guesses = WrongTokens(clock)
    for _ in range(MAX_WRONG_TOKENS):
        assert guesses.wait("10.0.0.1") == 0.0
        guesses.count_wrong("10.0.0.1")
    assert guesses.wait("10.0.0.1") == pytest.approx(PENALTY_INTERVAL) and guesses.wait("10.0.0.2") == 0.0
    clock.now += PENALTY_INTERVAL
    assert guesses.wait("10.0.0.1") == 0.0
    guesses.count_wrong("10.0.0.1")
    assert guesses.wait("10.0.0.1") == pytest.approx(PENALTY_INTERVAL)
    clock.now += MAX_WRONG_TOKENS * PENALTY_INTERVAL
    guesses.count_wrong("10.0.0.1")
    assert guesses.wait("10.0.0.1") == 0.0  # the server forgives the old mistakes


def test_a_network_of_ipv6_is_one_guesser_and_an_ipv4_address_is_one_in_either_form():
    guesses = WrongTokens(Clock(1000.0))
    for last in range(MAX_WRONG_TOKENS):
        guesses.count_wrong(f"2001:db8::{last:x}")
    assert guesses.wait("2001:db8::ffff") > 0.0 and guesses.wait("2001:db8:0:1::1") == 0.0
    for _ in range(MAX_WRONG_TOKENS):
        guesses.count_wrong("::ffff:10.0.0.1")
    assert guesses.wait("10.0.0.1") > 0.0


def test_guessers_are_remembered_up_to_a_bound():
    guesses = WrongTokens(Clock(1000.0))
    addresses = [f"10.0.{number // 256}.{number % 256}" for number in range(MAX_ADDRESSES + 2)]
    for address in addresses:
        for _ in range(MAX_WRONG_TOKENS):
            guesses.count_wrong(address)
    waits = [guesses.wait(address) > 0.0 for address in addresses]
    assert waits == [False, False] + [True] * MAX_ADDRESSES


# --- Addresses that other machines reach: a listener that is open to all warns, or is refused

HERE = [
    "tcp://127.0.0.1:5560", "tcp://127.3.2.1:0", "tcp://localhost:5560", "tcp://LOCALHOST:1", "tcp://[::1]:5560",
    "tcp://[::ffff:127.0.0.1]:1", "ipc:///run/memoire", "ipc://@abstract", "inproc://memoire", "127.0.0.1:8080",
    "[::1]:8080", "localhost:0", "http://127.0.0.1:8080",
]  # fmt: skip
ELSEWHERE = [
    "tcp://*:5560", "tcp://0.0.0.0:5560", "tcp://[::]:5560", "tcp://10.0.0.1:1", "tcp://eth0:5560", "tcp://server-0:1",
    "tcp://localhost.evil.example:1", "tcp://127.0.0.1.evil.example:1", "tcp://[fe80::1%eth0]:1", "*:8080", ":8080",
    "http://0.0.0.0:8080", "tcp://:5560",
]  # fmt: skip


@pytest.mark.parametrize("address", HERE)
def test_an_address_of_this_machine_is_local(address):
    assert access.is_local(address)
    access.refuse("--listen", address, guard="a token")


@pytest.mark.parametrize("address", ELSEWHERE)
def test_an_address_that_others_reach_is_not(address):
    assert not access.is_local(address) and access.reachable([*HERE, address]) == [address]
    with pytest.raises(ParameterError, match=r"or a token, or --insecure for open access"):
        access.refuse("--listen", address, guard="a token")


def test_a_warning_names_the_addresses_that_others_reach_alone_and_what_to_do():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        access.warn("this server", HERE, guard="keys")
        with memoire.Server("tcp://127.0.0.1:0", netkit.SCHEMA) as server, NodePages("127.0.0.1:0", server):
            memoire.Proxy("inproc://front-that-is-here", [server.endpoint]).close()
    with pytest.warns(
        InsecureWarning, match=r"this server listens at tcp://\*:1, tcp://\*:2, which other machines .* keys"
    ):
        access.warn("this server", ["tcp://*:1", *HERE, "tcp://*:2"], guard="keys")


def test_a_server_that_is_open_warns_of_each_address_once():
    with pytest.warns(InsecureWarning) as caught, memoire.Server("tcp://*:0", netkit.SCHEMA, name="wide") as server:
        assert server.add_pull_worker("tcp://*:0") in str(caught[1].message)
        server.add_request_worker("tcp://127.0.0.1:0")
        bound = ", ".join([server.endpoint, server.push_endpoint, server.pub_endpoint])
        assert (
            f"server 'wide' listens at {bound}, which other machines can reach" in str(caught[0].message)
            and len(caught) == 2
        )
        assert "keys (keys=)" in str(caught[0].message) and caught[0].filename == __file__


def test_a_classic_server_that_is_open_warns_and_works():
    one, none = np.zeros(1, np.float32), np.float32(0)
    with pytest.warns(InsecureWarning, match="which other machines can reach"):
        server = memoire.ReplayMemoryServer(one, one, one, none, one, one, one, 64, "tcp://*:0", 4)
    with pytest.warns(InsecureWarning, match="which other machines can reach") as caught:
        loop = threading.Thread(target=server.rep_worker_main, args=("tcp://*:0", "Bind"))
        loop.start()
        until(lambda: len(caught))
    server.close()
    loop.join(100.0)


def is_taken(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False


def test_who_makes_the_warning_an_error_gets_no_open_server():
    port = block(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", InsecureWarning)
        with pytest.raises(InsecureWarning):
            memoire.Server(memoire.Endpoints(f"tcp://*:{port}", push="tcp://*:0", publish="tcp://*:0"), netkit.SCHEMA)
        with pytest.raises(InsecureWarning, match="may read its pages"):
            NodePages("*:0")
    until(lambda: not is_taken(port))  # the server's address


SCHEMA = '{"columns": {}}'
COMMANDS = {
    "server": (["server", "--schema", SCHEMA, "--endpoint", "tcp://*:5560"], "--endpoint"),
    "proxy": (["proxy", "tcp://server:5560", "--endpoint", "tcp://0.0.0.0:5560"], "--endpoint"),
    "relay": (["relay", "tcp://server:5560", "--endpoint", "tcp://10.0.0.1:5560"], "--endpoint"),
    "up": (["up", "--schema", SCHEMA, "--host", "*"], "--host"),
    "server's pages": (["server", "--schema", SCHEMA, "--http", "*:8080"], "--http"),
    "proxy's pages": (["proxy", "tcp://server:5560", "--http", "0.0.0.0:8080"], "--http"),
    "dashboard": (["dashboard", "http://server:8080", "--listen", "*:8265"], "--listen"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_would_be_open_to_everybody_is_refused(command, capsys, monkeypatch):
    monkeypatch.delenv("MEMOIRE_KEYS", raising=False)
    words, option = COMMANDS[command]
    assert main.main(words) == 1
    errors = capsys.readouterr().err
    assert f"{option}" in errors and "--insecure for open access" in errors


def test_what_nobody_chose_is_this_machine_only():
    for words in (["server", "--schema", SCHEMA], ["proxy", "tcp://a:1"], ["relay", "tcp://a:1"]):
        options = parser().parse_args(words)
        assert access.is_local(options.endpoint) and access.is_local(options.http) and options.probes is None
    assert access.is_local(f"tcp://{parser().parse_args(['up', '--schema', SCHEMA]).host}:1")
    assert access.is_local(parser().parse_args(["dashboard", "http://a:1"]).listen)


@pytest.mark.parametrize("place", ["file", "environment"])
def test_settings_that_would_be_open_to_everybody_are_refused_like_flags(place, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MEMOIRE_KEYS", raising=False)
    words = ["proxy", "tcp://server:5560"]
    if place == "file":
        path = tmp_path / "memoire.toml"
        path.write_text('[proxy]\nendpoint = "tcp://*:5560"\n')
        words += ["--settings", str(path)]
    else:
        monkeypatch.setenv("MEMOIRE_ENDPOINT", "tcp://*:5560")
    assert main.main(words) == 1
    assert "--insecure for open access" in capsys.readouterr().err


def test_keys_tokens_or_the_word_insecure_let_a_command_listen_for_others(tmp_path):
    key_writer.write_cluster(tmp_path / "keys")
    (tmp_path / "token").write_text("a-token-that-is-long")
    wide = ["server", "--schema", SCHEMA, "--endpoint", "tcp://*:0", "--http", "*:0"]
    guarded = parser().parse_args(
        [*wide, "--keys", str(tmp_path / "keys"), "--http-token-file", str(tmp_path / "token")]
    )
    options = page_options(guarded)
    assert options["http"] == "*:0" and options["http_token"].first == "a-token-that-is-long"
    assert page_options(parser().parse_args([*wide, "--insecure"]))["http_token"] is None


# --- Rate of new clients: a burst, then a rate per second; known clients go on, also over real connections

FEW = Limits.of(connection_clients=3, connection_clients_rate=0.5)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-1.0, 3.0)), max_size=40))
def test_no_key_takes_more_than_its_burst_and_what_came_back_since(steps):
    buckets, now, taken, began = TokenBuckets(3, 0.5), 100.0, {"a": [], "b": []}, 100.0
    for key, seconds in steps:
        now += seconds
        if buckets.take(key, now):
            taken[key].append(now)
    for times in taken.values():
        latest = max([began, *times])
        assert len(times) <= 3 + 0.5 * (latest - began) + sum(max(0.0, -seconds) for _, seconds in steps) + 1e-6


def test_keys_are_bounded_and_the_one_that_took_nothing_for_longest_is_forgotten():
    buckets = TokenBuckets(1, 0.0, most=2)
    assert all(buckets.take(key, 0.0) for key in "abc")
    assert buckets.take("a", 0.0) and not buckets.take("c", 0.0)


def test_a_connection_brings_few_clients_and_more_after_a_while_and_those_it_brought_go_on():
    clients = ConnectionClients(2, 1.0)
    for client in (b"1", b"2", b"1"):
        clients.check(b"here", client, 0.0)
    with pytest.raises(ProtocolError, match=r"brought 2 clients \(connection_clients\); 1 more may come per second"):
        clients.check(b"here", b"3", 0.0)
    clients.check(b"there", b"3", 0.0)
    clients.check(b"here", b"2", 0.0)
    clients.check(b"here", b"3", 1.0)


class Stranger:
    """Connection that sends requests in the name of any client."""

    def __init__(self, cluster, endpoint):
        self.socket = cluster.context.socket(zmq.DEALER)
        self.socket.linger, self.socket.rcvtimeo = 0, 30_000
        self.socket.connect(endpoint)

    def ask(self, client, body, number=1, home=0):
        self.socket.send_multipart([b"", *encode(body, client=client, sequence=number, home=home)])
        return parse(self.socket.recv_multipart()[1:]).body


@pytest.mark.slow
@pytest.mark.parametrize("through", ["server", "proxy"])
def test_a_connection_that_makes_up_clients_is_stopped_where_it_ends(cluster, through):
    server = cluster.server(limits=FEW)
    node = server if through == "server" else cluster.proxy([server], limits=FEW)
    stranger, other = Stranger(cluster, node.endpoint), Stranger(cluster, node.endpoint)
    names = [bytes([number]) * 16 for number in range(1, 6)]
    replies = [stranger.ask(name, messages.Hello(role="actor")) for name in names]
    assert [getattr(each, "code", "") for each in replies] == ["", "", "", "busy", "busy"]
    assert "connection_clients" in replies[-1].text
    home = name_hash(server.name)
    assert isinstance(stranger.ask(names[0], messages.Update(steps=1), 2, home), messages.Updated)
    assert isinstance(other.ask(names[4], messages.Hello(role="actor")), messages.Welcome)
    until(lambda: node.stats().refused.get("busy") == 2)
    other.socket.close()
    stranger.socket.close()


@pytest.mark.slow
def test_a_client_that_comes_too_soon_says_so_or_gets_in_later(cluster):
    server = cluster.server(limits=Limits.of(new_clients=1, new_clients_rate=0.0, connection_clients=0))
    with pytest.raises(Refused, match="connection_clients") as refused:
        cluster.client(server, limits=QUICK, timeout=0.5)
    assert refused.value.code == "busy"


def test_steps_of_a_newcomer_that_has_to_wait_are_kept(cluster):
    server = cluster.server(limits=Limits.of(new_clients=1, new_clients_rate=0.0))
    first, second = (cluster.client(server, limits=QUICK) for _ in range(2))
    first.on_entries(5)
    first.update(100.0)
    second.on_entries(7)
    with pytest.raises(MemoireTimeout):
        second.update(0.3)
    assert server.total_steps == 5 and second.stats().steps == 7
    server._dispatcher.newcomers.burst = 10
    server._dispatcher.newcomers._buckets.clear()
    second.update(100.0)
    assert server.total_steps == 12
