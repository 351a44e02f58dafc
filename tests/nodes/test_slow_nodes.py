"""Nodes that answer a byte at a time, without end, or with too much: whoever asks them gives up in time."""

import contextlib
import itertools
import socket
import threading

import pytest

from memoire.cli import doctor, main

pytestmark = pytest.mark.slow

nodes = pytest.importorskip("memoire.dashboard.collect.nodes")
aggregator = pytest.importorskip("memoire.dashboard.collect.aggregator")
top = pytest.importorskip("memoire.dashboard.terminal.top")

OK = b"HTTP/1.1 200 OK\r\n"
ZEROS = itertools.repeat(b"0")
HEAD, BODY = (b"", ZEROS), (OK + b"Content-Length: 9999999\r\n\r\n", ZEROS)
CHUNKS = OK + b"Transfer-Encoding: chunked\r\n\r\n", itertools.cycle([b"1\r\n", b"0\r\n"])
CONTINUE = b"", itertools.cycle([b"HTTP/1.1 100 Continue\r\n\r\n"])
ZEROMQ = b"\xff" + bytes(8) + b"\x7f", itertools.repeat(b"\0")
PAGE = OK + b'Content-Length: 40\r\n\r\n{"clients": {"rows": [], "next": "00"}} '
ENOUGH = 60.0
"""Seconds after which a call hangs."""


class Drip:
    """A server that begins each answer at once and goes on with it for ever, a piece now and then."""

    def __init__(self, begin, pieces, seconds=0.05):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.asked, self._ended = 0, threading.Event()
        self._begin, self._pieces, self._seconds = begin, pieces, seconds
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self):
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    @property
    def url(self):
        return f"http://{self.address}"

    def close(self):
        self._ended.set()
        self.listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                made = self.listener.accept()[0]
                self.asked += 1
                threading.Thread(target=self._answer, args=(made,), daemon=True).start()

    def _answer(self, made):
        with made, contextlib.suppress(OSError):
            made.sendall(self._begin)
            for piece in self._pieces:
                made.sendall(piece)
                if self._ended.wait(self._seconds):
                    return


@contextlib.contextmanager
def drip(begin, pieces, seconds=0.05):
    with contextlib.closing(Drip(begin, pieces, seconds)) as made:
        yield made


def in_time(call, *arguments, **options):
    """What a call raised or returned; it must do either."""
    told = []

    def run():
        try:
            told.append(call(*arguments, **options))
        except Exception as error:
            told.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ENOUGH)
    assert told, f"{call} hangs"
    return told[0]


@pytest.mark.parametrize("answer", [HEAD, BODY, CHUNKS, CONTINUE], ids=["head", "body", "chunks", "continue"])
def test_a_page_that_comes_a_byte_at_a_time_is_given_up(answer):
    with drip(*answer) as node:
        error = in_time(nodes.ask, node.url, "/status", timeout=0.3)
        assert isinstance(error, nodes.NodeError)
        assert str(error) == f"{node.url} does not answer: /status did not come as a whole within 0.3 s"


def test_a_page_that_is_too_long_is_refused():
    with drip(OK + b"\r\n", itertools.repeat(bytes(1 << 20)), seconds=0.0) as node:
        error = in_time(nodes.ask, node.url, "/status", timeout=ENOUGH)
        assert str(error) == f"{node.url}/status answered with more than {nodes.MAX_ANSWER_BYTES} bytes"


def test_pages_without_end_are_given_up():
    with drip(PAGE, [b""], seconds=0.0) as node:
        asked = nodes.NodeQuestions(node.url, None, ENOUGH, ENOUGH, lambda: False, max_bytes=400)
        error = in_time(aggregator._clients, asked)
        assert str(error) == f"{node.url} answered with more than 400 bytes in all" and node.asked == 11
        late = nodes.NodeQuestions(node.url, None, ENOUGH, 0.0, lambda: False)
        assert "its pages took more than 0 s" in str(in_time(aggregator._clients, late))


def test_the_terminal_does_not_hang_on_a_node_that_answers_a_byte_at_a_time(times, capsys):
    times(node_answer=0.3, page_asked=0.3)
    times(top_answer=ENOUGH)  # for all nodes to answer, or to be given up
    with drip(*BODY) as node:
        assert in_time(main.main, ["logs", node.address, "--timeout", "0.3"]) == 1
        assert "/status?clients=no did not come as a whole within 0.3 s" in capsys.readouterr().err
        assert in_time(main.main, ["top", node.address, "--once"]) == 1
        assert "does not answer" in capsys.readouterr().err


def test_the_doctor_does_not_hang_on_a_port_that_answers_a_byte_at_a_time():
    said = []
    with drip(*ZEROMQ, seconds=0.2) as node:
        status = in_time(doctor.examine, f"tcp://{node.address}", timeout=0.5, say=said.append)
        assert status == doctor.NOT_MEMOIRE, said
