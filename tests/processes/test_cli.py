"""Tests of the command line: each command's work, its errors, and the doctor's findings."""

import contextlib
import functools
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import memoire
import netkit
from history import ports
from memoire.cli import doctor, main
from memoire.errors import ParameterError
from memoire.limits import wall_clock
from memoire.nodes import roles
from memoire.wire import messages
from memoire.wire.frames import Message, parse, reply

SCHEMA = memoire.Schema({"obs": memoire.Column(np.float32, (4,), role="state"), "reward": ("float32", ())})
Captured = pytest.CaptureFixture[str]


def run(*arguments: str, status: int = 0, timeout: float = 100.0) -> str:
    """Run the command as a process; return its output and errors."""
    command = [sys.executable, "-m", "memoire", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_reader_of_the_output_that_ends_is_no_fault_of_the_command() -> None:
    """In `memoire plan | head -1`, the reader ends before the output."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "memoire", "plan"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100.0, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_wrong_command_line_ends_with_2(capsys: Captured) -> None:
    for arguments in (["dance"], ["doctor"], ["up", "--env", "x", "--schema", "y"]):
        with pytest.raises(SystemExit) as ended:
            main.main(arguments)
        assert ended.value.code == 2
    assert "memoire up: argument --schema: not allowed with argument --env\nFor example: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--schema", "/no/such/file"], "cannot read the schema from '/no/such/file': No such file"),
        (["up", "--env", "NoSuchEnv-v0"], "Gymnasium cannot make 'NoSuchEnv-v0'"),
        (["up", "--env", "CartPole-v1", "--servers", "0"], "--servers must be at least 1, got 0"),
        (["up", "--env", "CartPole-v1", "--servers", "2", "--proxies", "0"], "--proxies must be at least 1"),
        (["up", "--env", "CartPole-v1", "--set", "multi_step=0"], "multi_step must be"),
        (["server"], "Give the table's columns: --schema FILE, --env ID or --tables FILE"),
        (["server", "--tables", "t.json", "--set", "multi_step=3"], "--set cannot be combined with --tables"),
        (["demo", "--actors", "0"], "--actors must be at least 1, got 0"),
        (["demo", "--seconds", "0"], "--seconds must be a number of seconds above 0"),
        (["demo", "--env", "Pendulum-v1"], "needs discrete actions"),
        (["demo", "--env", "FrozenLake-v1"], "observations in a Box"),
        (["server", "--env", "CartPole-v1", "--http", "nonsense"], "cannot serve HTTP at 'nonsense'"),
        (
            ["proxy", "--endpoint", "tcp://127.0.0.1:0"],
            "Give either addresses of servers (SERVER ...), or --servers-file",
        ),
        (["totals", "tcp://127.0.0.1:9", "--timeout", "0.2"], "no welcome"),
    ],
)
def test_what_cannot_be_done_is_explained_in_a_line(arguments: list[str], words: str, capsys: Captured) -> None:
    assert main.main(arguments) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("memoire: ")
    assert words in errors


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [("dashboard http://127.0.0.1:9", "uvicorn", "dashboard"), ("demo --seconds 1", "gymnasium", "demo")],
)
def test_a_missing_extra_is_named(
    command: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "memoire.dashboard.web.serve", raising=False)
    assert main.main(command.split()) == 1
    named = f"memoire: this needs {module}, which is not installed: pip install 'memoire-rl[{extra}]'\n"
    assert named in capsys.readouterr().err


def test_a_server_without_gymnasium_is_told_what_to_write_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert main.main(["schema", "CartPole-v1"]) == 0
    assert roles.schema_of(capsys.readouterr().out, None) == roles.schema_of(None, "CartPole-v1")
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert main.main(["server", "--env", "CartPole-v1"]) == 1
    assert "`memoire schema CartPole-v1` on a machine" in capsys.readouterr().err


def test_parameters_are_read_as_json_and_vectors_may_be_single_numbers() -> None:
    parameters = roles.read_parameters(["multi_step=3", "discount=0.9", "reward_coeff=[1,2]", "start=repeat"])
    values = parameters.multi_step, parameters.discount, parameters.reward_coeff, parameters.start
    assert values == (3, (0.9,), (1.0, 2.0), "repeat")
    with pytest.raises(ParameterError, match="no_such"):
        roles.read_parameters(["no_such=1"])


running = functools.partial(netkit.program, "-m", "memoire", stderr=subprocess.DEVNULL)


def address(process: "subprocess.Popen[str]") -> str:
    return process.stdout.readline().split()[-1]


def is_ready(page: str) -> bool:
    """Return True if /readyz beside a /status page says so."""
    host, _, _ = page.removeprefix("http://").partition("/")
    with contextlib.closing(http.client.HTTPConnection(host, timeout=100.0)) as connection:
        connection.request("GET", "/readyz")
        return bool(json.loads(connection.getresponse().read())["ready"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_prints_an_address_that_works_until_it_is_told_to_end(number: signal.Signals) -> None:
    arguments = ["--schema", SCHEMA.to_json(), "--port", "0", "--servers", "2", "--set", "cache_size=4", "--run", "r-7"]
    with running("up", *arguments) as process:
        endpoint = address(process)
        pages = [address(process) for _ in ("server-0", "server-1", "proxy-0")]
        netkit.until(lambda: all(is_ready(page) for page in pages))
        with memoire.connect(endpoint, seed=0) as client:
            assert (client.schema, client.run, client.parameters.cache_size) == (SCHEMA, "r-7", 4)
            client.update(100.0)
        assert doctor.examine(endpoint, say=lambda line: None) == doctor.WELL
        process.send_signal(number)
        assert process.wait(100.0) == 0


def test_server_proxy_and_relay_run_alone(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        what = ("--schema", SCHEMA.to_json(), "--storage", "episodes", "--capacity", "500")
        server = stack.enter_context(running("server", "--endpoint", "tcp://127.0.0.1:0", *what))
        proxy = stack.enter_context(running("proxy", "--endpoint", "tcp://127.0.0.1:0", address(server)))
        relay = stack.enter_context(running("relay", "--endpoint", f"ipc://{tmp_path}/relay", address(proxy)))
        endpoint = address(relay)
        for page in (address(server), address(relay)):
            netkit.until(lambda page=page: is_ready(page))  # type: ignore[misc]
        assert endpoint == f"ipc://{tmp_path}/relay"
        with memoire.connect(endpoint) as client:
            client.update(100.0)
            assert (client.storage, client.memory.capacity) == ("episodes", 1000)
        assert doctor.examine(endpoint, say=lambda line: None) == doctor.WELL
        for process in (relay, proxy, server):
            process.terminate()
            assert process.wait(100.0) == 0


def test_a_server_of_rollouts_tells_actors_what_they_are_asked_for() -> None:
    what = ("--schema", SCHEMA.to_json(), "--storage", "rollouts", "--capacity", "8", "--on-full", "drop_oldest")
    what = (*what, "--inference", "tcp://node.example.com:5570", "--set", "rollout_length=3")
    with running("server", "--endpoint", "tcp://127.0.0.1:0", *what) as server:
        with memoire.connect(address(server)) as client, client.writer() as writer:
            for number in range(12):
                obs = np.full(4, number, np.float32)
                writer.step(obs, None, 1.0, False, False, obs + 1)
            client.update(100.0)
            assert (client.storage, client.parameters.rollout_length) == ("rollouts", 3)
            assert client.inference == ("tcp://node.example.com:5570",)
            stats = client.stats()
            assert (stats.pushed_caches, stats.passed_steps, stats.held_back) == (4, 0, ""), (
                "no wait: on_full=drop_oldest"
            )
        server.terminate()
        assert server.wait(100.0) == 0


def test_up_says_which_process_could_not_start_and_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        output = run("up", "--schema", SCHEMA.to_json(), "--port", str(port), status=1)
    assert "memoire: proxy-0 ended with status 1" in output
    assert f"cannot bind 'tcp://127.0.0.1:{str(port)[:3]}" in output  # the server's port, or a taken neighbour


def examine(endpoint: str, timeout: float = 1.0) -> tuple[int, str]:
    lines: list[str] = []
    status = doctor.examine(endpoint, timeout=timeout, say=lines.append)
    return status, "\n".join(lines)


def test_a_healthy_server_gets_a_clean_bill() -> None:
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA, name="heart", run="r-1") as server:
        status, output = examine(server.endpoint, 5.0)
        assert status == 0, output
    for words in ("libzmq", "pyzmq", "msgspec", "numpy", "open files", "home 'heart'", "run 'r-1'", "obs float32[4]",
                  "UPDATE is answered", "its clock is", "memoire 0.1.0 and keeps acknowledged data in memory only", "PULL socket", "XPUB socket", "all is well"):  # fmt: skip
        assert words in output
    assert server.total_steps == 0 and "warn" not in output


def test_a_state_folder_and_another_clock_are_said(tmp_path: Path) -> None:
    process = memoire.Process(clock=lambda: wall_clock() + 90.0)
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA, state=tmp_path / "state", process=process) as server:
        status, output = examine(server.endpoint, 5.0)
    assert status == 0, output
    assert f"ok   its home runs memoire {memoire.__version__} and keeps acknowledged data on disk" in output
    assert "its clock is 90.0 s ahead of the local clock" in output


@pytest.mark.parametrize(
    "endpoint", ["proxy:5560", "ipc://", "tcp://:5560", "tcp://host:", "tcp://host:words", "inproc://here"]
)
def test_what_is_no_address_is_said_so(endpoint: str) -> None:
    assert examine(endpoint)[0] == doctor.NO_ADDRESS


def test_names_that_do_not_resolve_and_addresses_where_nothing_listens_are_told_apart(tmp_path: Path) -> None:
    for endpoint, expected, words in (
        ("tcp://no-such-host.invalid:5560", doctor.NO_NAME, "'no-such-host.invalid' does not resolve"),
        (ports.address(), doctor.NOTHING_LISTENS, "no process listens"),
        (f"ipc://{tmp_path}/nothing", doctor.NOTHING_LISTENS, "The socket file does not exist"),
    ):
        status, output = examine(endpoint)
        assert status == expected and words in output
    assert doctor.NO_NAME == 3, "scripts read the number"


@pytest.mark.parametrize(
    ("greeting", "hangs_up", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.9\r\n", True, "does not speak ZeroMQ: it sent b'SSH-2.0-Op"),
        (b"", True, "it hung up at once|the connection broke off"),
        (b"", False, "sent nothing for 0.3 s"),
        (b"\xff", False, "does not speak ZeroMQ"),
    ],
)
def test_something_else_listens(greeting: bytes, hangs_up: bool, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as held:

        def serve() -> None:
            while True:
                connection = held.enter_context(listener.accept()[0])
                connection.sendall(greeting)
                if hangs_up:
                    connection.shutdown(socket.SHUT_RDWR)

        thread, _ = netkit.in_thread(serve)
        status, output = examine(f"tcp://127.0.0.1:{listener.getsockname()[1]}", 0.3)
        listener.shutdown(socket.SHUT_RDWR)  # the shutdown ends the thread
        thread.join(100.0)
    assert status == doctor.NOT_MEMOIRE
    assert any(word in output for word in words.split("|")), output


Answer = Callable[[Message], list[Any] | None]


@contextlib.contextmanager
def router(answer: Answer) -> Iterator[str]:
    """Run a ZeroMQ ROUTER that answers requests by a function; yield its address."""
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.linger = 0
    port = server.bind_to_random_port("tcp://127.0.0.1")
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            if server.poll(50):
                identity, empty, *frames = server.recv_multipart()
                frames = answer(parse(frames))
                if frames is not None:
                    server.send_multipart([identity, empty, *frames])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        ending.set()
        thread.join(100.0)
        server.close()
        context.term()


SETTINGS = memoire.Parameters().to_wire()


def welcome(schema: str) -> Callable[[Message], list[Any]]:
    body = messages.Welcome(schema=schema, parameters=SETTINGS, run_name="r", home_name="h")
    return lambda asked: reply(asked.header, body)


def from_the_future(asked: Message) -> list[Any]:
    """Return an answer in version 9 of the protocol."""
    frame = bytearray(reply(asked.header, messages.Welcome(schema=SCHEMA.to_json()))[0])
    struct.pack_into("<H", frame, 4, 9)
    return [bytes(frame)]


OTHER = messages.Refusal(code="version", text="speak 2", versions=[2, 3])
BUSY = messages.Refusal(code="busy", text="later")


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (lambda asked: None, doctor.NO_ANSWER, "no answer to HELLO within 0.5 s"),
        (lambda asked: [b"pong"], doctor.NOT_MEMOIRE, "the answer is not a memoire message"),
        (from_the_future, doctor.OTHER_VERSION, "with another protocol version: version 9"),
        (lambda asked: reply(asked.header, OTHER), doctor.OTHER_VERSION, "it speaks [2, 3]"),
        (lambda asked: reply(asked.header, BUSY), doctor.REFUSED, "refuses (busy): later"),
        (welcome(""), doctor.NO_SCHEMA, "its schema cannot be used"),
        (welcome("[]"), doctor.NO_SCHEMA, "its schema cannot be used"),
        (
            lambda asked: reply(asked.header, messages.Taken()),
            doctor.NOT_MEMOIRE,
            "the answer to HELLO is TAKEN, not WELCOME",
        ),
    ],
)
def test_what_answers_is_not_a_memoire_that_can_be_used(answer: Answer, status: int, words: str) -> None:
    with router(answer) as endpoint:
        actual, output = examine(endpoint, 0.5)
    assert (actual, words in output) == (status, True), output


def test_a_blocked_port_for_caches_is_found() -> None:
    """A network policy that opens only the first port blocks caches."""
    unused = ports.address()

    def answer(asked: Message) -> list[Any]:
        if isinstance(asked.body, messages.Update):
            return reply(asked.header, messages.Updated())
        ports = messages.NodeEndpoints(push=unused, publish=unused)
        body = messages.Welcome(schema=SCHEMA.to_json(), parameters=SETTINGS, endpoints=ports)
        return reply(asked.header, body)

    with router(answer) as endpoint:
        status, output = examine(endpoint, 2.0)
    assert status == doctor.NOTHING_LISTENS
    assert f"caches: {unused}" in output


def test_the_doctor_s_exit_status_is_the_command_s() -> None:
    assert "FAIL cannot connect" in run("doctor", ports.address(), status=doctor.NOTHING_LISTENS)


def test_the_doctor_runs_in_a_thin_image_and_with_the_usual_1024_open_files() -> None:
    """rich, gymnasium and lz4 cannot be imported; other packages that an actor's image lacks are not tried."""
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))\n"
        "for name in ('rich', 'gymnasium', 'lz4'): sys.modules[name] = None\n"
        "from memoire.cli.main import main\n"
        "sys.exit(main(['doctor', sys.argv[1]]))\n"
    )
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA) as server:
        command = [sys.executable, "-c", script, server.endpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100.0, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout and "too few" not in done.stdout


def test_the_installed_command_is_this_one() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["memoire"] == f"{main.__name__}:{main.main.__name__}"
