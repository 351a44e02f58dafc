"""`memoire top` and `memoire logs` beside real nodes."""

import contextlib
import dataclasses
import re
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from history.ports import block
from memoire.accounting.account import Totals
from memoire.cli import main
from memoire.dashboard.collect.answers import (
    ActorRow,
    Actors,
    Forecast,
    Latency,
    Learning,
    NodeRow,
    Overview,
    Rates,
    TableRow,
    Verdict,
    terms,
)
from memoire.dashboard.terminal import log_tail, top
from memoire.errors import EndpointError, ParameterError
from memoire.nodes.http import NodePages
from memoire.tables.inspection import SampleFreshness
from netkit import until

TOKEN = "a-token-that-nobody-knows"
HOSTILE = "\x1b[2Jgone\r\nagain [bold]x[/bold] \u2028"
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00,[0-9a-f]{8},[^\n]*")


def lines_of(cluster, *arguments, capsys):
    """Run `memoire logs`; return its exit status, lines and errors."""
    status = main.main(["logs", *cluster.urls, *arguments])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def test_lines_are_searched(cluster, capsys):
    client = cluster.clients_there[1]
    _, everything, _ = lines_of(cluster, capsys=capsys)
    moment, label, _ = everything[4].split(",", 2)

    def search(*arguments):
        return lines_of(cluster, *arguments, capsys=capsys)[1]

    assert search("--text", "LINE 3") == everything[6:8]
    assert search("--client", client.stats().client) == everything[1:10:2]
    assert search("--label", label) == [line for line in everything if f",{label}," in line]
    assert search("--since", moment) == everything[4:]
    assert search("--until", moment) == everything[:4]
    assert search("--since", "1h") == everything and search("--until", "1h") == []
    assert search("--last", "3") == everything[-3:]
    assert search("--run", "r-1") == everything


def test_pages_of_any_size_leave_out_no_line_and_repeat_none(cluster, capsys):
    _, everything, _ = lines_of(cluster, capsys=capsys)

    def paged(size, last=None):
        lines = []
        assert log_tail.tail(cluster.urls, {}, last=last, page_lines=size, say=lines.append) == 0
        return lines

    for size in (1, 2, 3):
        assert paged(size) == everything
        assert paged(size, 7) == everything[-7:]


def listener(last):
    """Return a list of texts, and a function that adds lines to it until the last text, and then raises
    KeyboardInterrupt.
    """
    heard = []

    def say(line):
        heard.append(line.split(",", 2)[2])
        if heard[-1] == last:
            raise KeyboardInterrupt

    return heard, say


def test_followed_lines_come_once_each_and_ctrl_c_ends_it_quietly(cluster):
    client = cluster.clients_there[0]
    heard, say = listener("the last of them")

    def speak():
        until(lambda: len(heard) >= 2)
        for word in ("a new line", "another", "the last of them"):
            client.log(word)
            client.update(100.0)

    speaker = threading.Thread(target=speak)
    speaker.start()
    with pytest.raises(KeyboardInterrupt):
        # The first lines are on several pages.
        log_tail.tail(cluster.urls, {}, follow=True, last=2, every=0.02, page_lines=1, say=say)
    speaker.join()
    assert heard[2:] == ["a new line", "another", "the last of them"]
    assert len(heard) == 5


def test_a_server_that_forgot_its_lines_is_followed_from_its_first_line_again(cluster):
    heard, say = listener("afterwards")
    with contextlib.ExitStack() as stack:

        def life(number, *lines):
            """Start a server of the same name with these lines; return it."""
            server = cluster.server(name="fleeting", run="r-1")
            client = cluster.client(server, seed=number)
            for line in lines:
                client.log(line)
            client.update(100.0)
            return server

        pages = NodePages("127.0.0.1:0", life(1, *(f"before {number}" for number in range(5))))
        again = life(2, "afterwards")

        def restart():
            until(lambda: len(heard) == 5)
            pages.close()
            stack.enter_context(NodePages(pages.address, again))

        thread = threading.Thread(target=restart)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            log_tail.tail([pages.address], {}, follow=True, every=0.02, say=say, complain=lambda text: None)
        thread.join()
        assert heard == [*(f"before {number}" for number in range(5)), "afterwards"]


def test_a_node_that_does_not_answer_is_said_and_the_others_lines_come(cluster, capsys):
    status = main.main(["logs", *cluster.urls, "http://127.0.0.1:1", "--last", "1"])
    out, err = capsys.readouterr()
    assert status == 3 and len(out.splitlines()) == 1
    assert err == "memoire: http://127.0.0.1:1 does not answer: Connection refused: its lines are missing\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["logs", "127.0.0.1:1"], "127.0.0.1:1 does not answer: Connection refused"),
        (["top", "127.0.0.1:1", "--once"], "127.0.0.1:1 does not answer: Connection refused"),
        (["top", "ftp://127.0.0.1:1"], "http://HOST:PORT"),
        (["logs", "127.0.0.1:1", "--client", "xyz"], "in hex"),
        (["logs", "127.0.0.1:1", "--label", "123456789"], "8 digits in hex"),
        (["logs", "127.0.0.1:1", "--since", "yesterday"], "10m"),
        (["logs", "127.0.0.1:1", "--last", "0"], "above 0"),
        (["logs", "127.0.0.1:1", "--follow", "--until", "1h"], "--until cannot be combined with --follow"),
        (["logs", "127.0.0.1:1", "--token-file", "/no/such/file"], "No such file"),
    ],
)
def test_what_cannot_be_shown_is_explained_in_a_line(arguments, words, capsys):
    assert main.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("memoire: ") and words in err and err.count("\n") == 1


def test_a_run_that_no_server_knows_and_a_proxy_alone_are_explained(cluster):
    with pytest.raises(ParameterError, match="r-404"):
        log_tail.tail(cluster.urls, {"run": "r-404"})
    with pytest.raises(EndpointError, match="is not a server"):
        log_tail.tail(cluster.urls[2:], {})


def test_tokens_are_taken_from_a_file(cluster, tmp_path, capsys):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    with NodePages("127.0.0.1:0", cluster.servers_there[0], token=TOKEN) as pages:
        assert main.main(["logs", pages.url]) == 1
        assert "Authorization: Bearer TOKEN" in capsys.readouterr().err
        assert main.main(["logs", pages.url, "--token-file", str(path), "--last", "1"]) == 0
        assert LINE.fullmatch(capsys.readouterr().out.strip())


@pytest.mark.slow
def test_names_are_looked_up_before_the_first_look(cluster, capsys):
    names = [f"dns:localhost:{url.rpartition(':')[2]}" for url in cluster.urls]
    assert top.top(names, once=True) in (0, top.INCOMPLETE)  # if localhost has an IPv6 address, too
    assert "server-1" in capsys.readouterr().out


def test_a_node_that_is_away_is_shown_and_said_by_the_exit_status(cluster, capsys, times):
    times(top_rates=0.05)
    free = f"http://127.0.0.1:{block(1)}"
    assert main.main(["top", *cluster.urls, free, "--once"]) == 3
    assert f"bad: {free} does not answer." in capsys.readouterr().out


def test_it_looks_again_and_again_until_ctrl_c_ends_it_quietly(cluster, times):
    times(top_rates=0.05)
    blocks = []

    def say(line):
        blocks.append(line)
        if sum(each.startswith("run ") for each in blocks) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        top.top(cluster.urls, every=0.05, say=say)


def test_the_screen_is_drawn_again_after_each_pause(monkeypatch):
    live, watch, paused = mock.MagicMock(), mock.MagicMock(), []
    watch.poll.side_effect = [overview(), overview(), KeyboardInterrupt]
    monkeypatch.setitem(sys.modules, "rich.live", live)
    monkeypatch.setitem(sys.modules, "rich.text", mock.MagicMock())
    monkeypatch.setattr("memoire.dashboard.terminal.top.time", mock.Mock(sleep=paused.append))
    with pytest.raises(KeyboardInterrupt):
        top._refresh(watch, 2.5, 5)
    assert live.Live.return_value.__enter__.return_value.update.call_count == 2 and paused == [2.5, 2.5]


def overview(**changes):
    fields = {
        "number": 1, "time": 1000.0, "run": "r", "runs": ["r"], "finished": False, "durable": True, "totals": Totals(),
        "missing": [], "rates": Rates(), "actors": Actors(active=2, silent=7), "tables": [], "learning": Learning(),
        "freshness": SampleFreshness(), "latency": Latency(), "forecast": Forecast(), "verdicts": [], "nodes": [], "learners": [],
    }  # fmt: skip
    return Overview(**fields | changes)


def actor(number, state, speed=0.0, host="host", seen=990.0):
    return ActorRow(
        f"{number:032x}", f"{number:08x}", host, "default", "server-0", state, 0.0, seen, 1, 2, speed, None,
        0, 0, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip


def test_the_busiest_are_named_first_and_those_that_fell_silent_by_name():
    rows = [actor(n, "active", speed=float(n)) for n in range(3)] + [actor(16 + n, "silent") for n in range(7)]
    shown = [line.text for line in top.lines(overview(), rows, most=2)]
    busy = [line for line in shown if line.startswith("0000000")]
    assert [line.split()[6] for line in busy] == ["2", "1"]
    silent = [line for line in shown if line.startswith("silent: ")]
    assert len(silent) == 2 and silent[0].endswith("last seen 10 s ago")
    assert "and 5 more are silent" in shown


@pytest.mark.parametrize(
    ("keys", "open_", "words"),
    [(None, (), "-"), (False, (), "this machine"), (True, (), "keys"), (True, ("http://0.0.0.0:1",), "everybody")],
)
def test_what_a_node_asks_those_who_come_for_is_shown(keys, open_, words):
    node = NodeRow("n", "http://n", "proxy", "up", 0.0, [], "", 1.0, 1, 1, 1, 0, 0.0, keys, open_)
    shown = [line.text for line in top.lines(overview(nodes=[node], open=[f"n {each}" for each in open_]), [])]
    assert words in next(line for line in shown if line.startswith("n "))
    assert ("open to everybody: n http://0.0.0.0:1" in shown) is bool(open_)


def test_a_node_that_is_away_shows_no_figure_of_before_and_tables_say_what_is_missing():
    up = NodeRow("server-0", "http://s0", "server", "up", 0.0, [], "", 5.0, 1 << 20, 7, 99, 0, 0.002, cpu=0.5)
    away = dataclasses.replace(up, name="server-1", state="down", since=940.0, reasons=["refused"])
    shown = [line.text for line in top.lines(overview(nodes=[up, away]), [])]
    assert next(line for line in shown if line.startswith("server-0")).split()[3:8] == ["5.0", "s", "50", "%", "1.05"]
    (row,) = [line for line in shown if line.startswith("server-1")]
    styles = {line.text.partition(" ")[0]: line.style for line in top.lines(overview(nodes=[up, away]), [])}
    assert (styles["server-0"], styles["server-1"]) == ("", "red")
    assert "away" in row and row.endswith("since 60 s ago: refused") and "1.05" not in row
    assert "incomplete: server-1 does not answer: the figures of tables leave out what it holds" in shown


@pytest.mark.parametrize(("storage", "held"), [("caches", "1,234 caches"), ("rollouts", "1,234 fragments")])
def test_tables_are_shown_with_the_kind_of_things_that_they_hold(storage, held):
    fields = dict.fromkeys(TableRow.__dataclass_fields__, 0) | {"name": "t", "storage": storage, "held_caches": 1234}
    row = TableRow(**fields | {"full": None, "rate": mock.Mock(draws_wait="few", inserts_wait="")})
    (shown,) = [line.text for line in top.lines(overview(tables=[row]), []) if line.text.startswith("t ")]
    assert held in shown and "no limit" in shown and shown.endswith("few")


def test_columns_are_called_as_in_the_pages():
    static = Path(top.__file__).parent.parent / "static"
    called = {figure.title.lower() for _, figure in terms()}
    for path in (static / "pages").glob("*.js"):
        called |= {title.lower() for title in re.findall(r'title: "([^"]+)"', path.read_text("utf-8"))}
    rows = (top.TABLES, top.ACTORS, top.LEARNERS, top.INFERENCE, top.NODES)
    assert {column.title for row in rows for column in row if column.title} <= called


@pytest.mark.parametrize(
    ("call", "value", "text"),
    [
        (top.figure, 0.0, "0"), (top.figure, 0.5, "0.5"), (top.figure, 3.14159, "3.14"),
        (top.figure, 1.2345e-4, "1.2e-4"), (top.figure, 123.4, "123"), (top.figure, 5123.4, "5,123"),
        (top.figure, 12_345.0, "12.3K"), (top.figure, 999_900.0, "1M"), (top.figure, -1_234_567.0, "-1.23M"),
        (top.figure, None, "-"), (top.count, 1_234_567, "1,234,567"), (top.share, 0.934, "93.4 %"),
        (top.share, 1.345, "135 %"), (top.share, 0.0, "0 %"), (top.bytes_of, 999, "999 B"),
        (top.bytes_of, 1234, "1.23 kB"), (top.bytes_of, 45_600_000, "45.6 MB"), (top.bytes_of, 7.89e11, "789 GB"),
        (top.duration, 0.0123, "12.3 ms"), (top.duration, 4.56, "4.6 s"), (top.duration, 45.6, "46 s"),
        (top.duration, 250.0, "4.2 min"), (top.duration, 3000.0, "50 min"), (top.duration, 6000.0, "1.7 h"), (top.duration, 11_160.0, "3.1 h"),
        (top.duration, 200_000.0, "2.3 days"),
    ],
)  # fmt: skip
def test_figures_are_written_as_in_the_pages(call, value, text):
    assert call(value) == text


def test_nothing_hostile_reaches_a_terminal():
    node = NodeRow(
        HOSTILE, "http://x", HOSTILE, "down", 0.0, [HOSTILE], "", None, None, None, None, 0, 0.0, True, (HOSTILE,)
    )
    seen = overview(run=HOSTILE, verdicts=[Verdict("bad", "node_down", HOSTILE)], nodes=[node], open=[HOSTILE])
    rows = [actor(1, "active", host=HOSTILE), actor(2, "silent", host=HOSTILE)]
    text = "".join(line.text for line in top.lines(seen, rows))
    assert text.isprintable() and r"\x1b[2Jgone" in text
