"""What the tests of a proxy's deciding parts share: addresses behind it, requests of clients, and servers' answers."""

from memoire.errors import ParameterError
from memoire.limits import Limits
from memoire.proxy.router import Backend, Router
from memoire.security.roles import OPEN, EnvelopedRequest
from memoire.wire import messages
from memoire.wire.frames import MessageHeader, encode, name_hash, parse_header

LIMITS = Limits()
RUN = name_hash("one")
HOME = name_hash
ADDRESS = [b"connection", b""]
"""Of a client: what stands in front of its requests."""


class Arriving:
    """The models of an address, as far as a proxy asks for them."""

    def __init__(self):
        self.coming, self.announcements, self.runs = set(), [], 0
        self.wanted, self.most = set(), 256

    def is_coming(self, topic, version):
        return (topic, version) in self.coming

    def want(self, topic):
        if topic not in self.wanted and len(self.wanted) >= self.most:
            raise ParameterError("topic", topic, "one of few")
        self.wanted.add(topic)

    def announced(self, versions):
        self.announcements.append(versions)

    def begin_run(self):
        self.runs += 1


class Back(Backend):
    """An address that has answered with these names."""

    is_away, denied = False, ""

    def __init__(self, *names, endpoint="tcp://a", run=RUN):
        super().__init__(endpoint)
        self.topics = Arriving()
        if names:
            self.learn(header(messages.Welcome, run=run), welcome(names[0], servers=list(names)))


def header(body, run=RUN, home=0, client=b"c" * 16, sequence=1):
    return MessageHeader(body.type, 0, client, run, home, sequence, 0, 0, 0)


def welcome(name="a", **facts):
    return messages.Welcome(**{"schema": "{}", "home_name": name} | facts)


def router(*backs, now=100.0):
    """A router that has learned of these addresses."""
    made = Router(now)
    made.backs = list(backs)
    for back in backs:
        made.learn(back)
    return made


def request(body, client=b"c" * 16, sequence=1, home="", run=RUN, payload=None):
    """A request of a client."""
    hashed = HOME(home) if home else 0
    frames = encode(body, client=client, sequence=sequence, home=hashed, run=run, payload=payload)
    return EnvelopedRequest(OPEN, ADDRESS, frames, True)


def header_of(asked):
    return parse_header(asked.message)[0]
