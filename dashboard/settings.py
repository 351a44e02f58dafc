"""Settings of a dashboard."""

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
    """Settings of one dashboard, as keyword arguments.

    Raises:
        ParameterError: A setting is out of its range, or other machines could read the dashboard without a token.
    """

    nodes: tuple[str, ...]
    """Addresses of the nodes' pages: "http://host:8080", or "dns:name:8080" for all addresses of a name, which the
    dashboard resolves again and again."""
    listen: Annotated[str, Setting(show="HOST:PORT")] = "127.0.0.1:8265"
    """Address of the dashboard; port 0 takes a free port."""
    history: Annotated[str | None, Setting(show="FILE")] = None
    """Keep the curves in this file (default: in memory)."""
    probes: str | None = None
    """HOST:PORT that serves only /livez, /readyz and /metrics, without a token; at `listen`, /metrics then needs the
    token.
    None: `listen` serves them without a token."""
    token: Tokens | str | None = None
    """Token that users of the dashboard need; None needs no token."""
    node_token: Tokens | str | None = None
    """Token that the dashboard sends to the nodes."""
    hosts: tuple[str, ...] = ()
    """Host names that browsers may use for the dashboard, beside those of this machine. If there are none and a token
    is set, every name is allowed."""
    insecure: Annotated[bool, Setting()] = False
    """Serve other machines without a token."""
    root_path: Annotated[str, Setting(show="PATH")] = ""
    """Path under which a reverse proxy serves the dashboard."""
    poll_every: float = 1.0
    """Seconds between two requests to each node."""
    silent_after: float = 20.0
    """Seconds without a message after which an actor is shown as silent. Each actor reports every 5 seconds."""
    expected_actors: Annotated[int, NUMBER] = 0
    """Number of actors to expect; the overview reports missing ones (default: 0, no check)."""
    expected_servers: Annotated[int, NUMBER] = 0
    """Number of servers to expect, embedded ones too; the overview reports missing ones (default: 0, no check)."""
    expected_proxies: Annotated[int, NUMBER] = 0
    """Number of proxies to expect; the overview reports missing ones (default: 0, no check)."""
    expected_inference: Annotated[int, NUMBER] = 0
    """Number of inference nodes to expect; the overview reports missing ones (default: 0, no check)."""
    lost_after: Annotated[float, Setting(unit="s", above=0.0)] = 300.0
    """Seconds without a message after which an actor counts as lost and is no longer reported as silent; at least
    `silent_after`."""
    stale_after: Annotated[float, Setting(unit="s", above=0.0)] = 1800.0
    """Age in seconds from which drawn samples count as old, if one in ten is older."""
    goal_steps: Annotated[int, NUMBER] = 0
    """Number of steps after which the run is done."""
    goal_episodes: Annotated[int, NUMBER] = 0
    """Number of episodes after which the run is done."""
    goal_return: Annotated[float | None, Setting(low=-math.inf, show="X")] = None
    """Mean return to reach, drawn as a line in the chart of returns."""
    open: str | None = None
    """File of an exported run, shown instead of a cluster."""

    def __post_init__(self) -> None:
        if self.open is not None and self.nodes:
            raise ParameterError.with_text("--open shows a file and cannot be combined with --node.")
        if not self.nodes and self.open is None:
            raise ParameterError.with_text("Give the address of at least one node's pages: --node http://host:8080.")
        for node in self.nodes:
            if not node.startswith(("http://", "dns:")):
                raise ParameterError("--node", node, "http://HOST:PORT, or dns:NAME:PORT")
        if not self.poll_every > 0.0 or not self.silent_after > 0.0:
            raise ParameterError.with_text(
                f"poll_every and silent_after must be above 0 s, got {self.poll_every:g} s and {self.silent_after:g} s."
            )
        check_settings(self)
        object.__setattr__(self, "root_path", self.root_path.rstrip("/"))
        if self.root_path and not self.root_path.startswith("/"):
            raise ParameterError("--root-path", self.root_path, "a path that begins with /")
        if self.token is None and not self.insecure:
            access.refuse("--listen", self.listen, guard="a token (--token-file)")

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the dashboard."""
        return access.is_local(self.listen)

    @property
    def is_open(self) -> bool:
        """True if other machines can read the dashboard without a token."""
        return self.token is None and not self.is_local

    def visible_settings(self) -> dict[str, object]:
        """Return all settings to show; secrets are replaced by True if they are set."""
        secret = {name: getattr(self, name) is not None for name in _SECRET}
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in secret} | secret

    @classmethod
    def defaults(cls) -> dict[str, object]:
        """Return the defaults of all settings except `nodes`, which has none."""
        known = {each.name: each.default for each in fields(cls) if each.default is not MISSING}
        return known | dict.fromkeys(_SECRET, False)
