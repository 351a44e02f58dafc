"""Tests of a server's search for lines: equal with a state folder, without one, by a slow search, and over HTTP."""

import contextlib
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import httpkit
import memoire
from memoire.accounting.runs import escape
from memoire.errors import ParameterError
from memoire.nodes.http import NodePages
from netkit import QUICK, SCHEMA, until

TEXTS = ["begins", "Begins again", "100% of it_all", "Ünder way", "line\nbreak", "a\\b", "ends", "BEGINS"]
LABELS = [1, 0xC0FFEE, 2**32 - 1]


@pytest.fixture(scope="module", params=["state folder", "memory"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("state") if request.param == "state folder" else None
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA, limits=QUICK, run="r-1", state=folder) as running:
        with contextlib.ExitStack() as stack:
            clients = [
                stack.enter_context(memoire.connect(running.endpoint, input_uuid=label, limits=QUICK))
                for label in LABELS
            ]
            for text, client in itertools.product(TEXTS, clients):
                client.log(text)
                client.update(100.0)
        yield running


def lower(text):
    return "".join(chr(ord(c) + 32) if "A" <= c <= "Z" else c for c in text)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=80, deadline=None)
def test_what_is_found_is_what_a_slow_search_finds(server, data):
    lines = server.lines(0, 1000)
    assert len(lines) == len(TEXTS) * len(LABELS)
    times = st.none() | st.sampled_from(lines).map(lambda entry: entry.received)
    text = data.draw(
        st.sampled_from(["", "begin", "BEGINS", "\n", "%", "_", "\\", "\\n", "ü", "Ü", "no such"]) | st.text(max_size=3)
    )
    client = data.draw(st.none() | st.sampled_from(lines).map(lambda entry: entry.client))
    label = data.draw(st.none() | st.sampled_from([*LABELS, 5]))
    since, up_to = data.draw(times), data.draw(times)
    after, before = data.draw(st.integers(0, 30)), data.draw(st.none() | st.integers(0, 30))
    most, newest_first = data.draw(st.integers(1, 30)), data.draw(st.booleans())
    expected = [
        entry.escaped
        for entry in (lines[::-1] if newest_first else lines)
        if lower(escape(text)) in lower(escape(entry.line.text))
        and client in (None, entry.client)
        and label in (None, entry.line.label)
        and (since is None or since <= entry.received)
        and (up_to is None or entry.received < up_to)
        and after < entry.index
        and (before is None or entry.index < before)
    ][:most]
    bounds = {"since": since, "until": up_to, "after": after, "before": before, "most": most}
    assert server.search(text, client=client, label=label, newest_first=newest_first, **bounds) == expected


def test_a_run_or_number_that_cannot_be_is_refused(server):
    for most in (0, 10_001):
        with pytest.raises(ParameterError, match="most must be from 1 to 10000"):
            server.search(most=most)
    with pytest.raises(ParameterError, match="run must be one of 'r-1'"):
        server.search(run="nobody")


def ask(pages, query):
    status, _, body = httpkit.ask(pages, f"/logs{query}")
    return status, json.loads(body)


def test_lines_are_read_over_http_a_page_at_a_time(server):
    with NodePages("127.0.0.1:0", server) as pages:
        status, reply = ask(pages, "?text=begins&label=00c0ffee&most=2")
        assert status == 200
        assert [row["text"] for row in reply["rows"]] == ["begins", "Begins again"]
        assert {row["label"] for row in reply["rows"]} == {"00c0ffee"}
        assert not reply["is_all"]
        after = reply["rows"][-1]["index"]
        status, reply = ask(pages, f"?text=begins&label=c0ffee&after={after}")
        assert [row["text"] for row in reply["rows"]] == ["BEGINS"] and reply["is_all"]
        assert [row["text"] for row in ask(pages, "?newest&most=3&text=line%5Cn")[1]["rows"]] == ["line\\nbreak"] * 3
        (row,) = ask(pages, "?most=1")[1]["rows"]
        same = {name: row[name] for name in ("time", "received")} | {"client": server.lines()[0].client.hex()}
        assert row == same | {"index": 1, "label": "00000001", "name": "", "text": "begins"}
        assert row["time"].endswith("+00:00")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("?client=xyz", "client must be an id in hex, got 'xyz'"),
        ("?label=123456789", "label must be up to 8 digits in hex"),
        ("?since=yesterday", "since must be seconds since 1970"),
        ("?most=0", "most must be a number from 1 to 1000"),
        ("?run=nobody", "run must be one of 'r-1'"),
    ],
)
def test_a_question_that_makes_no_sense_is_answered_with_what_would(server, query, words):
    with NodePages("127.0.0.1:0", server) as pages:
        status, reply = ask(pages, query)
        assert status == 400 and words in reply["error"]


def test_a_proxy_has_no_lines(server):
    with memoire.Proxy("tcp://127.0.0.1:0", [server.endpoint]) as proxy, NodePages("127.0.0.1:0", proxy) as pages:
        assert until(lambda: ask(pages, "")) == (404, {"error": "only a server has log lines: ask a server's pages"})
