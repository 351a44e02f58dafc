"""Every command of docs/kubernetes.md, taken from the page and run in order on a real cluster.

Bash runs each block of the page that begins with ```sh, in a folder with the checkout's `deploy`. Words behind `sh`:

    docker        needs docker; IN_PLACE has the replacement
    background    runs until it is ended
    elsewhere     is for another cluster or moment: not run

The tests marked `long` are the page's last ones, and those that need none of its blocks: the other tests run without
these.
"""

import base64
import json
import re
import subprocess
import sys
import urllib.request

import pytest
from kubekit import CLIENT, ROOT, Release, Visitor, await_more, run, until

from memoire.security.roles import ROLES

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(590)]
BLOCK = re.compile(r"^```sh( \w+)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("docs/kubernetes.md", "README.md")
IN_PLACE = {
    "make image": "",  # .ci/kubernetes builds the images and gives them to the nodes
    "memoire() {": f'memoire() {{ {sys.executable} -m memoire "$@"; }}',
    "docker build --tag memoire .": "",
}
"""Replacement of each block that needs docker, by its first words."""
RECORD = """
import memoire, numpy, sys
obs = numpy.zeros(4, numpy.float32)
with memoire.connect(sys.argv[1], keys=sys.argv[2], timeout=20.0) as client:
    writer = client.writer()
    for step in range(200):
        after = obs + 1
        writer.step(obs, 0, 1.0, step == 199, False, after)
        obs = after
    client.update(20.0)
    client.log("kept")
    client.update(20.0)
"""


def blocks(page):
    """Return (mark, commands) of each block of commands on a page."""
    matches = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [(mark.strip(), text) for mark, text in matches]


class Page:
    """A reader who runs the page's commands; functions that a block defines are available in later blocks.

    Args:
        folder: Working directory of the commands.
    """

    def __init__(self, folder):
        self.folder, self.known, self.done = folder, folder / "known.sh", []
        (folder / "deploy").symlink_to(ROOT / "deploy")
        self.known.touch()
        self.left = blocks(PAGES[0])

    def next(self, begins, *, seconds=300.0):
        """Run the next block for this cluster, which must begin with these words. Return its output."""
        mark, text = self._take()
        assert text.startswith(begins), f"the page goes on with\n{text}"
        if mark == "docker":
            (text,) = [instead for begins, instead in IN_PLACE.items() if text.startswith(begins)]
        script = f'source "{self.known}"\n{text}\ndeclare -f > "{self.known}"\n'
        return run("bash", "-euo", "pipefail", "-c", f"cd {self.folder}\n{script}", timeout=seconds)

    def start(self, begins):
        """Start the next block, which runs in the background, and return its process."""
        mark, text = self._take()
        assert mark == "background" and text.startswith(begins), text
        return subprocess.Popen(["bash", "-c", f"exec {text}"], cwd=self.folder, stdout=subprocess.DEVNULL)

    def _take(self):
        while self.left[0][0] == "elsewhere":
            self.left.pop(0)
        return self.left.pop(0)


class PageRelease(Release):
    """The release that the page installs."""

    def __init__(self, namespace, name, full):
        super().__init__(namespace, name)
        self.full = full

    def __enter__(self):
        run("kubectl", "delete", "namespace", self.namespace, "--ignore-not-found", timeout=120.0)
        return self

    def secrets(self):
        """Return {name: data} of the Secrets that a hook made."""
        names = {f"{self.name}-tokens", *(f"{self.name}-keys-{role}" for role in ROLES)}
        items = json.loads(self.kubectl("get", "secrets", "-o", "json"))["items"]
        return {one["metadata"]["name"]: one["data"] for one in items if one["metadata"]["name"] in names}

    def leftovers(self):
        """Return the names of objects that are left of the hook for keys."""
        kinds = "jobs,serviceaccounts,roles,rolebindings,networkpolicies"
        return [one for one in self.kubectl("get", kinds, "-o", "name").split() if one.endswith("-keys")]

    def progress(self):
        """Return (steps, samples) of the only server."""
        (server,) = self.servers()
        return server["stats"]["totals"]["steps"], server["stats"]["samples"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return Page(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def release():
    with PageRelease("rl", "memoire", "memoire") as page_release:
        yield page_release


@pytest.fixture(scope="module")
def mine():
    with PageRelease("mine", "mine", "mine-memoire") as page_release:
        yield page_release


def test_blocks_that_take_docker_are_those_that_have_something_in_their_place():
    marked = [text for page in PAGES for mark, text in blocks(page) if mark == "docker"]
    assert all(sum(text.startswith(begins) for begins in IN_PLACE) == 1 for text in marked), marked
    assert all(any(text.startswith(begins) for text in marked) for begins in IN_PLACE)
    others = [text for mark, text in blocks(PAGES[0]) if mark != "docker"]
    assert not [text for text in others if "docker" in text]


def test_the_readme_says_nothing_of_kubernetes_but_what_the_page_says():
    known = {line.partition("#")[0].strip() for _, text in blocks(PAGES[0]) for line in text.splitlines()}
    lines = [line.partition("#")[0].strip() for _, text in blocks(PAGES[1]) for line in text.splitlines()]
    assert not [line for line in lines if re.match("(helm|kubectl|make image)", line) and line not in known]


def test_one_line_installs_a_cluster_that_lives_with_keys_tokens_and_policies(page, release):
    page.next("make image")
    page.next("helm install memoire")
    run("kubectl", "label", "namespace", "rl", "pod-security.kubernetes.io/enforce=restricted")
    release.await_ready(90.0, server=1, proxy=1, dashboard=1, learner=1, actor=2)
    assert len(release.secrets()) == 1 + len(ROLES) and not release.leftovers()
    (server,) = release.servers()
    assert server["security"]["keys"] is True and not server["security"]["open"]
    until(lambda: min(release.progress()) > 2_000, 120.0, "steps that are counted, and samples that are drawn")


def test_the_dashboard_opens_with_the_token_that_is_printed(page, release):
    forward = page.start("kubectl -n rl port-forward")
    token = page.next("kubectl -n rl get secret")
    assert token == base64.b64decode(release.secrets()["memoire-tokens"]["dashboard"]).decode()
    notes = release.helm("get", "notes", "memoire").removeprefix("NOTES:").strip().splitlines()
    assert run("bash", "-c", notes[2]) == token
    request = urllib.request.Request("http://localhost:8265/api/overview", headers={"Authorization": f"Bearer {token}"})
    try:
        seen = until(lambda: json.load(urllib.request.urlopen(request, timeout=10)), 60.0, "the dashboard")
    finally:
        forward.kill()
        forward.wait()
    assert seen["totals"]["steps"] > 0
    states = {node["role"]: node["state"] for node in seen["nodes"]}
    assert states == dict.fromkeys(("server", "proxy", "learner"), "up")


def test_the_real_thing_takes_the_place_of_the_demo_and_has_the_same_keys(page, release):
    before = release.secrets()
    page.next("memoire() {")
    page.next("helm uninstall memoire")
    assert release.secrets() == before and not release.leftovers()
    for component in ("learner", "actor"):  # an ending actor may still report counts
        until(lambda component=component: release.is_gone(component), 60.0, f"the demo without its {component}")


def test_a_round_trip_changes_no_total(page, release):
    before, known = release.totals(), clients_of(release)
    page.next("helm test memoire")
    assert release.totals() == before
    (server,) = release.servers()
    assert server["stats"]["probes"] == 1 and clients_of(release) <= known


def clients_of(release):
    """Return the ids of the clients that the only server lists."""
    (server,) = release.servers()
    return {row["client"] for row in server["clients"]["rows"]}


@pytest.mark.long
def test_a_secret_that_somebody_deleted_is_made_again_and_one_that_was_given_is_asked_for(release):
    before, gone = release.secrets(), "memoire-keys-actor"
    release.kubectl("delete", "secret", gone)
    change = ("upgrade", "memoire", str(ROOT / "deploy/helm/memoire"), "--reset-then-reuse-values")
    release.helm(*change, "--wait", "--timeout", "150s")
    now = release.secrets()
    assert now.keys() == before.keys() and now[gone]["own.key"] != before[gone]["own.key"]
    kept = set(now) - {gone, "memoire-tokens"}
    assert all(now[name]["own.key"] == before[name]["own.key"] for name in kept)
    with pytest.raises(AssertionError, match="nobodys-keys-server"):
        release.helm(*change, "--set", "security.keys=nobodys-keys", "--wait", "--timeout", "150s")
    assert release.are_ready("server", 1)
    release.helm("rollback", "memoire", "--wait", "--timeout", "100s")
    assert release.secrets() == now and not release.leftovers()


def test_keys_of_ones_own_are_taken_and_replaced(page, release):
    page.next("memoire keys new keys")
    assert release.are_ready("server", 1) and release.are_ready("proxy", 1)
    former = (page.folder / "keys" / "actor" / "own.pub").read_text(encoding="utf-8")
    page.next("apply() {")
    held = release.kubectl("exec", release.pods("server")[0], "--", "cat", "/etc/memoire/keys/authorized-actor.pub")
    new = (page.folder / "keys" / "actor" / "own.pub").read_text(encoding="utf-8")
    assert key_in(new) in held and key_in(former) not in held


def key_in(file):
    """Return the key itself from the text of a public key file."""
    return next(line for line in file.splitlines() if re.fullmatch("[A-Za-z0-9+/]{43}=", line))


@pytest.fixture
def controller(release):
    """A Pod in the namespace of an Ingress controller."""
    run("kubectl", "create", "namespace", "ingress-nginx")
    try:
        yield Visitor(release, "controller", namespace="ingress-nginx")
    finally:
        run("kubectl", "delete", "namespace", "ingress-nginx", "--wait=false")


@pytest.mark.long
def test_behind_an_oidc_proxy_the_dashboard_opens_for_the_controller_alone(release, controller, tmp_path):
    (text,) = re.findall(r"(?ms)^```yaml ingress behind an oidc proxy\n(.*?)^```$", (ROOT / PAGES[0]).read_text())
    (values := tmp_path / "values.yaml").write_text(text, encoding="utf-8")
    change = ("upgrade", "memoire", str(ROOT / "deploy/helm/memoire"), "--reset-then-reuse-values", "--values")
    release.helm(*change, str(values), "--wait", "--timeout", "150s")
    host = "memoire.rl.example.com"
    assert host in release.kubectl("get", "ingress", "memoire-dashboard", "-o", "jsonpath={.spec.rules[*].host}")
    secret = json.loads(release.kubectl("get", "secret", "my-tokens", "-o", "json"))["data"]["dashboard"]
    token = base64.b64decode(secret).decode()
    url = f"http://{release.service('dashboard')}/api/overview"
    until(lambda: controller.gets(url, token, host) == "200", 60.0, "the policy lets the controller in")
    assert [controller.gets(url, "", host), controller.gets(url, token, "other.example.com")] == ["401", "421"]
    with Visitor(release, "stranger") as stranger:
        assert stranger.gets(url, token, host) == "no connection"
    release.helm("rollback", "memoire", "--wait", "--timeout", "150s")


def test_programs_of_ones_own_run_and_a_learner_that_is_killed_goes_on(page, mine):
    page.next("docker build")
    page.next("helm install mine")
    release, (learner,) = mine, mine.pods("learner")

    def steps_and_samples():
        stats = release.status(learner)["stats"]
        return stats["totals"]["steps"], stats["samples"]

    until(lambda: min(steps_and_samples()) > 5_000, 120.0, "steps that are counted, samples that are drawn")
    for pod in release.pods("actor"):
        status = release.status(pod)
        assert (status["role"], status["ready"]) == ("actor", True), status["reasons"]
        assert "memoire_client_steps_total" in release.page(pod, "/metrics", port=8081)
    before, uid = steps_and_samples()[0], release.kubectl("get", "pod", learner, "-o", "jsonpath={.metadata.uid}")
    release.kill(learner)
    until(lambda: uid not in release.kubectl("get", "pods", "-o", "jsonpath={.items[*].metadata.uid}"), 60.0, "gone")
    release.await_ready(120.0, learner=1)
    assert steps_and_samples()[0] >= before  # the learner's volume keeps counts
    await_more(steps_and_samples)


@pytest.mark.long
def test_servers_come_and_go(page, release):
    page.next("helm upgrade memoire")
    assert release.are_ready("server", 2)
    page.next("kubectl -n rl exec memoire-server-0")
    release.await_ready(server=1)


@pytest.mark.long
def test_a_release_is_backed_up_taken_away_and_restored(page, release):
    known, former = release.accounts(), release.totals()  # accounts of the demo that ran before
    with Visitor(release, "friend", CLIENT, mounts=["my-keys-actor"]) as friend:
        friend.python(RECORD, release.endpoint, "/keys/my-keys-actor")
    before = until(lambda: (now := release.accounts()) != known and now, 30.0, "an account")
    totals = release.totals()
    assert (totals["steps"], totals["episodes"]) == (former["steps"] + 200, former["episodes"] + 1)
    page.next("mkdir -p backup")
    output = page.next("helm uninstall memoire")
    assert "persistentvolumeclaim/state-memoire-server-0" in output and "secret/memoire-tokens" in output
    page.next("kubectl -n rl delete pvc")
    assert not release.kubectl("get", "pvc", "-o", "name") and not release.secrets()
    release.kubectl("delete", "secret", "my-tokens", *(f"my-keys-{role}" for role in ROLES))
    page.next("kubectl create namespace rl")
    release.await_ready(server=2)  # the values name two servers
    assert release.accounts() == before
    now = release.totals()
    assert (now["steps"], now["episodes"]) == (totals["steps"], totals["episodes"])


@pytest.mark.long
def test_no_command_of_the_page_was_left_out(page):
    assert [text for mark, text in page.left if mark != "elsewhere"] == []
