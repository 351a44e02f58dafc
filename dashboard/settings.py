"""What a dashboard is told when it starts."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import Annotated

from memoire.arguments import NUMBER, Setting, check_settings
from memoire.errors import ParameterError
from memoire.security import access
from memoire.security.access import Tokens

_SECRET = ("token", "node_token")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of one dashboard.

    Raises:
        ParameterError: one is out of its range, or nobody would be kept out.
    """

    nodes: tuple[str, ...]
    """Where the nodes' pages are: "http://host:8080", or "dns:name:8080" for every address of a name, looked up again
    and again."""
    listen: Annotated[str, Setting(show="HOST:PORT")] = "127.0.0.1:8265"
    """Where to show it; port 0 takes a free one."""
    history: Annotated[str | None, Setting(show="FILE")] = None
    """Keep the curves in this file (default: in memory)."""
    probes: str | None = None
    """HOST:PORT where only /livez, /readyz and /metrics are answered, to everybody; at `listen` /metrics then asks for
    the token. None: they are open there."""
    token: Tokens | str | None = None
    """What people have to know; None asks for nothing."""
    node_token: Tokens | str | None = None
    """What the nodes ask for."""
    hosts: tuple[str, ...] = ()
    """Names under which it may be asked, beside those of this machine. None given, and a token set: any name."""
    insecure: Annotated[bool, Setting()] = False
    """Serve other machines without a token."""
    root_path: Annotated[str, Setting(show="PATH")] = ""
    """Path under which a reverse proxy shows it."""
    poll_every: float = 1.0
    """Seconds between two looks at each node."""
    silent_after: float = 20.0
    """Seconds without a word after which an actor is shown as silent; each says something every 5."""
    expected_actors: Annotated[int, NUMBER] = 0
    """Actors that there should be; the overview names missing ones (default: nobody knows)."""
    expected_servers: Annotated[int, NUMBER] = 0
    """Servers that there should be, embedded ones too; the overview names missing ones (default: nobody knows)."""
    expected_proxies: Annotated[int, NUMBER] = 0
    """Proxies that there should be; the overview names missing ones (default: nobody knows)."""
    expected_inference: Annotated[int, NUMBER] = 0
    """Inference nodes that there should be; the overview names missing ones (default: nobody knows)."""
    lost_after: Annotated[float, Setting(unit="s", above=0.0)] = 300.0
    """Silence after which an actor is lost, and no longer a finding; never before `silent_after`."""
    stale_after: Annotated[float, Setting(unit="s", above=0.0)] = 1800.0
    """Age of one in ten drawn samples from which they are called old."""
    goal_steps: Annotated[int, NUMBER] = 0
    """Steps after which the run is done."""
    goal_episodes: Annotated[int, NUMBER] = 0
    """Episodes after which the run is done."""
    goal_return: Annotated[float | None, Setting(low=-math.inf, show="X")] = None
    """Mean return to reach: a line on the curve."""
    open: str | None = None
    """File of an exported run to show in place of a cluster."""

    def __post_init__(self) -> None:
        if self.open is not None and self.nodes:
            raise ParameterError("--open", self.open, "no address of a node beside it: a file or a cluster is shown")
        if not self.nodes and self.open is None:
            raise ParameterError("--node", "", "the address of at least one node's pages, such as http://host:8080")
        for node in self.nodes:
            if not node.startswith(("http://", "dns:")):
                raise ParameterError("--node", node, "http://HOST:PORT, or dns:NAME:PORT")
        if not self.poll_every > 0.0 or not self.silent_after > 0.0:
            raise ParameterError("poll_every, silent_after", (self.poll_every, self.silent_after), "seconds above 0")
        check_settings(self)
        object.__setattr__(self, "root_path", self.root_path.rstrip("/"))
        if self.root_path and not self.root_path.startswith("/"):
            raise ParameterError("--root-path", self.root_path, "a path that begins with /")
        if self.token is None and not self.insecure:
            access.refuse("--listen", self.listen, guard="a token (--token-file)")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return access.is_local(self.listen)

    @property
    def is_open(self) -> bool:
        """Whether everybody on other machines may read it."""
        return self.token is None and not self.is_local

    def shown(self) -> dict[str, object]:
        """All settings, for people: what is secret is only said to be there."""
        secret = {name: getattr(self, name) is not None for name in _SECRET}
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in secret} | secret

    @classmethod
    def defaults(cls) -> dict[str, object]:
        """The same where nobody set anything: without `nodes`, which has to be set."""
        known = {each.name: each.default for each in fields(cls) if each.default is not MISSING}
        return known | dict.fromkeys(_SECRET, False)
