"""`helm install` without any values: a working cluster with keys, tokens and policies; and `make image`, which builds
its images.
"""

import inspect
import json
import os
import re
import subprocess
import sys

import pytest

import image
import memoire
from chartkit import (
    CHART,
    INSECURE,
    ROOT,
    container,
    containers,
    halves,
    kinds,
    notes,
    of,
    pod,
    pods,
    refusal,
    render,
    text,
    told,
)
from memoire.cli import main
from memoire.nodes.roles import schema_of
from memoire.security.roles import ROLES

GIVEN = ("security.keys=mine", "security.tokens=mine-tokens")
HOOK = "pre-install,pre-upgrade,pre-rollback"
KEYS = [f"memoire-keys-{role}" for role in ROLES]


def test_nothing_in_it_is_by_chance_or_looked_up():
    source = "".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").rglob("*.*"))
    assert not re.search(r"\b(rand[A-Z]\w*|genPrivateKey|genCA|uuidv4|now|lookup) ", source.replace("looked", ""))


def test_there_are_a_server_a_proxy_the_dashboard_and_a_demo_that_learns():
    workloads = {name for kind, name in kinds(render()) if kind in ("StatefulSet", "Deployment")}
    assert workloads == {f"memoire-{name}" for name in ("server", "proxy", "dashboard", "learner", "actor")}
    assert of(render(), "Deployment", "memoire-actor")["spec"]["replicas"] == 2
    settings = told()
    assert settings["dashboard"]["expected-actors"] == 2 and "insecure" not in settings
    assert (settings["dashboard"]["expected-servers"], settings["dashboard"]["expected-proxies"]) == (1, 1)
    assert schema_of(json.dumps(settings["server"]["schema"]), None) == schema_of(None, "CartPole-v1")


def test_the_demos_programs_take_what_they_are_given(monkeypatch):
    from memoire.rl.demo import actor, learner

    for name, module, ran in (("learner", learner, "learn"), ("actor", actor, "play")):
        one, taken = container(name), list[inspect.BoundArguments]()
        assert one["image"] == f"memoire-demo:{memoire.__version__}"
        assert one["command"] == ["python3", "-m", module.__name__]
        signature = inspect.signature(getattr(module, ran))

        def run(*args, signature=signature, taken=taken, **more):
            taken.append(signature.bind(*args, **more))
            return 0

        monkeypatch.setattr(module, ran, run)
        assert module.main(one["args"]) == 0
        assert taken[0].arguments["endpoint"] == "$(MEMOIRE_ENDPOINT)" and taken[0].arguments["patience"] == 120.0


@pytest.mark.parametrize(
    "sets",
    [('server.schema={"columns":[["obs","<f4",[4],"state"]],"tuples":[]}',), ("server.env=CartPole-v1",),
     ('server.tables={"a":{"env":"CartPole-v1"}}',), ("demo.enabled=false", "server.env=CartPole-v1")],
    ids=["schema", "env", "tables", "off"],
)  # fmt: skip
def test_the_demo_gives_way_to_the_real_thing(sets):
    objects = render(sets=sets)
    names = {name for kind, name in kinds(objects) if kind in ("StatefulSet", "Deployment")}
    assert names == {"memoire-server", "memoire-proxy", "memoire-dashboard"}
    assert "memoire-demo" not in text(sets=sets) and "samples_per_insert" not in text(sets=sets)
    assert ("Job", "memoire-keys") in kinds(objects)


def test_what_is_said_of_the_demo_holds():
    sets = (
        "demo.actors=5",
        "demo.resources.limits.cpu=2",
        "server.parameters.multi_step=5",
        "server.settings.cache-limit=8",
    )
    assert of(render(sets=sets), "Deployment", "memoire-actor")["spec"]["replicas"] == 5
    assert container("actor", sets=sets)["resources"]["limits"]["cpu"] == 2
    server = told(sets=sets)["server"]
    assert server["set"]["multi_step"] == 5 and server["set"]["cache_size"] == 1024 and server["cache-limit"] == 8
    assert told(sets=sets)["dashboard"]["expected-actors"] == 5


def hooks(objects):
    when = [each["metadata"].get("annotations", {}).get("helm.sh/hook", "") for each in objects]
    return [each for each, hook in zip(objects, when, strict=True) if hook.startswith(HOOK)]


def test_what_an_interrupted_installation_leaves_goes_when_the_release_is_uninstalled():
    """Helm removes the account's objects before it creates them, and again afterwards."""
    when = {each["kind"]: each["metadata"]["annotations"]["helm.sh/hook"] for each in hooks(render())}
    also = [kind for kind, hook in when.items() if "post-delete" in hook.split(",")]
    assert sorted(also) == ["NetworkPolicy", "Role", "RoleBinding", "ServiceAccount"] and when["Job"] == HOOK
    assert of(render(), "Job", "memoire-keys")["spec"]["ttlSecondsAfterFinished"] == 3600


def test_a_secret_of_inference_nodes_has_to_be_there_if_there_are_such_nodes():
    nodes = ("inference.enabled=true", "inference.image.repository=rl/node")
    words = container("check", sets=(*GIVEN, *nodes))["args"]
    assert main.parser().parse_args(words).require == ["inference"]
    assert "--require" not in " ".join(container("check", sets=GIVEN)["args"])


def test_every_pod_has_keys_and_tokens_that_a_hook_makes():
    volumes = [volume for _, spec, _ in pods(render()) for volume in spec["volumes"]]
    mounted = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
    assert mounted == {*KEYS, "memoire-tokens"} - {"memoire-keys-reader", "memoire-keys-inference"}  # without Pods
    assert not [each for each in render() if each["kind"] == "Secret"], "each upgrade would make them again"
    job = of(render(), "Job", "memoire-keys")
    (one,) = job["spec"]["template"]["spec"]["containers"]
    args = main.parser().parse_args(one["args"])
    assert (args.secrets, args.tokens) == ("memoire-keys", "memoire-tokens")
    assert one["image"] == container("server")["image"]
    attempts, deadline = job["spec"]["backoffLimit"] + 1, job["spec"]["activeDeadlineSeconds"]
    assert attempts * args.timeout == 120.0 and deadline == 180  # a job that ends by its deadline leaves no log
    assert "--timeout=10" in container("keys", sets=("security.hooks.timeoutSeconds=30",))["args"]
    other = main.parser().parse_args(container("keys", sets=("fullnameOverride=x",))["args"])
    assert (other.secrets, other.tokens) == ("x-keys", "x-tokens")


def test_the_hook_may_touch_exactly_these_secrets_and_its_rights_end_with_it():
    objects = render()
    role = of(objects, "Role", "memoire-keys")
    secrets = {"apiGroups": [""], "resources": ["secrets"]}
    named = {"resourceNames": ["memoire-tokens", *KEYS], "verbs": ["get", "patch"]}
    assert role["rules"] == [secrets | named, secrets | {"verbs": ["create"]}]
    binding = of(objects, "RoleBinding", "memoire-keys")
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "memoire-keys"}
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "memoire-keys", "namespace": "rl"}]
    pairs = {(each["kind"], each["metadata"]["name"]) for each in hooks(objects)} - {("Job", "memoire-drain")}
    names = ("ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "Job")
    assert pairs == {(kind, "memoire-keys") for kind in names}
    weights = {each["kind"]: int(each["metadata"]["annotations"]["helm.sh/hook-weight"]) for each in hooks(objects)}
    assert weights["ServiceAccount"] == weights["Role"] == weights["NetworkPolicy"] < weights["RoleBinding"]
    assert weights["RoleBinding"] < weights["Job"]
    drain = of(objects, "Job", "memoire-drain")["metadata"]["annotations"]
    assert weights["Job"] < int(drain.get("helm.sh/hook-weight", 0)), "a drain needs keys"
    for each in hooks(objects):
        policies = set(each["metadata"]["annotations"]["helm.sh/hook-delete-policy"].split(","))
        gone = {"before-hook-creation", "hook-succeeded"}
        failed = {"hook-failed"} if each["kind"] != "Job" else set()  # a Job's log stays
        assert policies == gone | failed, each["kind"]
    assert not [each for each in objects if each["kind"] in ("ClusterRole", "ClusterRoleBinding")]


def test_only_the_hook_has_a_token_of_the_api_server_and_it_lasts_ten_minutes():
    for name, spec, _ in pods(render()):
        assert spec["automountServiceAccountToken"] is False
        tokens = [
            source["serviceAccountToken"] for volume in spec["volumes"]
            for source in volume.get("projected", {}).get("sources", ()) if "serviceAccountToken" in source
        ]  # fmt: skip
        assert tokens == ([{"path": "token", "expirationSeconds": 600}] if name == "Job/memoire-keys" else []), name
    (mount,) = [one for one in container("keys")["volumeMounts"] if one["name"] == "account"]
    assert mount == {"name": "account", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True}
    (account,) = [one for one in pod("Job", "keys")["volumes"] if one["name"] == "account"]
    paths = [
        path["path"] for source in account["projected"]["sources"]
        for projection in source.values() for path in projection.get("items", [projection])
    ]  # fmt: skip
    assert paths == ["token", "ca.crt", "namespace"]


def test_keys_and_tokens_that_are_given_are_taken_and_nothing_is_made():
    objects = render(sets=GIVEN)
    assert not {kind for kind, _ in kinds(objects)} & {"Role", "RoleBinding"}
    assert not [each for each in hooks(objects) if each["metadata"]["name"].endswith("-keys")]
    assert "memoire-keys" not in text(sets=GIVEN) and "serviceAccountToken" not in text(sets=GIVEN)
    assert "secretName: mine-server" in text(sets=GIVEN) and "secretName: mine-tokens" in text(sets=GIVEN)


def test_of_two_only_the_one_that_is_missing_is_made():
    def asked(*sets):
        args = main.parser().parse_args(container("keys", sets=sets)["args"])
        (rule, _) = of(render(sets=sets), "Role")["rules"]
        return args.secrets, args.tokens, rule["resourceNames"]

    assert asked("security.keys=mine") == ("", "memoire-tokens", ["memoire-tokens"])
    assert asked("security.tokens=mine") == ("memoire-keys", "", KEYS)


def test_secrets_that_are_given_are_looked_at_before_anything_is_installed():
    job = of(render(sets=GIVEN), "Job", "memoire-check")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == HOOK and job["spec"]["backoffLimit"] == 0
    spec = job["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "default"  # the release's own account does not exist yet
    (one,) = spec["containers"]
    args = main.parser().parse_args(one["args"])
    assert (args.secrets, args.tokens, str(args.folder)) == ("mine", "mine-tokens", "/etc/memoire/given")
    (sources,) = [volume["projected"]["sources"] for volume in spec["volumes"] if "projected" in volume]
    assert all(source["secret"]["optional"] for source in sources), "a Pod that waits for a Secret says nothing"
    secrets = [source["secret"] for source in sources]
    seen = {(each["name"], item["key"], item["path"]) for each in secrets for item in each["items"]}
    tokens = {("mine-tokens", name, f"tokens/{name}") for name in ("dashboard", "nodes")}
    assert seen == {(f"mine-{role}", "own.pub", f"{role}/own.pub") for role in ROLES} | tokens  # secret keys stay out
    own = (*GIVEN, "serviceAccount.create=false", "serviceAccount.name=ours")
    assert pod("Job", "check", sets=own)["serviceAccountName"] == "ours"
    for sets in ((*GIVEN, "security.hooks.check=false"), ()):
        assert ("Job", "memoire-check") not in kinds(render(sets=sets))


def test_policies_are_in_place_and_let_through_what_the_cluster_and_the_hook_need():
    objects = render()
    labels = {each["app.kubernetes.io/component"]: each for _, _, each in pods(objects)}
    assert set(halves(objects)) == {*labels, "test"}
    assert halves(objects)["keys"] == (set(), {"anybody TCP/any"})  # the API server's address differs between clusters
    sends = {name: {peer.partition(" ")[0] for peer in leaves} for name, (_, leaves) in halves(objects).items()}
    assert sends["learner"] == sends["actor"] == {"proxy", "anybody"}  # "anybody" only for DNS
    assert "server TCP/5560" in halves(objects)["proxy"][1] and "proxy TCP/5560" in halves(objects)["server"][0]
    off = kinds(render(sets=("networkPolicy.enabled=false",)))
    assert not [name for kind, name in off if kind == "NetworkPolicy"]


def resources(name, *sets):
    return container(name, sets=(*INSECURE, *sets)).get("resources")


@pytest.mark.parametrize("name", ["server", "proxy", "dashboard"])
def test_requests_alone_keep_the_limits_and_requests_that_follow(name):
    computed = resources(name)
    assert computed["limits"]["memory"] and computed["requests"]["memory"] and computed["requests"]["cpu"]
    mine = resources(name, f"{name}.resources.requests.cpu=2")
    assert mine == {"requests": {**computed["requests"], "cpu": 2}, "limits": computed["limits"]}
    both = resources(name, f'{name}.resources={{"requests":{{"cpu":"1"}},"limits":{{"memory":"8Gi"}}}}')
    assert both == {"requests": {"cpu": "1"}, "limits": {"memory": "8Gi"}}
    none = resources(name, f'{name}.resources={{"requests":{{"cpu":"1"}},"limits":{{}}}}')
    assert none == {"requests": {"cpu": "1"}, "limits": {}}
    assert resources(name, f"{name}.resources={{}}") is None


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ("server.resources.requests.memory=4Gi", "server.resources: the limit of memory is 2688Mi, below the request of 4Gi"),
        ('proxy.resources={"requests":{"cpu":"1500m"},"limits":{"cpu":1}}', "proxy.resources: the limit of cpu is 1, below"),
        ('dashboard.resources={"requests":{"memory":"2Gi"},"limits":{"memory":"2G"}}', "limits.memory to at least 2Gi"),
        ('learner.resources={"requests":{"cpu":2},"limits":{"cpu":"1999m"}}', "learner.resources: the limit of cpu"),
        ('actors.resources={"requests":{"memory":"1Gi"},"limits":{"memory":1000}}', "actors.resources: the limit of memory"),
        ('actors.relay.resources={"requests":{"cpu":1},"limits":{"cpu":"10m"}}', "actors.relay.resources: the limit"),
        ("demo.resources.requests.memory=1Gi", "demo.resources: the limit of memory is 512Mi, below the request of 1Gi"),
        ("test.resources.limits.cpu=1m", "test.resources: the limit of cpu is 1m, below the request of 50m"),
        ("server.drain.resources.limits.cpu=1m", "server.drain.resources: the limit"),
        ("security.hooks.resources.limits.memory=1Mi", "security.hooks.resources: the limit of memory"),
    ],
)  # fmt: skip
def test_a_limit_below_its_request_is_refused_before_anything_is_installed(sets, words):
    assert words in refusal(sets)


def test_the_notes_begin_with_the_three_lines_that_open_the_dashboard(tmp_path):
    lines = notes(tmp_path).splitlines()
    assert lines[:3] == [
        "kubectl -n rl port-forward service/memoire-dashboard 8265:80",
        "http://localhost:8265",
        "kubectl -n rl get secret memoire-tokens -o jsonpath='{.data.dashboard}' | base64 -d",
    ]
    assert of(render(), "Service", "memoire-dashboard")["spec"]["ports"][0]["port"] == 80
    open_ = notes(tmp_path, *INSECURE).splitlines()
    assert open_[:2] == lines[:2] and open_[2] == ""
    assert notes(tmp_path, *GIVEN).splitlines()[2].split()[5] == "mine-tokens"
    assert notes(tmp_path, "dashboard.enabled=false").splitlines()[0].startswith("memoire ")


def of_the_page(title, tmp_path):
    """Write the values in docs/kubernetes.md under this title to a file, and return its path."""
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (values,) = re.findall(rf"(?ms)^```yaml {title}\n(.*?)^```$", page)
    file = tmp_path / "values.yaml"
    file.write_text(values, encoding="utf-8")
    return file


@pytest.mark.parametrize("title", ["ingress with a token of yours", "ingress behind an oidc proxy"])
def test_the_dashboard_is_shown_to_the_outside_with_a_token_that_exists(title, tmp_path):
    values = of_the_page(title, tmp_path)
    objects = render(values=values)
    ingress = of(objects, "Ingress", "memoire-dashboard")
    assert ingress["spec"]["ingressClassName"] == "nginx"
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == ["memoire.rl.example.com"]
    assert ingress["spec"]["tls"] == [{"hosts": ["memoire.rl.example.com"], "secretName": "rl-tls"}]
    volumes = pod("Deployment", "dashboard", values=values)["volumes"]
    assert [each["secret"]["secretName"] for each in volumes if "secret" in each] == ["my-tokens"]
    assert not any(word.startswith("--tokens") for word in container("keys", values=values)["args"])
    board = told(values=values)["dashboard"]
    assert "memoire.rl.example.com" in board["allow-host"] and board["token-file"] == "/etc/memoire/tokens/dashboard"


def test_behind_an_oidc_proxy_its_answer_brings_the_token_and_nobody_else_gets_to_the_dashboard(tmp_path):
    objects = render(values=of_the_page("ingress behind an oidc proxy", tmp_path))
    annotations = of(objects, "Ingress", "memoire-dashboard")["metadata"]["annotations"]
    of_nginx = {name.partition("/")[2]: value for name, value in annotations.items()}
    assert of_nginx["auth-response-headers"] == "Authorization"
    assert of_nginx["auth-url"].endswith("/oauth2/auth") and "/oauth2/start?rd=" in of_nginx["auth-signin"]
    rules = of(objects, "NetworkPolicy", "memoire-dashboard")["spec"]["ingress"]
    (look,) = [rule for rule in rules if any(port["port"] == 8265 for port in rule["ports"])]
    assert look["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}]


def mebibytes(text):
    return float(text.removesuffix("Gi")) * 1024 if text.endswith("Gi") else float(text.removesuffix("Mi"))


def test_the_example_of_a_large_cluster_takes_what_it_says():
    file = ROOT / "deploy" / "examples" / "cpu-cluster.yaml"
    comment = re.sub(r"\s*\n#\s*", " ", file.read_text(encoding="utf-8").partition("\nimage:")[0])
    server, claims = container("server", values=file), render(values=file)
    asked, most = (mebibytes(server["resources"][each]["memory"]) / 1024 for each in ("requests", "limits"))
    assert "three nodes with the label node.kubernetes.io/pool=memory" in comment and 16 < asked <= 17 < most <= 18
    assert "17 GiB of memory to request, up to 18 GiB to use, and a quarter of a core" in comment
    assert server["resources"]["requests"]["cpu"] == "250m"
    asked = [container(name, values=file)["resources"]["requests"] for name in ("proxy", "proxy", "dashboard")]
    assert sum(int(one["cpu"].removesuffix("m")) for one in asked) == 500
    assert 0.65 < sum(mebibytes(one["memory"]) for one in asked) / 1024 <= 0.7
    assert "Three volumes of 50 GiB and one of 1 GiB" in comment
    (claim,) = of(claims, "StatefulSet", "memoire-server")["spec"]["volumeClaimTemplates"]
    for each, size in ((claim, "50Gi"), (of(claims, "PersistentVolumeClaim", "memoire-dashboard"), "1Gi")):
        assert each["spec"]["resources"]["requests"]["storage"] == size


@pytest.fixture
def engine(tmp_path):
    """`make image` with a docker that records its arguments, and fails for the images in $FAILS."""
    (tmp_path / "docker").write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"open({str(tmp_path / 'asked')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "sys.exit(3 if os.environ.get('FAILS', 'none') in ' '.join(sys.argv) else 0)\n"
    )
    (tmp_path / "docker").chmod(0o755)

    def make(*words, **environment):
        path = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.run(
            ["make", "--no-print-directory", "image", f"PYTHON={sys.executable}", *words], cwd=ROOT, capture_output=True,
            text=True, timeout=60, env=os.environ | {"PATH": path} | environment,
        )  # fmt: skip

    return make, tmp_path / "asked"


def test_make_image_builds_what_the_chart_asks_for_and_says_how_a_cluster_gets_it(engine):
    make, asked = engine
    done = make()
    assert done.returncode == 0, done.stderr
    wanted = {one["image"] for _, spec, _ in pods(render()) for one in containers(spec)}
    lines = asked.read_text().splitlines()
    assert {line.split()[2] for line in lines} == wanted == {f"{name}:{image.version()}" for name in image.STAGES}
    assert [("--target demo" in line) for line in lines] == [False, True]
    names = " ".join(sorted(wanted, key=len))
    for words in (f"kind load docker-image {names}", "minikube image load", "k3s ctr images import", "--set image.registry=",
                  "helm install memoire deploy/helm/memoire --namespace rl --create-namespace"):  # fmt: skip
        assert words in done.stdout, words


def test_pages_name_the_images_that_make_image_builds():
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    images = set(re.findall(r"\bmemoire-demo:\S+", page))
    assert images == {f"memoire-demo:{image.version()}"}


def test_make_image_says_what_could_not_be_built(engine):
    make, _ = engine
    done = make(FAILS="memoire-demo")
    assert done.returncode != 0 and "could not build memoire-demo:" in done.stderr and "kind load" not in done.stdout
    missing = make("ENGINE=no-such-engine")
    assert missing.returncode != 0 and "no-such-engine is not on PATH" in missing.stderr
