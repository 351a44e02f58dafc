"""Bounded tables: a new peer evicts no active peer, or the code explains why the eviction harms no peer."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from memoire.accounting.ledger import MAX_GUESTS, SILENCE_TIMEOUT, Ledger
from memoire.errors import ProtocolError
from memoire.security import roles
from memoire.server import dispatch as once
from memoire.tables.registry import Reply
from memoire.wire import messages, receivers, types
from memoire.wire.frames import MessageHeader
from poolkit import Clock
from structure_imports import tree_of

ROOT = Path(__file__).resolve().parents[2] / "memoire"
PACKAGES = (
    "server", "inference", "net", "dashboard", "tq", "tables", "prompts", "keyed", "reader", "client", "proxy",
    "wire", "security", "accounting", "models", "nodes",
)  # fmt: skip
OF_OBSERVERS = ("rl/agent.py", "rl/jobs.py", "rl/observer.py", "rl/starts.py")
LEAVES = {
    "popitem", "popleft", "pop", "clear", "remove_guest", "abort", "drop", "drop_oldest", "_drop_oldest", "expire",
}  # fmt: skip
"""Calls that remove an element from a table."""
HINT = re.compile(rf"\.({'|'.join(LEAVES)})\(|\bdel |maxlen|\[-[A-Z]")
"""Text that occurs in every file with an eviction."""

REFUSES = {
    "server/dispatch:ReplyCache._new_row",
    "wire/byte_budget:PeerTable.put",
}
"""Places that refuse a new peer while all known peers are active."""
HARMLESS = {
    "accounting/ledger:Ledger.__init__": "Episodes are numbered, so that a gap shows missed ones.",
    "accounting/runs:Logbook._extend": "Older lines are in the log files, if the server writes any.",
    "accounting/runs:UnsavedChanges.wait": "the oldest are dropped and counted: their clients retry.",
    "client/counts:RunCounts.__init__": "beyond, the oldest one's return is not reported",
    "client/counts:AccountWindows.enter_account": "as many servers as a WELCOME can name",
    "dashboard/collect/actors:ActorList.remember": "WINDOW",
    "dashboard/collect/actors:NewestModels.update_expected_versions": "OUTDATED_AFTER",
    "dashboard/collect/cluster:Cluster.__init__": "Number of newest episodes that are kept for the pages.",
    "dashboard/collect/actors:RunLedgers.ledger_of": "other ledgers are read from the history",
    "dashboard/collect/counters:RateWindow.add": "self._seconds",
    "dashboard/collect/actors:RecentReturns.add": "Newest episodes of an actor over which its recent mean return is taken.",
    "dashboard/collect/overview:_start_row": "Newest ancestors of the best state that are shown.",
    "dashboard/web/pages:ListenerHub.__init__": "each is complete, so older ones are not needed",
    "dashboard/collect/opened:events_of": "yield bytes(buffer)",
    "dashboard/web/access:Logins._prove": "An address that sent the token before does not",
    "inference/batching:Batching.receive_answer": "an older request that is resent is computed again",
    "rl/starts:StartStates.stats": "the newest ancestors of the best state",
    "rl/jobs:JobService._keep": "a client asks for one job at a time",
    "inference/policy:PolicyThread._exchange_for": "all are dropped beyond",
    "models/fetching:TopicFetcher._advance": "only the newest counts",
    "models/fetching:TopicFetcher._enqueue": "beyond, the oldest are skipped",
    "models/fetching:TopicFetcher.is_publisher_restart": "as many as a WELCOME can name",
    "models/topics:Subscription.put": "beyond, the oldest are skipped",
    "net/addresses:NameResolver._find": "other names are looked up again",
    "net/poller:SendQueue.put": "beyond the bounds the oldest are dropped",
    "net/poller:SendQueues._count": "drops the oldest messages if the budget is too small",
    "net/poller:SendQueues._keep": "beyond the bounds the oldest are dropped",
    "nodes/launcher:Child.__init__": "Lines of each child's output that are kept.",
    "nodes/http:NodePages._serve": "self._stop.wait()",
    "nodes/http:NodePages.add_connection": "one more aborts the oldest, whose peer sees the abort",
    "tables/caches/queues:CacheRoom.evict_to_limits": "self._counts.overwritten += 1",
    "prompts/steps:PromptSteps.rewind": "as any new session may",
    "prompts/servers:TableCalls._learn": "each server is asked",
    "proxy/router:Backend._keep_epoch": "as many as a WELCOME can name",
    "proxy/io:BackendLink._send_request": "beyond, it is told again",
    "proxy/requests:Requests.__init__": "the oldest is dropped and its client retries",
    "proxy/router:Router._forget": "a client of an older one must wait",
    "security/roles:ConnectionClients._admits": "takes a token again, or is refused",
    "security/roles:TokenBuckets.take": "that harms no peer",
    "security/access:WrongTokens.count_wrong": "it may guess more",
    "server/handlers/accounts:AccountsHandler._read": "each account once, since pages follow the keys",
    "server/handlers/control:ModelsHandler._announce_when_saved": "skipped, as by a slow client",
    "server/state:Learners.record_hello": "its replies are not compressed",
    "server/dispatch:ReplyCache.keep": "refused if newer replies have replaced the reply to number 3",
    "server/io_snapshots:SnapshotOrders.receive": "its snapshot is written again",
    "server/stats:Queries._run_named": "Maximum names in the error for an unknown run",
    "server/stats:recent": "Maximum episodes that `recent` summarizes.",
    "server/state:ClientNames.record": '"" if it is unknown or forgotten',
}
"""Places that evict the oldest element, each with a text of its file that explains why this breaks no promise."""


def is_bound(test: ast.expr) -> bool:
    """Return True if a length, or a number of bytes, is compared with a bound."""
    compared = [each for each in ast.walk(test) if isinstance(each, ast.Compare)]
    return any(
        isinstance(each.ops[0], ast.Gt | ast.GtE) and re.search(r"len\(|bytes", ast.unparse(each)) for each in compared
    )


def takes_out(body: list[ast.stmt]) -> bool:
    nodes = [node for each in body for node in ast.walk(each)]
    calls = {node.func.attr for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}
    return bool(calls & LEAVES) or any(isinstance(node, ast.Delete) for node in nodes)


def evicts(node: ast.AST) -> bool:
    """Return True if this node evicts an element from a full table."""
    if isinstance(node, ast.Call):
        name, keywords = ast.unparse(node.func).rpartition(".")[2], {each.arg for each in node.keywords}
        return (name, *keywords) in (("popitem", "last"), ("deque", "maxlen"))
    if isinstance(node, ast.While | ast.If):
        return is_bound(node.test) and takes_out(node.body)
    if isinstance(node, ast.Slice):
        return node.upper is None and isinstance(node.lower, ast.UnaryOp) and ast.unparse(node.lower)[1:2].isupper()
    return False


def places(node: ast.AST, name: str) -> Iterator[str]:
    """Yield the functions that evict an element from a full table."""
    for child in ast.iter_child_nodes(node):
        if evicts(child):
            yield name
        is_scope = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from places(child, f"{name}.{child.name}" if is_scope else name)


def test_each_eviction_from_a_full_table_is_listed() -> None:
    evicting, texts = set(), {}
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    for path in (*paths, *(ROOT / name for name in OF_OBSERVERS)):
        stem = path.relative_to(ROOT).with_suffix("").as_posix()
        text = path.read_text()
        texts[stem] = " ".join(text.split())
        if HINT.search(text):
            evicting |= {place.replace(":.", ":") for place in places(tree_of(path), f"{stem}:")}
    assert evicting == REFUSES | HARMLESS.keys()
    assert [place for place, why in HARMLESS.items() if why not in texts[place.partition(":")[0]]] == []


Use = Callable[[int], object]
"""Function that registers the peer of this number, or marks it as active again."""


def id_of(number: int) -> bytes:
    return (number + 1).to_bytes(16, "little")


def owners_of_one_key(clock: Clock) -> tuple[Use, int, float]:
    owners = roles.IdOwners()
    return (
        lambda peer: owners.check(id_of(peer), "actor/a", clock.now),
        roles.MAX_OWNERS // 2,
        roles.OWNER_TIMEOUT,
    )


def owners_of_all_keys(clock: Clock) -> tuple[Use, int, float]:
    owners = roles.IdOwners()
    check = lambda peer: owners.check(id_of(peer), f"actor/{peer % 3}", clock.now)  # noqa: E731
    return check, roles.MAX_OWNERS, roles.OWNER_TIMEOUT


def sizes_of_replies(clock: Clock) -> tuple[Use, int, float]:
    table, small = receivers.Receivers(clock), receivers.ReplyLimits(tail_bytes=2000)

    def use(peer: int) -> None:
        if table.limits_of(id_of(peer)) != small:
            table.register(id_of(peer), small)

    return use, receivers.MAX_RECEIVERS, receivers.IDLE_TIMEOUT


def guests(clock: Clock) -> tuple[Use, int, float]:
    ledger = Ledger()
    return lambda peer: ledger.register_guest(id_of(peer), clock.now), MAX_GUESTS, SILENCE_TIMEOUT


def replies(clock: Clock) -> tuple[Use, int, float]:
    cache = once.ReplyCache()

    def use(peer: int) -> None:
        header = MessageHeader(types.TAKE, 0, id_of(peer), 0, 0, 1, 0, 0, 0)
        if cache.find(header, clock.now) is None:
            cache.keep(header, Reply(messages.Taken()))

    return use, once.MAX_ROWS, once.IDLE_TIMEOUT


def logins(clock: Clock) -> tuple[Use, int, float]:
    logins = pytest.importorskip("memoire.dashboard.web.access", reason="starlette is not installed")
    headers = pytest.importorskip("starlette.datastructures").Headers
    access = logins.Logins(SimpleNamespace(holds="token".__eq__), clock)
    browsers: dict[int, str] = {}

    def use(peer: int) -> None:
        if peer not in browsers:
            browsers[peer] = access.log_in("token", logins.RequestOrigin("10.0.0.1", "10.0.0.1"))
        assert access.has_login(headers({"cookie": f"{logins.COOKIE}={browsers[peer]}"}))

    return use, logins.MAX_LOGINS, logins.LOGIN_IDLE_TIMEOUT


TABLES = (owners_of_one_key, owners_of_all_keys, sizes_of_replies, guests, replies, logins)


@pytest.mark.parametrize("table", TABLES, ids=lambda function: function.__name__)
def test_a_new_peer_is_refused_while_a_table_is_full_of_active_peers(
    table: Callable[[Clock], tuple[Use, int, float]],
) -> None:
    clock = Clock(1000.0)
    use, most, idle_timeout = table(clock)
    for peer in range(most):
        use(peer)
    clock.now += 0.9 * idle_timeout
    for _ in range(2):
        with pytest.raises(ProtocolError, match=r"\d s (leaves|expires)") as refused:
            use(most)
        assert refused.value.code == "busy"
    for peer in (0, 1, most - 1):
        use(peer)
    clock.now += 0.2 * idle_timeout
    use(most)
    for peer in (0, 1, most - 1):
        use(peer)
