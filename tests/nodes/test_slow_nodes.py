"""Tests of nodes that answer a byte at a time, without end, or with too much: callers give up in time."""

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
"""Seconds after which a call counts as hung."""


class Drip:
    """Server that begins each answer at once and continues without end, a piece now and then."""

    def __init__(self, begin, pieces, seconds):
        self.listener, self.asked, self.ended = socket.create_server(("127.0.0.1", 0)), 0, threading.Event()
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.url = f"http://{self.address}"
        threading.Thread(target=self._accept, args=(begin, pieces, seconds), daemon=True).start()

    def _accept(self, *what):
        with contextlib.suppress(OSError):
            while True:
                connection = self.listener.accept()[0]
                self.asked += 1
                threading.Thread(target=self._answer, args=(connection, *what), daemon=True).start()

    def _answer(self, connection, begin, pieces, seconds):
        with connection, contextlib.suppress(OSError):
            connection.sendall(begin)
            for piece in pieces:
                connection.sendall(piece)
                if self.ended.wait(seconds):
                    return


@contextlib.contextmanager
def drip(begin, pieces, seconds=0.05):
    dripping = Drip(begin, pieces, seconds)
    with dripping.listener, contextlib.ExitStack() as stack:
        stack.callback(dripping.ended.set)
        yield dripping


@pytest.mark.parametrize("answer", [HEAD, BODY, CHUNKS, CONTINUE], ids=["head", "body", "chunks", "continue"])
def test_a_page_that_comes_a_byte_at_a_time_is_given_up(answer):
    text = "does not answer: /status did not arrive completely within 0.3 s"
    with drip(*answer) as node, pytest.raises(nodes.NodeError, match=text):
        nodes.ask(node.url, "/status", timeout=0.3)


def test_a_page_that_is_too_long_is_refused():
    with drip(OK + b"\r\n", itertools.repeat(bytes(1 << 20)), seconds=0.0) as node:
        with pytest.raises(nodes.NodeError, match=f"/status answered with more than {nodes.MAX_ANSWER_BYTES} bytes"):
            nodes.ask(node.url, "/status", timeout=ENOUGH)


def test_pages_without_end_are_given_up():
    with drip(PAGE, [b""], seconds=0.0) as node:
        asked = nodes.NodeQuestions(node.url, None, ENOUGH, ENOUGH, lambda: False, max_bytes=400)
        with pytest.raises(nodes.NodeError, match=f"{node.url} answered with more than 400 bytes in all"):
            aggregator._clients(asked)
        assert node.asked == 11
        late = nodes.NodeQuestions(node.url, None, ENOUGH, 0.0, lambda: False)
        with pytest.raises(nodes.NodeError, match="its pages took more than 0 s"):
            aggregator._clients(late)


def test_the_terminal_does_not_hang_on_a_node_that_answers_a_byte_at_a_time(times, capsys):
    times(node_answer=0.3, page_asked=0.3)
    times(top_answer=ENOUGH)  # time for each node to answer, or to be given up
    with drip(*BODY) as node:
        assert main.main(["logs", node.address, "--timeout", "0.3"]) == 1
        assert "/status?clients=no did not arrive completely within 0.3 s" in capsys.readouterr().err
        assert main.main(["top", node.address, "--once"]) == 1
        assert "does not answer" in capsys.readouterr().err


def test_the_doctor_does_not_hang_on_a_port_that_answers_a_byte_at_a_time():
    lines = []
    with drip(*ZEROMQ, seconds=0.2) as node:
        status = doctor.examine(f"tcp://{node.address}", timeout=0.5, say=lines.append)
        assert status == doctor.NOT_MEMOIRE, lines
