"""The life of a release on a real cluster: installation, learning, kills of Pods of each kind, growth and removal.

    KUBECONFIG=... pytest -m kubernetes

The tests need helm, kubectl, and the images that values.yaml names on the nodes. Each test continues where
the previous one ended.
"""

import json
import time

import nodekit
import pytest
from kubekit import (
    CLIENT,
    Release,
    Visitor,
    WithInference,
    await_more,
    component_of,
    is_refused,
    memoire,
    replace_key,
    replace_tokens,
    strangers_keys,
    until,
)

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(420)]
RECOVERED: dict[str, float] = {}
"""Seconds from a kill until everything was ready and had gone on, by kind of Pod."""


class Life(WithInference, Release):
    """The demo with an inference node that acts by the learner's newest network."""


@pytest.fixture(scope="module")
def release():
    with Life() as life:
        # The network cuts off traffic that no policy of the chart allows.
        life.apply(
            "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: deny-all}, "
            "spec: {podSelector: {}, policyTypes: [Ingress, Egress]}}"
        )
        life.install()
        yield life


def progress(release):
    """Return (steps recorded, samples drawn) of all servers together."""
    servers = release.servers()
    return sum(each["stats"]["totals"]["steps"] for each in servers), sum(each["stats"]["samples"] for each in servers)


def test_everything_is_ready_under_restricted_pod_security_and_a_default_deny(release):
    release.await_ready(server=2, proxy=2, dashboard=1, learner=1, actor=2, inference=1)


def test_a_cache_goes_there_and_back_and_the_inference_node_answers_a_row(release):
    release.helm("test", release.name, "--timeout", "200s")


def test_the_agent_learns(release):
    """Random pushes let the pole fall after about 22 steps."""

    def newest():
        recent = [server["stats"]["recent"] for server in release.servers()]
        return max(each["return_mean"] or 0.0 for each in recent if each["count"] == 100) > 44.0

    until(newest, 300.0, "100 episodes twice as long as by chance")


def test_dashboard_and_metrics_answer_through_their_services(release):
    overview = until(lambda: (seen := release.overview())["totals"]["steps"] > 0 and seen, 60.0, "steps that are shown")
    assert {node["state"] for node in overview["nodes"]} == {"up"}
    assert sorted(node["role"] for node in overview["nodes"]) == ["inference", *["proxy"] * 2, *["server"] * 2]
    for component, figure in (("server", "memoire_steps_total"), ("inference", "memoire_inference_rows_total")):
        assert figure in release.page(release.pods(component)[0], "/metrics", port=8081)


@pytest.fixture(scope="module")
def strangers(release):
    """Two Pods: one without the clients' label, and one with the label, the actors' present key and keys of unknown
    actors.
    """
    release.apply(memoire("keys", "export", str(release.keys / "actor"), "--kubernetes", "former"))
    with (
        Visitor(release, "stranger") as stranger,
        Visitor(release, "friend", CLIENT, mounts=["former-actor", *strangers_keys(release)]) as friend,
    ):
        yield stranger, friend


def test_policies_let_labelled_pods_reach_the_proxies_and_nobody_anything_else(strangers):
    stranger, friend = strangers
    closed = dict.fromkeys(("server", "proxy", "learner", "actor", "inference"), set())
    open_to_all = {"dashboard": {8265}, **closed}
    assert stranger.reaches() == open_to_all
    assert friend.reaches() == {**open_to_all, "proxy": {5560, 5561, 5562}, "inference": {5570}}


def test_an_actor_without_the_network_acts_by_the_newest_one(release, strangers):
    _, friend = strangers
    actions, version = friend.asks(release.inference, "former-actor")
    assert len(actions) == 3 and set(actions) <= {0, 1} and version >= 1
    until(lambda: friend.asks(release.inference, "former-actor")[1] > version, 60.0, "a newer network")


def test_who_has_no_key_of_the_cluster_gets_nowhere_and_is_counted(release, strangers):
    _, friend = strangers
    until(lambda: friend.is_let_in("former-actor"), 60.0, "a key that opens the door")
    is_refused(release, friend.is_let_in, "plain", "silent")  # silent: the client hung up before an answer
    is_refused(release, lambda: friend.is_let_in("stranger-actor"), "unknown")
    is_refused(release, lambda: friend.is_let_in("other-actor"), "server_key")
    is_refused(release, lambda: not friend.publishes("former-actor"), "role")


def test_the_dashboard_asks_for_its_token_and_takes_another_one_once_that_is_changed(release, strangers):
    stranger, _ = strangers
    url = f"http://{release.service('dashboard')}/api/overview"
    new, old = replace_tokens(release)
    until(lambda: [stranger.gets(url, each) for each in ("", old, new)] == ["401", "401", "200"], 60.0, url)
    until(lambda: {node["state"] for node in release.overview()["nodes"]} == {"up"}, 60.0, "nodes that answer it")


def test_actors_go_on_while_their_key_is_replaced_and_the_old_one_opens_nothing(release, strangers):
    _, friend = strangers

    def recording():
        return {client: one for client, one in release.accounts().items() if one["steps"]}

    before = recording()
    replace_key(release, "actor")

    def all_go_on():
        now = recording()
        return set(now) == set(before) and all(now[client]["steps"] > before[client]["steps"] for client in now)

    until(all_go_on, 120.0, "the same actors, with more steps")
    until(lambda: not friend.is_let_in("former-actor"), 60.0, "the old key opens nothing")  # nodes look now and then
    is_refused(release, lambda: friend.is_let_in("former-actor"), "revoked")


@pytest.mark.parametrize(
    ("component", "count"), [("proxy", 2), ("dashboard", 1), ("actor", 2), ("learner", 1), ("server", 2)]
)
def test_after_a_kill_everything_goes_on(release, component, count):
    killed = release.pods(component)[0]
    before = progress(release)
    began = time.monotonic()
    uid = release.kubectl("get", "pod", killed, "-o", "jsonpath={.metadata.uid}")
    release.kill(killed)
    there = ("get", "pods", "-o", "jsonpath={.items[*].metadata.uid}")
    until(lambda: uid not in release.kubectl(*there), 60.0, "it is gone")
    release.await_ready(120.0, **{component: count})
    since = progress(release)
    assert all(now >= then for now, then in zip(since, before, strict=True) if component != "server")
    assert since[0] >= before[0]  # on disk
    await_more(lambda: progress(release))
    RECOVERED[component] = time.monotonic() - began


def stay_on(release, node):
    """Return the Pods without a volume that stay on a node."""
    there = [pod for pod in release.staying() if pod["spec"].get("nodeName") == node]
    return [pod for pod in there if component_of(pod) in ("proxy", "dashboard", "actor")]


@pytest.mark.skipif(not nodekit.nodes(), reason="MEMOIRE_NODES names no node that a trial may have")
def test_a_node_is_lost_and_comes_back(release):
    """Pods without a volume run elsewhere soon; Pods with a volume return with the node."""
    node = nodekit.nodes()[0]
    before = progress(release)
    began = time.monotonic()
    nodekit.do("kill", node)
    try:
        until(lambda: not stay_on(release, node), 180.0, "the node is given up")
        release.await_ready(180.0, proxy=2, dashboard=1, actor=2)  # on other nodes
        RECOVERED["node: what has no volume"] = time.monotonic() - began
    finally:
        began = time.monotonic()
        nodekit.do("start", node)
    release.await_ready(180.0, server=2, learner=1)
    since = until(lambda: progress(release), 60.0, "both servers answer")
    assert since[0] >= before[0]
    await_more(lambda: progress(release))
    RECOVERED["node: all, once it is back"] = time.monotonic() - began


def test_actors_and_proxies_are_scaled_and_all_take_part(release):
    release.install("--set", "actors.replicas=4", "--set", "proxy.replicas=3")
    release.await_ready(actor=4, proxy=3)
    before = {client: one["steps"] for client, one in release.accounts().items()}

    def moving():
        now = release.accounts()
        return sum(one["steps"] > before.get(client, 0) for client, one in now.items()) == 4

    until(moving, 90.0, "four actors that go on")


def test_servers_that_go_by_an_upgrade_give_away_what_they_counted(release):
    assert len(release.pods("server")) == 2
    before = release.accounts()

    def is_whole(count):
        now = release.accounts()
        return release.are_ready("server", count) and all(
            client in now and now[client]["steps"] >= one["steps"] for client, one in before.items()
        )

    scale = ("--set", "actors.replicas=4", "--set", "proxy.replicas=3", "--set", "server.replicas=1")
    release.install(*scale, seconds=300)
    until(lambda: is_whole(1), 60.0, "one server that has all accounts")
    release.helm("rollback", release.name, "--wait", "--timeout", "300s", timeout=350.0)
    until(lambda: is_whole(2), 90.0, "two servers that have all accounts")


def test_what_actors_have_counted_is_what_the_cluster_has_counted(release):
    actors = release.pods("actor")
    with release.last_words() as words:
        release.install("--set", "actors.replicas=0", "--set", "proxy.replicas=1")
        until(lambda: not release.pods("actor"), 90.0, "no actor")
    assert len(words) == len(actors)
    counted = release.accounts()
    for client, report in words.items():
        assert (counted[client]["episodes"], counted[client]["steps"]) == (report["episodes"], report["steps"]), client
        assert counted[client]["pushed"] == report["caches"] == counted[client]["settled"], client
    assert release.totals()["steps"] == sum(each["steps"] for each in counted.values())


def test_an_upgrade_of_settings_and_a_roll_back_keep_the_totals(release):
    if release.pods("actor"):  # Pods exist if this test runs alone
        release.install("--set", "actors.replicas=0")
    before = {client: one["steps"] for client, one in release.accounts().items()}
    release.install("--set", "actors.replicas=0", "--set-json", "server.parameters.priority_exponent=0.7")
    assert all(status["parameters"]["priority_exponent"] == 0.7 for status in settings(release))
    release.helm("rollback", release.name, "--wait", "--timeout", "150s")
    assert all(status["parameters"]["priority_exponent"] == 0.6 for status in settings(release))
    assert {client: one["steps"] for client, one in release.accounts().items()} == before


def settings(release):
    return [json.loads(release.page(pod, "/settings"))["tables"]["default"] for pod in release.pods("server")]


def test_uninstalling_leaves_nothing_but_the_volumes_that_are_to_be_kept(release):
    expected = {f"persistentvolumeclaim/state-{release.full}-server-{number}" for number in range(2)}
    assert set(release.uninstall()) == expected
    print("\n".join(f"{component:26} {seconds:5.1f} s" for component, seconds in RECOVERED.items()))
