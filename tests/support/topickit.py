"""A node's models without a socket: requests wait until a test answers them."""

import random

from memoire.errors import ProtocolError, Refused
from memoire.limits import Limits
from memoire.models.model import ModelStore, chunk_of
from memoire.models.topics import Topics
from memoire.wire import messages
from memoire.wire.frames import encode, parse, reply

HOME = 7
"""Number in place of the hash of a server's name."""

LIMITS = Limits.of(model_chunk=10, model_window=3, model_spread=0.0, model_bytes=10_000)


class Node:
    """Models of a node, and requests of one client that are not answered yet."""

    def __init__(self, limits=LIMITS, *, find=lambda topic, version, checksum: None, rng=None):
        self.limits, self.store, self.epoch = limits, ModelStore(limits.model_bytes), 1
        self.asked = []  # (body of the request, function for the reply)
        self.heard = []  # calls of hear
        self.got = []  # (version, is_renewed), in order of arrival
        self.now = 100.0
        calls = self.fetch, self.hear, lambda function: function(), self.on_model, find
        self.topics = Topics(limits, *calls, rng or random.Random(0), lambda: self.now)

    def fetch(self, topic, version, offset, size, finish):
        self.asked.append((messages.Fetch(topic=topic, version=version, offset=offset, size=size), finish))

    def hear(self, topic, wanted):
        self.heard.append((topic, wanted))
        return wanted

    def on_model(self, model, is_renewed, source):
        self.got.append((model.version, is_renewed))

    def publish(self, size=45, *, notice=True, fill=None, inline=False):
        version = self.store.version("t") + 1
        body = bytes([version % 256 if fill is None else fill]) * size
        model = self.store.publish("t", body)
        if notice:
            self.notice(model, body if inline else None)
        return body

    def notice(self, model, payload=None, home=HOME):
        facts = {name: getattr(model, name) for name in ("topic", "version", "size", "checksum")}
        body = messages.Notice(epoch=self.epoch, **facts)
        self.topics.receive_notice(body, payload, home)

    def answer(self, place=0, *, damage=False):
        """Answer one request; the reply is encoded and parsed as on the wire."""
        asked, finish = self.asked.pop(place)
        try:
            model = self.store.serve(asked.topic, asked.version)
            chunk, stretch = chunk_of(model, asked, self.limits, home=HOME, epoch=self.epoch)
        except ProtocolError as error:
            finish(Refused("node", error.code, error.detail))
            return
        payload = None if stretch is None else bytes(stretch)
        if damage and payload:
            payload = bytes([payload[0] ^ 1]) + payload[1:]
        header = encode(messages.Fetch(topic="t"), client=b"c" * 16)
        finish(parse(reply(parse(header).header, chunk, payload=payload)))

    def answer_all(self):
        while self.asked:
            self.answer()

    def restart(self, versions=()):
        """Lose all models, and publish these, as clients of a restarted server notice."""
        self.store, self.epoch = ModelStore(self.limits.model_bytes), self.epoch + 1
        for body in versions:
            self.store.publish("t", body)
        self.topics.accept_lower_versions()
        self.topics.receive_versions(self.store.versions())

    @property
    def newest(self):
        return self.topics.newest("t")


def following(*arguments, **options):
    node = Node(*arguments, **options)
    node.topics.follow_topic("t")
    node.answer_all()
    return node
