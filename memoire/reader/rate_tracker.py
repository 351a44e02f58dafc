"""How drawing stands beside recording at all servers of a reader together; `replay.limiter` has the band itself."""

from memoire.replay.limiter import band_settings, why_not_draw
from memoire.replay.parameters import Parameters
from memoire.wire.messages import ClusterRate, ServerRate


class RateTracker:
    """How drawing stands beside recording at several servers together, as their reader knows. Belongs to its thread."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ServerRate]] = {}  # of each server: its epoch, and what it said last
        self._places: dict[str, tuple[int, int]] = {}  # of each: entries that can be drawn, and clients
        self._surplus: float | None = None  # None: some have not said yet

    def reset(self) -> None:
        """Another run begins, or other parameters hold."""
        self._known.clear()
        self._places.clear()
        self._surplus = None

    def heard(self, server: str, epoch: int, standing: ServerRate | None, entries: int, clients: int) -> None:
        """What a server says of itself."""
        self._places[server] = entries, clients
        if standing is None:
            self._known.pop(server, None)
            return
        former, self._known[server] = self._known.get(server), (epoch, standing)
        if self._surplus is None:
            return
        if former is None:
            self._surplus += 0.0 if standing.is_told else standing.surplus
            return
        inserted, drawn = standing.inserted, standing.drawn
        if former[0] == epoch:
            inserted, drawn = inserted - former[1].inserted, drawn - former[1].drawn
        self._surplus += inserted * standing.ratio - drawn

    def why_not_draw(self, parameters: Parameters, servers: list[str], samples: int, on_way: int) -> str:
        """Why a batch has to wait for entries; "" when it has not.

        Args:
            servers: Those that are there.
            on_way: Samples that were asked for and have not come.
        """
        if parameters.samples_per_insert_tolerance is None and not parameters.min_size:
            return ""
        said = [self._known[server][1] for server in servers if server in self._known]
        if len(said) < len(servers) or any((each.ratio, each.tolerance) != band_settings(parameters) for each in said):
            return "waits for all servers to say how many entries were recorded"
        if self._surplus is None and on_way:  # drawn before there was a band: not to be made good, once it has come
            return "waits for samples that were asked for before the band began"
        if self._surplus is None:  # what somebody told them is what was known of all
            told = [each.surplus for each in said if each.is_told]
            self._surplus = sum(each.surplus for each in said if not each.is_told) + (max(told) if told else 0.0)
        entries = sum(self._places[server][0] for server in servers)
        return why_not_draw(parameters, samples, entries, self._surplus - on_way)

    def band(self, server: str, servers: list[str]) -> ClusterRate | None:
        """What to tell a server of all."""
        if self._surplus is None or server not in self._known:
            return None
        said = self._known[server][1]
        others = [other for other in servers if other in self._places and other != server]
        entries = sum(self._places[other][0] for other in others)
        mine = self._places[server][1] + 1
        share = mine / (mine + sum(self._places[other][1] + 1 for other in others))
        return ClusterRate(self._surplus, said.inserted, said.drawn, entries, share, said.ratio, said.tolerance)
