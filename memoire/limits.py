"""Timeouts and byte limits of the library, one place; times are seconds, sizes are bytes."""

from dataclasses import dataclass, fields

from .arguments import FOR_EVER, whole
from .errors import ParameterError
from .frozen import says_instead
from .suggestions import checked_fields

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB


@checked_fields
@says_instead("Make others: Limits(NAME=...).")
@dataclass(frozen=True)
class Limits:
    """What a node or client allows itself and its peers; every field can be set when one is made.

    Raises:
        ParameterError: a value is negative, or no number of its kind.
    """

    request_timeout: float = 10.0
    """Seconds a request waits for its reply in all, resends included."""
    resend_after: float = 1.0
    """Seconds before the first resend of a request; doubles up to `resend_most`."""
    resend_most: float = 10.0
    """Most seconds between two resends."""
    update_every: float = 0.5
    """Seconds between two UPDATE messages of a client that has news."""
    client_timeout: float = 60.0
    """Seconds of silence after which a client no longer counts, once its samples are used."""
    account_timeout: float = 600.0
    """Seconds of silence after which a client's account leaves a server's memory; it comes back when the client speaks.
    That of a client that said goodbye leaves after `client_timeout`.
    """
    patience: float = 3600.0
    """Longest time that rows wait at an inference node, and that an observer waits for a job; more is refused."""
    max_actors: int = 0
    """Actors that a server takes at once; further ones wait until one leaves. 0 is no bound."""
    new_clients: int = 16384
    """Clients that one key (or everybody, without keys) may bring to a server at once; further ones have to wait."""
    new_clients_rate: float = 25.0
    """Clients that it may bring a second after that."""
    connection_clients: int = 1024
    """Clients that one connection may bring at once to the server or proxy where it ends."""
    connection_clients_rate: float = 1.0
    """Clients that it may bring a second after that."""
    close_timeout: float = 2.0
    """Seconds that close() gives to what is still to be sent."""
    expected_clients: int = 300
    """Clients that a server or proxy should have file descriptors for; it warns at its start where it has not."""
    credit: int = 64 * MiB
    """Bytes of caches a client may have on the way to its home."""
    on_way_bytes: int = 256 * MiB
    """Bytes of caches that all clients of a server together may have on the way, though each may always have one. A
    proxy's queue (`queue_bytes`) has room for as many, so that a server that is slow for a while loses none there.
    """
    held_bytes: int = 1 * GiB
    """Bytes of caches a server holds; the oldest of the largest holder is overwritten."""
    message_bytes: int = 256 * MiB
    """Largest cache or episode payload."""
    request_bytes: int = 1 * MiB
    """Largest request or reply without a draw in it."""
    tail_bytes: int = 512 * KiB
    """Largest msgpack tail of a message."""
    model_bytes: int = 1 * GiB
    """Bytes of models a node keeps over all topics; at least the newest of each is kept."""
    model_chunk: int = 1 * MiB
    """Bytes of one chunk of a model body. A publisher sends a little less than `request_bytes` at most."""
    model_window: int = 4
    """Chunks of one body that may be asked for before the first of them has come."""
    model_spread: float = 0.5
    """Seconds within which clients begin with a large body if many ask for it, each at a random moment; less for
    smaller ones."""
    inline_model: int = 16 * KiB
    """Largest body that travels inside its notice."""
    log_lines: int = 10_000
    """Lines a client keeps until its home has them; beyond, log() waits."""
    log_buffer_bytes: int = 16 * MiB
    """Bytes of those lines; beyond, log() waits."""
    log_timeout: float = 1.0
    """Seconds that log() waits for room; then the line is not taken, and counted as dropped."""
    block_timeout: float = 10.0
    """Seconds that a writer waits for room in the byte window where it may (when_full="block"); then it skips."""
    log_line_bytes: int = 8 * KiB
    """Longest log line; the rest is cut off."""
    log_bytes: int = 128 * MiB
    """Text of log lines that a state folder keeps; the oldest segment goes beyond, and leaves the search with it."""
    backup_every: float = 600.0
    """Seconds between two backups of a state folder's database; another one is made when it is closed."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(each.default, int):
                whole(each.name, value, 0)
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= FOR_EVER:
                raise ParameterError(each.name, value, f"a number from 0 to {FOR_EVER:g}")

    @property
    def reply_bytes(self) -> int:
        """Largest frame of a reply: a batch that is drawn far away, or what any other request is answered with."""
        return max(self.message_bytes, self.request_bytes)
