"""Tables of prompts as the dashboard sees them, over all servers that answer."""

from memoire.dashboard.collect.counters import NodeState
from memoire.dashboard.collect.overview import STATES, prompts_of


def test_ranks_and_holders_of_several_servers_are_added_up():
    def node(name, state="up", **changed):
        figures = dict.fromkeys((*STATES, "given", "workers", "oldest_lease", "expired", "late", "failed", "stale"), 0)
        figures |= {"replayable": 0, "tokens_drawn": 0, "lag": 0} | changed
        found = NodeState(f"http://{name}", 0.0, state=state, name=name)
        found.status = {"stats": {"tables": {"math": {"prompts": figures}, "other": {"prompts": None}}}}
        return found

    holder = {"worker": "ab", "leases": 2, "oldest": 9.0, "left": 1.0}
    one = node(
        "a", ready=3, given=3, oldest_lease=9.0, lag=2, rank_tokens=[5, 7], holders=[holder], reasons={"full": 1}
    )
    two = node("b", ready=1, given=2, leased=1, oldest_lease=4.0, lag=5, rank_tokens=[1], reasons={"full": 2})
    (row,) = prompts_of([one, two, node("c", "down", ready=50, given=50)])
    assert (row.table, row.servers, row.given, row.states["ready"], row.states["leased"]) == ("math", 2, 5, 4, 1)
    assert (row.oldest_lease, row.lag, row.rank_tokens, row.reasons) == (9.0, 5, [6, 7], {"full": 3})
    assert [(each.worker, each.server) for each in row.holders] == [("ab", "a")]
    assert prompts_of([node("c", "down")]) == []
