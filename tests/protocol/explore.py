"""Breadth-first search over all orders of events of a world; each state is searched once.

    state = clients, servers, messages on their way, faults that may still come, steps of the script that are done

A violation is reported with the shortest list of events that leads to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from memoire.wire import messages
from memoire.wire.frames import reply

from .ends import CONTENTS, HOMES, NEWS, SERVERS, ClientEnd, ClientFacts, Sent, ServerEnd, ServerFacts, here
from .replays import Broken, Event, Replays
from .rules import broken, unsettled

MAX_STATES: Final = 5_000_000


@dataclass(frozen=True)
class World:
    """Events and faults of a world. Clients and servers work and send as the product decides."""

    name: str
    clients: int = 2
    servers: int = 2
    works: int = 1
    """Episodes of each client, each of one step and one log line."""
    pushes: int = 0  # caches that each client pushes
    heartbeats: int = 0  # UPDATEs without news, of all clients together
    leaves: bool = False  # True: a client leaves after its work
    losses: int = 0  # lost requests, caches and answers
    doubles: int = 0
    """Requests that are sent again although no message was lost: a request or its answer is late."""
    kills: int = 0  # kills of servers, which begin again
    is_durable: bool = True
    script: tuple[tuple[str, ...], ...] = ()
    """Steps of an operator, in this order, each at any moment: ("run", server, name), ("finish", server), ("drain",
    server), ("hand over", server, heir), ("remove", server, heir).
    """


class State(NamedTuple):
    """One state of a world: numbers of its clients' and servers' states, and the messages on their way."""

    clients: tuple[int, ...]
    servers: tuple[int, ...]
    """States of the servers; of a server that was taken away, -1 - state."""
    net: tuple[int, ...]
    """Numbers of messages on their way, ascending."""
    left: tuple[int, int, int, int]
    """Losses, doubles, kills and heartbeats that may still come."""
    step: int  # the script's next step


class Way(NamedTuple):
    kind: str
    """"ask" or "cache" to a server, "answer" to a client."""
    client: int
    content: int


class Move(NamedTuple):
    what: str
    client: int = -1
    server: int = -1
    way: int = -1


@dataclass
class SearchResult:
    world: str
    states: int = 0
    moves: int = 0  # transitions between states
    settled: int = 0
    """Final states: every client and server has finished."""
    depth: int = 0  # events from the beginning to the last state
    client_states: int = 0
    server_states: int = 0
    seconds: float = 0.0
    is_whole: bool = True  # the search went through every order
    violation: str = ""
    example: list[str] = field(default_factory=list)  # events that lead to the violation

    def __str__(self) -> str:
        how = "all" if self.is_whole else "the first"
        return (
            f"{self.world}: {how} {self.states:,} states, {self.moves:,} moves, {self.settled:,} settled, "
            f"{self.depth} deep, {self.client_states:,} states of a client, {self.server_states:,} of servers, "
            f"{self.seconds:.1f} s"
        )


class Ways:
    """Messages on their way, by number."""

    def __init__(self) -> None:
        self._numbers: dict[Way, int] = {}
        self.ways: list[Way] = []

    def number(self, kind: str, client: int, content: int) -> int:
        way = Way(kind, client, content)
        if way not in self._numbers:
            self._numbers[way] = len(self.ways)
            self.ways.append(way)
        return self._numbers[way]

    def of_client(self, client: int, sent: tuple[Sent, ...]) -> list[int]:
        return [self.number(_kind(each.content), client, each.content) for each in sent]

    def of_server(self, sent: tuple[Sent, ...]) -> list[int]:
        return [self.number("answer", each.client, each.content) for each in sent if each != NEWS]


def _kind(content: int) -> str:
    return "cache" if isinstance(CONTENTS.messages[content].body, messages.Cache) else "ask"


class Search:
    """Search over all states of one world."""

    def __init__(self, world: World, max_states: int = MAX_STATES) -> None:
        self.world, self.max_states = world, max_states
        self.ways = Ways()
        self.clients = Replays(ClientEnd)
        self.servers = [
            Replays(lambda index=index: ServerEnd(index, world.is_durable))  # type: ignore[misc]
            for index in range(world.servers)
        ]
        self._checked: dict[Any, str] = {}
        self._homes_left: dict[tuple[int, ...], bool] = {}

    def moves(self, state: State) -> Iterator[Move]:
        """Yield the events that may happen next."""
        losses, _, kills, _ = state.left
        for number in dict.fromkeys(state.net):
            way = self.ways.ways[number]
            for server in (-1,) if way.kind == "answer" else self._targets(state, way):
                yield Move("arrives", way.client, server, number)
            if losses:
                yield Move("is lost", way.client, -1, number)
        for client, at in enumerate(state.clients):
            yield from self._moves_of(client, self.clients.facts[at], state)
        for server, facts in self._there(state):
            for what, can in (("collect", facts.can_collect), ("write", facts.can_write), ("said", facts.can_say)):
                if can:
                    yield Move(what, -1, server)
            if kills:
                yield Move("kill", -1, server)
        if state.step < len(self.world.script):
            yield from self._script(state, *self.world.script[state.step])

    def _there(self, state: State) -> list[tuple[int, ServerFacts]]:
        return [(each, self.servers[each].facts[at]) for each, at in enumerate(state.servers) if at >= 0]

    def _moves_of(self, client: int, facts: ClientFacts, state: State) -> Iterator[Move]:
        world, (_, doubles, _, heartbeats) = self.world, state.left
        has_worked, pushed = facts.begun >= world.works, sum(count for _, count in facts.pushed)
        if facts.is_met and not facts.is_leaving:
            if not has_worked:
                yield Move("work", client)
            if pushed < world.pushes and facts.can_push:
                yield Move("push", client)
            if world.leaves and has_worked and pushed >= world.pushes and state.step == len(world.script):
                yield Move("leave", client)
        if facts.is_due:
            yield Move("tell", client)
        elif facts.may_speak and heartbeats:
            yield Move("heartbeat", client)
        for content in facts.open:
            number = self.ways.number("ask", client, content)
            if number not in state.net and (doubles or self._is_lost(state, client, content)):
                yield Move("ask again", client, -1, number)

    def _is_lost(self, state: State, client: int, content: int) -> bool:
        """Return True if this request gets no answer unless the client sends it again."""
        sequence = CONTENTS.messages[content].header.sequence
        for number in state.net:
            way = self.ways.ways[number]
            is_answer = way.kind == "answer" and way.client == client
            if is_answer and CONTENTS.messages[way.content].header.sequence == sequence:
                return False
        return not any((client, sequence) in facts.open for _, facts in self._there(state))

    def _targets(self, state: State, way: Way) -> list[int]:
        """Return the servers that may receive a message: its home, or else any server that a proxy may choose."""
        message, there = CONTENTS.messages[way.content], self._there(state)
        if home := message.header.home:
            server = HOMES.index(home)
            is_known = state.servers[server] >= 0 or not isinstance(message.body, messages.Hello)
            return [server] if is_known else [each for each, _ in there]
        return [each for each, facts in there if not facts.leaving] or [each for each, _ in there]

    def _script(self, state: State, what: str, name: str, *arguments: str) -> Iterator[Move]:
        server = SERVERS.index(name)
        if what == "hand over" and self.has_clients_at(server, state.servers):
            return
        if what == "remove" and not self._has_saved(state, SERVERS.index(arguments[0])):
            return
        yield Move(what, -1, server)

    def has_clients_at(self, server: int, servers: tuple[int, ...]) -> bool:
        """Return True if clients are still at home at a drained server, as `memoire drain` would judge."""
        has_clients = self._homes_left.get(servers)
        if has_clients is None:
            facts = [self.servers[each].facts[at] for each, at in enumerate(servers)]
            others = [each for place, each in enumerate(facts) if place != server]
            has_clients = self._homes_left[servers] = here(facts[server], HOMES[server], others)
        return has_clients

    def _has_saved(self, state: State, server: int) -> bool:
        at = state.servers[server]
        facts: ServerFacts = self.servers[server].facts[at]
        return not self.world.is_durable or (
            facts.can_collect and self.servers[server].step(at, ("collect",)) == (at, ())
        )

    def after(self, state: State, move: Move) -> State | Broken:
        """Return the state after an event."""
        left, net, step = list(state.left), list(state.net), state.step
        match move.what:
            case "arrives":
                net.remove(move.way)
                return self._arrives(state, move, net)
            case "is lost":
                net.remove(move.way)
                left[0] -= 1
            case "ask again":
                left[1] -= not self._is_lost(state, move.client, self.ways.ways[move.way].content)
                net.append(move.way)
            case "work" | "push" | "tell" | "leave" | "heartbeat":
                left[3] -= move.what == "heartbeat"
                what = "tell" if move.what == "heartbeat" else move.what
                return self._client(state._replace(left=_four(left)), move.client, (what,), net)
            case "collect" | "write" | "said" | "kill":
                left[2] -= move.what == "kill"
                return self._server(state._replace(left=_four(left)), move.server, (move.what,), net)
            case _:
                return self._operate(state._replace(step=step + 1), move, net)
        return state._replace(left=_four(left), net=tuple(sorted(net)))

    def _arrives(self, state: State, move: Move, net: list[int]) -> State | Broken:
        way = self.ways.ways[move.way]
        if way.kind == "answer":
            return self._client(state, way.client, ("answer", way.content), net)
        if state.servers[move.server] >= 0:
            after = self._server(state, move.server, (way.kind, way.client, way.content), net)
            return after if way.kind == "ask" or isinstance(after, Broken) else self._hears(after, way.client)
        if way.kind == "ask":  # the proxy has removed the request's home server
            net.append(self.ways.number("answer", way.client, _homeless(way.content)))
        return state._replace(net=tuple(sorted(net)))

    def _client(self, state: State, client: int, event: Event, net: list[int]) -> State | Broken:
        done = self.clients.step(state.clients[client], event)
        if isinstance(done, Broken):
            return done
        at, sent = done
        clients = (*state.clients[:client], at, *state.clients[client + 1 :])
        return state._replace(clients=clients, net=tuple(sorted([*net, *self.ways.of_client(client, sent)])))

    def _server(self, state: State, server: int, event: Event, net: list[int]) -> State | Broken:
        done = self.servers[server].step(state.servers[server], event)
        if isinstance(done, Broken):
            return done
        at, sent = done
        servers = (*state.servers[:server], at, *state.servers[server + 1 :])
        after = state._replace(servers=servers, net=tuple(sorted([*net, *self.ways.of_server(sent)])))
        return self._news(after, server) if NEWS in sent else after

    def _hears(self, state: State, client: int) -> State | Broken:
        """Send the client's repeated question again, now after the arrival of its cache."""
        return self._client(state, client, ("news",), list(state.net))

    def _news(self, state: State, server: int) -> State | Broken:
        """Tell the clients at home at a server that it has news."""
        after: State | Broken = state
        for client, at in enumerate(state.clients):
            if self.clients.facts[at].home == HOMES[server] and isinstance(after, State):
                after = self._client(after, client, ("news",), list(after.net))
        return after

    def _operate(self, state: State, move: Move, net: list[int]) -> State | Broken:
        _, _, *arguments = self.world.script[state.step - 1]
        if move.what == "remove":
            servers = (*state.servers[: move.server], ~state.servers[move.server], *state.servers[move.server + 1 :])
            return self._news(state._replace(servers=servers), move.server)  # the next heartbeat detects the change
        if move.what != "hand over":
            return self._server(state, move.server, (move.what, *arguments), net)
        heir, done = SERVERS.index(arguments[0]), state
        for run, rows in self.servers[move.server].facts[state.servers[move.server]].rows:
            after = self._server(done, heir, ("inherit", run, rows), net)
            if isinstance(after, Broken):
                return after
            done = after
        return done

    def begin(self) -> State:
        """Return the first state: clients are at home at the first server and have reported there; everything is on
        disk.
        """
        state = State((0,) * self.world.clients, (0,) * self.world.servers, (), (0, 0, 0, 0), 0)
        for client in range(self.world.clients):
            state = _sound(self._client(state, client, ("begin",), list(state.net)))
        while (move := next(self._useful(state), None)) is not None:
            state = _sound(self.after(state, move))
        world = self.world
        return state._replace(left=(world.losses, world.doubles, world.kills, world.heartbeats))

    def _useful(self, state: State) -> Iterator[Move]:
        """Return the events that happen without a fault and without new work, and that change the state."""
        return (move for move in self.moves(state) if self._goes_on(state, move) and self.after(state, move) != state)

    def _goes_on(self, state: State, move: Move) -> bool:
        if move.what == "ask again":
            return self._is_lost(state, move.client, self.ways.ways[move.way].content)
        return move.what in ("arrives", "tell", "collect", "write", "said")

    def run(self, *, stop_at: str = "") -> SearchResult:
        """Search the world until a rule is broken or every state was reached."""
        began, result = time.process_time(), SearchResult(self.world.name)
        start = self.begin()
        numbers, states, parents, depths = {start: 0}, [start], [(0, Move("begin"))], [0]
        for place, state in _growing(states):
            if len(states) > self.max_states:
                result.is_whole = False
                break
            is_settled = True
            for move in self.moves(state):
                after = self.after(state, move)
                if after == state:
                    continue
                is_settled = is_settled and not self._goes_on(state, move)
                result.moves += 1
                if isinstance(after, Broken):
                    result.violation = after.what
                elif after in numbers:
                    continue
                else:
                    numbers[after] = len(states)
                    states.append(after)
                    parents.append((place, move))
                    depths.append(depths[place] + 1)
                    result.violation = self._broken(after)
                if result.violation:
                    result.example = self._example(states, parents, place, move)
                    break
            if is_settled and not result.violation:
                result.settled += 1
                if what := self._unsettled(state):
                    result.violation, result.example = what, self._example(states, parents, *parents[place])
            if result.violation:
                break
        result.states, result.depth, result.seconds = len(states), depths[-1], time.process_time() - began
        result.client_states, result.server_states = len(self.clients), sum(map(len, self.servers))
        return result

    def _facts(self, state: State) -> tuple[list[ClientFacts], list[ServerFacts], list[int]]:
        clients = [self.clients.facts[at] for at in state.clients]
        servers = [self.servers[each].facts[max(at, ~at)] for each, at in enumerate(state.servers)]
        return clients, servers, [each for each, at in enumerate(state.servers) if at < 0]

    def _broken(self, state: State) -> str:
        key = state.clients, state.servers
        if key not in self._checked:
            self._checked[key] = broken(*self._facts(state), is_durable=self.world.is_durable)
        return self._checked[key]

    def _unsettled(self, state: State) -> str:
        return unsettled(*self._facts(state), has_losses=state.left[0] < self.world.losses or self.world.kills > 0)

    def _example(self, states: list[State], parents: list[tuple[int, Move]], place: int, last: Move) -> list[str]:
        steps = [(place, last)]
        while place:
            place, move = parents[place]
            steps.append((place, move))
        return [self._words(states[at], move) for at, move in reversed(steps) if move.what != "begin"]

    def _words(self, state: State, move: Move) -> str:
        who = f"client {move.client}" if move.client >= 0 else f"server {move.server}"
        match move.what:
            case "arrives" if self.ways.ways[move.way].kind == "answer":
                return f"client {move.client} receives {self._message(move.way)}"
            case "arrives":
                return f"server {move.server} receives {self._message(move.way)} of client {move.client}"
            case "is lost":
                return f"{self._message(move.way)} of client {move.client} is lost"
            case "ask again":
                return f"client {move.client} sends {self._message(move.way)} again"
            case _ if move.what in WORDS:
                return f"{who} {WORDS[move.what]}"
            case _:
                return " ".join(self.world.script[state.step])

    def _message(self, way: int) -> str:
        message = CONTENTS.messages[self.ways.ways[way].content]
        facts = [f"{name} {getattr(message.body, name)}" for name in TOLD.get(type(message.body), ())]
        return ", ".join([f"{message.type.name} {message.header.sequence}", *facts])


TOLD: Final[dict[type, tuple[str, ...]]] = {
    messages.Update: ("steps", "caches"), messages.Updated: ("steps", "lines_through", "caches"),
    messages.Cache: ("number",), messages.Refusal: ("code",),
}  # fmt: skip
"""Attributes that a report of an event shows, by type of message."""
WORDS: Final = {
    "work": "records an episode and a line", "push": "pushes a cache", "tell": "sends an UPDATE",
    "heartbeat": "sends an UPDATE without news", "leave": "leaves", "collect": "collects what is to be saved",
    "write": "has it on disk", "said": "hears that it is on disk, and answers", "kill": "is killed, and begins again",
}  # fmt: skip


def _growing(states: list[State]) -> Iterator[tuple[int, State]]:
    place = 0
    while place < len(states):
        yield place, states[place]
        place += 1


def _sound(after: State | Broken) -> State:
    assert isinstance(after, State), after
    return after


def _four(values: list[int]) -> tuple[int, int, int, int]:
    first, second, third, fourth = values
    return first, second, third, fourth


def _homeless(content: int) -> int:
    """Return the refusal by a proxy that does not know the home of a request."""
    text = "your server is not behind this proxy (any more); say HELLO again"
    return CONTENTS.number(reply(CONTENTS.messages[content].header, messages.Refusal(code="client", text=text)))
