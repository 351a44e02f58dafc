"""The rendered Helm chart: every set of values gives valid, restricted and repeatable objects with these values."""

import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest
import yaml

import memoire
from chartkit import (
    CASES,
    CHART,
    INSECURE,
    ROOT,
    container,
    containers,
    halves,
    helms,
    kinds,
    notes,
    of,
    pod,
    pods,
    refusal,
    render,
    run,
    text,
    told,
    variables,
)
from memoire.cli import main
from memoire.nodes import settings
from memoire.nodes.roles import read_table, read_tables, schema_of
from memoire.rl.collector import inference_address

FULL, EMBEDDED, NO_RELAY, AUTOSCALING, KEDA, OPENSHIFT, OUTSIDE, DIAGNOSTIC = (
    CHART / "ci" / f"{name}-values.yaml"
    for name in ("full", "embedded", "no-relay", "autoscaling", "keda", "openshift", "outside", "diagnostic")
)
every_case = pytest.mark.parametrize(
    "values", CASES, ids=lambda path: path.stem.removesuffix("-values") if path else "nothing"
)
every_helm = pytest.mark.parametrize("helm", helms(), ids=lambda path: Path(path).name if path else "none")
VERSIONS = ("1.29.0", "1.33.0", "1.37.0")
"""Versions of Kubernetes: the oldest that the chart supports, the newest with known schemas, and one in between."""


@every_helm
@every_case
def test_every_helm_takes_the_chart_and_renders_the_same_each_time(helm, values):
    args = ["--values", values] if values else []
    code, out, err = run(helm, "lint", "--strict", "--kube-version", "1.34.0", *args, CHART)
    assert code == 0 and "[" not in out, out + err
    first = text(helm=helm, values=values)
    assert first == text.__wrapped__(helm=helm, values=values)  # passwords are not random, and maps have an order
    assert render(helm=helm, values=values) == render(values=values)


@pytest.mark.parametrize("kubernetes", VERSIONS)
def test_every_object_is_valid_for_several_versions_of_kubernetes(kubernetes):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    unknown = set()
    objects = [json.dumps(each) for values in CASES for each in render(values=values, kubernetes=kubernetes)]
    for each in map(json.loads, dict.fromkeys(objects)):  # many objects are in several cases
        try:
            kubernetes_validate.validate(each, kubernetes, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            unknown.add(each["kind"])
    assert unknown == {"PodMonitor", "PrometheusRule", "HTTPRoute", "ScaledObject"}  # kinds of other projects' objects


@every_case
def test_pods_are_restricted_as_pod_security_asks(values):
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}  # the standard allows more
    for name, spec, _ in pods(render(values=values)):
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert all(set(volume) - {"name"} <= allowed for volume in spec.get("volumes", ())), name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert "runAsUser" not in spec["securityContext"], name  # platforms assign users
        for one in containers(spec):
            security = one["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and security["capabilities"] == {"drop": ["ALL"]}, name
            assert "privileged" not in security and "runAsUser" not in security, name
            assert security["readOnlyRootFilesystem"] is (one["name"] not in ("actor", "learner", "inference")), name
            assert not any("hostPort" in port for port in one.get("ports", ())), name


@every_case
def test_a_pod_has_every_name_once(values):
    objects = render(values=values)
    claims = {f"{each['kind']}/{each['metadata']['name']}": each["spec"].get("volumeClaimTemplates", ())
              for each in objects if "spec" in each}  # fmt: skip
    for name, spec, _ in pods(objects):
        ports = [port for container in containers(spec) for port in container.get("ports", ())]
        lists = [
            [container["name"] for container in containers(spec)],
            [volume["name"] for volume in spec.get("volumes", ())],
            [port["name"] for port in ports],
            [port["containerPort"] for port in ports],
            *([one["name"] for one in container.get("env", ())] for container in containers(spec)),
            *([one["mountPath"] for one in container["volumeMounts"]] for container in containers(spec)),
        ]
        for names in lists:
            assert len(set(names)) == len(names), (name, names)
        volumes = {volume["name"] for volume in spec["volumes"]} | {claim["metadata"]["name"] for claim in claims[name]}
        for one in containers(spec):
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes, name


@every_case
def test_services_monitors_and_budgets_select_pods_that_there_are(values):
    objects = render(values=values)
    pairs = [(labels, {port["name"] for one in containers(spec) for port in one.get("ports", ())})
             for _, spec, labels in pods(objects)]  # fmt: skip
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            sets = [ports for labels, ports in pairs if spec["selector"].items() <= labels.items()]
            assert sets and all({port["targetPort"] for port in spec.get("ports", ())} <= ports for ports in sets)
        elif each["kind"] in ("PodDisruptionBudget", "StatefulSet", "Deployment"):
            selected = spec["selector"]["matchLabels"].items()
            assert any(selected <= labels.items() for labels, _ in pairs), each["metadata"]
        elif each["kind"] == "PodMonitor":
            ports, selected = spec["podMetricsEndpoints"], spec["selector"]["matchLabels"].items()
            assert any({one["port"] for one in ports} <= had for labels, had in pairs if selected <= labels.items())


@every_case
def test_every_role_reads_its_settings(values, tmp_path):
    (file,) = [each["data"]["memoire.json"] for each in render(values=values) if "memoire.json" in each.get("data", {})]
    written, path = json.loads(file), tmp_path / "memoire.json"
    path.write_text(file, encoding="utf-8")
    roles = {one["name"] for _, spec, _ in pods(render(values=values)) for one in containers(spec)} & set(
        settings.COMMANDS
    )
    for role in roles:
        args = settings.parse(*main.parsers(), [role], {"MEMOIRE_SETTINGS": str(path)})
        assert args.probes == "*:8081", role
        if role == "server":  # the server can parse its tables
            if args.tables:
                read_tables(args.tables)
            else:
                room = {"storage": args.storage, "on_full": args.on_full, "capacity": args.capacity}
                schema = schema_of(args.schema, args.env, args.storage)
                table = memoire.Table(schema, **read_table(args.set, args.storage), **room)
                assert (table.storage, table.on_full) == (args.storage, args.on_full or "block")
    assert roles == written.keys() & set(settings.COMMANDS)  # every section has a role


def test_the_charts_version_is_told_of():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    headings = re.findall(r"(?m)^## (.*)", (CHART / "UPGRADING.md").read_text(encoding="utf-8"))
    assert re.fullmatch(r"\d+\.\d+\.\d+", chart["version"]) and chart["version"].rpartition(".")[0] == headings[0]


@every_helm
def test_an_upgrade_that_takes_a_former_versions_defaults_along_is_told_what_they_lack(helm, tmp_path):
    other = tmp_path / "memoire"
    shutil.copytree(CHART, other)
    former = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    del former["proxy"]["autoscaling"], former["image"]["pullPolicy"]
    (other / "values.yaml").write_text(yaml.safe_dump(former), encoding="utf-8")  # values as with --reuse-values
    code, _, err = run(helm, "template", "demo", other, "--values", FULL)
    says = "missing prop" in err or "is required" in err  # depends on the version of Helm
    assert code != 0 and says and "pullPolicy" in err and "autoscaling" in err, err


def test_what_cannot_be_changed_is_the_same_in_the_next_version(tmp_path):
    other = tmp_path / "memoire"
    shutil.copytree(CHART, other)
    source = (other / "Chart.yaml").read_text(encoding="utf-8")
    (other / "Chart.yaml").write_text(re.sub(r"(?m)^(version|appVersion): .*", r"\1: 99.9.9", source), encoding="utf-8")
    for values in (FULL, EMBEDDED):
        before = {(each["kind"], each["metadata"]["name"]): each for each in render(values=values)}
        after = {(each["kind"], each["metadata"]["name"]): each for each in render(values=values, chart=other)}
        for key, each in before.items():
            fixed = ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates")
            if each["kind"] in ("StatefulSet", "Deployment"):
                now = after[key]["spec"]
                assert [each["spec"].get(name) for name in fixed] == [now.get(name) for name in fixed], key
                own = [one["image"] for one in containers(each["spec"]["template"]["spec"])]
                if own == [one["image"] for one in containers(now["template"]["spec"])]:
                    assert each["spec"]["template"] == now["template"]  # a Pod is not replaced for a label
        assert {key for key in before if key[0] != "Job"} == {key for key in after if key[0] != "Job"}


def test_another_program_is_another_job_and_more_of_it_are_not():
    def name(*sets):
        jobs = {name for kind, name in kinds(render(values=EMBEDDED, sets=sets)) if kind == "Job"} - {"memoire-check"}
        return jobs.pop()

    assert name("actors.image.tag=2") != name() == name("actors.replicas=40")


def test_autoscaled_proxies_keep_their_number_at_an_upgrade():
    assert "replicas" not in of(render(values=AUTOSCALING), "Deployment", "memoire-proxy")["spec"]
    scaler = of(render(values=AUTOSCALING), "HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "memoire-proxy"}
    assert (scaler["minReplicas"], scaler["maxReplicas"], len(scaler["metrics"])) == (2, 8, 2)
    assert container("proxy", values=AUTOSCALING)["resources"]["requests"]["cpu"]  # the target is a share of this


def test_keda_scales_proxies_in_place_of_an_autoscaler_and_has_something_to_fall_back_to():
    objects = render(values=KEDA)
    assert "replicas" not in of(objects, "Deployment", "memoire-proxy")["spec"]
    assert not [each for each in objects if each["kind"] == "HorizontalPodAutoscaler"]  # KEDA creates an autoscaler
    scaled = of(objects, "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"] == {"name": "memoire-proxy"}
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (2, 8)
    assert scaled["fallback"] == {"failureThreshold": 3, "replicas": 4}
    assert [each["type"] for each in scaled["triggers"]] == ["cpu", "prometheus"]
    assert all(isinstance(text, str) for each in scaled["triggers"] for text in each["metadata"].values())
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == {"scaleDown": {"stabilizationWindowSeconds": 300}}
    least = render(values=KEDA, sets=("proxy.autoscaling.keda.fallback.replicas=null",))
    assert of(least, "ScaledObject")["spec"]["fallback"]["replicas"] == 8  # the larger number of replicas is safer
    query = scaled["triggers"][1]["metadata"]["query"]
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"memoire_\w+", query)) <= set(re.findall(r"memoire_\w+", page))


def test_a_budget_never_keeps_a_node_from_being_drained():
    assert not [each for each in render(sets=INSECURE) if each["kind"] == "PodDisruptionBudget"]
    budgets = [each for each in render(values=FULL) if each["kind"] == "PodDisruptionBudget"]
    assert {each["metadata"]["name"] for each in budgets} == {"memoire-server", "memoire-proxy"}
    assert all(each["spec"]["maxUnavailable"] == 1 and "minAvailable" not in each["spec"] for each in budgets)


def test_pods_begin_anew_when_their_settings_change_and_only_then():
    def checksums(*sets):
        workloads = [each for each in render(sets=(*INSECURE, *sets)) if "template" in each.get("spec", {})]
        return {each["metadata"]["name"]: each["spec"]["template"]["metadata"].get("annotations") for each in workloads}

    plain, more, other = checksums(), checksums("server.replicas=3"), checksums("server.parameters.multi_step=3")
    changed = {name for name in plain if plain[name] != more[name]}
    assert changed == {"memoire-dashboard"}  # only the dashboard's settings have the number of servers
    assert {name for name in plain if plain[name] != other[name]} == {"memoire-server"}


SCALED = [*INSECURE, "proxy.autoscaling.enabled=true", "proxy.autoscaling.keda.enabled=true"]


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ([*INSECURE, "dashboard.ingress.enabled=true"], "open to the outside"),
        ([*INSECURE, "proxy.service.type=LoadBalancer"], "open to the outside"),
        ([*INSECURE, "security.keys=keys"], "leave out the one"),
        (["security.insecure=true", "demo.enabled=false"], "server.schema"),
        ([*INSECURE, 'server.tables={"a":{}}'], "set one of server.schema"),
        ([*INSECURE, "learner.embedsServer=true"], "server.enabled=false"),
        ([*INSECURE, "server.enabled=false"], "there is no server"),
        ([*INSECURE, "server.snapshots.atEnd=true"], "server.persistence.enabled=true"),
        ([*INSECURE, "server.heldBytes=4Gi", "server.resources.limits.memory=2Gi"], "needs at least 4352Mi"),
        ([*INSECURE, "server.settings.byte-limit=4Gi"], "server.settings.byte-limit is set by server.heldBytes"),
        (
            [*INSECURE, 'server.tables={"a":{"env":"E","byte_limit":"800MiB"},"b":{"env":"E","byte_limit":800000000}}'],
            "total byte_limit of 1638860800 bytes, above server.heldBytes=1Gi",
        ),
        ([*INSECURE, "server.heldBytes=4Gi", "server.resources.limits.memory=lots"], '"lots" is no size'),
        ([*INSECURE, "proxy.autoscaling.enabled=true", "proxy.autoscaling.maxReplicas=1"], "above maxReplicas"),
        ([*INSECURE, "proxy.autoscaling.enabled=true", 'proxy.resources={"limits":{"memory":"2Gi"}}'], "requests.cpu"),
        ([*INSECURE, "proxy.autoscaling.keda.enabled=true"], "proxy.autoscaling.enabled=true"),
        ([*SCALED, "proxy.autoscaling.targetCPU=0"], "neither targetCPU nor keda.triggers"),
        (
            [*SCALED, 'proxy.autoscaling.metrics=[{"type":"Pods"}]'],
            "write the metrics as proxy.autoscaling.keda.triggers",
        ),
        ([*INSECURE, "server.tables.a.env=CartPole-v1", "server.onFull=drop_oldest"], "set on_full of the tables"),
        ([*INSECURE, "actors.enabled=true"], "actors.image.repository"),
        ([*INSECURE, "actors.enabled=true", "actors.image.repository=a", "actors.pages=true"], "relay.enabled"),
        ([*INSECURE, "learner.enabled=true"], "learner.image.repository"),
    ],
)
def test_values_that_cannot_be_are_refused_with_what_to_write_instead(sets, words):
    assert words in refusal(*sets)


@pytest.mark.parametrize(
    "sets",
    ["sever.replicas=2", "server.replica=2", "server.replicas=0", "server.replicas=two", "image.pullPolicy=Sometimes",
     "actors.kind=DaemonSet", "dashboard.ingress.host=a", "server.heldBytes=1GB", "server.persistence.whenDeleted=Keep"],
)  # fmt: skip
def test_a_value_that_is_misspelt_or_of_another_kind_is_refused(sets):
    name = sets.partition("=")[0].rpartition(".")[2]
    assert re.search(rf"{name}|{sets.partition('.')[0]}", refusal(*INSECURE, sets))


def test_the_schema_is_one_and_explains_every_value():
    jsonschema = pytest.importorskip("jsonschema", reason="kubernetes-validate is not installed")
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    sections = [("", schema)]
    for prefix, section in sections:
        assert section["additionalProperties"] is False, prefix
        for name, value in section["properties"].items():
            assert value.get("description", "").endswith(tuple(".)")), prefix + name
            if "properties" in value:
                sections.append((f"{prefix}{name}.", value))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(values)


def test_it_may_be_part_of_another_chart(tmp_path):
    parent = tmp_path / "parent"
    (parent / "charts").mkdir(parents=True)
    (parent / "templates").mkdir()
    shutil.copytree(CHART, parent / "charts" / "memoire")
    dependency = {"name": "memoire", "version": "*", "condition": "memoire.enabled"}
    about = {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": [dependency]}
    (parent / "Chart.yaml").write_text(json.dumps(about))
    mine = {"enabled": True, "security": {"insecure": True}, "server": {"env": "CartPole-v1"}}
    values = {"global": {"imageRegistry": "registry.example.com", "other": 1}, "memoire": mine}
    (parent / "values.yaml").write_text(json.dumps(values))
    for helm in helms():
        names = {one["image"] for _, spec, _ in pods(render(helm=helm, chart=parent)) for one in containers(spec)}
        assert len(names) == 1 and names.pop().startswith("registry.example.com/memoire:")
        assert not render(helm=helm, chart=parent, sets=("memoire.enabled=false",))


def test_names_fit_however_long_the_release_is_called():
    for each in render(values=FULL, release="a" * 53):
        name = each["metadata"]["name"]
        # A StatefulSet's Pods have a label with its name and eleven letters more; names of Services are DNS labels.
        assert len(name) <= (52 if each["kind"] in ("StatefulSet", "Job") else 63), name


KEPT, LONGER = "server.persistence.enabled=true", "server.terminationGracePeriodSeconds=300"
SCALED_NODES = ("inference.autoscaling.enabled=true", "inference.resources.requests.cpu=1")
NODES = ("inference.enabled=true", "inference.image.repository=rl/node")


@pytest.mark.parametrize(
    ("sets", "role", "name", "value"),
    [
        (("server.heldBytes=1Gi",), "server", "byte-limit", 1 << 30),
        (("server.heldBytes=1.5Gi",), "server", "byte-limit", 3 << 29),
        (("server.heldBytes=2G",), "server", "byte-limit", 2 * 10**9),
        (("server.heldBytes=300000000",), "server", "byte-limit", 3 * 10**8),
        ((), "server", "io-threads", None),
        (("server.ioThreads=2",), "server", "io-threads", 2),
        (("proxy.ioThreads=4",), "proxy", "io-threads", 4),
        ((KEPT,), "server", "close-timeout", None),
        ((KEPT, "server.snapshots.atEnd=true"), "server", "close-timeout", 23),  # saving may take a Pod's grace period
        ((KEPT, "server.snapshots.atEnd=true", LONGER), "server", "close-timeout", 293),
        (("server.replicas=3",), "dashboard", "expected-servers", 3),
        (("dashboard.expectedServers=7",), "dashboard", "expected-servers", 7),
        (("proxy.replicas=2",), "dashboard", "expected-proxies", 2),
        (("proxy.autoscaling.enabled=true", "proxy.autoscaling.minReplicas=4"), "dashboard", "expected-proxies", 4),
        (("dashboard.expectedProxies=0",), "dashboard", "expected-proxies", None),
        (NODES, "dashboard", "expected-inference", 1),
        ((*NODES, "inference.replicas=3"), "dashboard", "expected-inference", 3),
        ((*NODES, "inference.pages=false"), "dashboard", "expected-inference", None),
        ((*NODES, "dashboard.expectedInference=0"), "dashboard", "expected-inference", None),
        ((*NODES, *SCALED_NODES), "dashboard", "expected-inference", 2),
    ],
)
def test_a_value_becomes_a_setting_of_nodes(sets, role, name, value):
    assert told(sets=(*INSECURE, *sets))[role].get(name) == value


def test_memory_follows_from_what_a_server_holds():
    def memory(*sets):
        return container("server", sets=(*INSECURE, *sets)).get("resources")

    small, large = memory(), memory("server.heldBytes=5Gi")
    for side in ("requests", "limits"):
        grown = int(large[side]["memory"].removesuffix("Mi")) - int(small[side]["memory"].removesuffix("Mi"))
        assert grown == 4096
    assert int(small["requests"]["memory"].removesuffix("Mi")) > 1024 and "cpu" not in small["limits"]
    assert memory("server.resources={}") is None


def test_a_package_of_it_has_what_it_needs_and_nothing_for_developers(tmp_path):
    for helm in helms():
        code, out, err = run(helm, "package", CHART, "--destination", tmp_path)
        assert code == 0, out + err
        (package,) = tmp_path.glob("memoire-*.tgz")
        with tarfile.open(package) as files:
            names = {name.partition("/")[2] for name in files.getnames()}
        assert {"Chart.yaml", "values.yaml", "values.schema.json", "README.md", "templates/NOTES.txt"} <= names
        assert {f"files/{each.name}" for each in (CHART / "files").iterdir()} <= names
        assert not any(name.startswith("ci/") or name == "values.schema.yaml" for name in names)
        package.unlink()


def test_every_pod_has_its_own_role_s_keys_and_the_tokens_that_it_needs():
    roles = {"memoire-server": "server", "memoire-proxy": "proxy", "memoire-learner": "learner", "memoire-actor": "actor",
             "memoire-dashboard": None, "memoire-roundtrip": "learner", "memoire-drain": "learner", "memoire-check": None}  # fmt: skip
    for name, spec, _ in pods(render(values=FULL)):
        secrets = {volume["name"]: volume["secret"] for volume in spec["volumes"] if "secret" in volume}
        role = roles[name.partition("/")[2]]
        assert secrets.get("keys", {}).get("secretName") == (role and f"memoire-keys-{role}"), name
        assert all(secret["defaultMode"] == 0o440 for secret in secrets.values())
        tokens = {item["key"] for item in secrets["tokens"]["items"]} if "tokens" in secrets else set()
        board, no_pages = name.endswith("dashboard"), name.endswith(("roundtrip", "drain", "check"))
        assert tokens == ({"dashboard", "nodes"} if board else set() if no_pages else {"nodes"}), name
        for one in containers(spec):
            mounted = {mount["name"] for mount in one["volumeMounts"] if mount.get("readOnly")}
            assert ("keys" in mounted) == (role is not None), name
            has_pages = one["name"] not in ("actor", "doctor", "ask", "drain", "check")
            assert ("tokens" in mounted) == has_pages, name
    assert "memoire-keys-server" in text(values=EMBEDDED)  # a learner with an embedded server has the server's keys


def test_a_group_is_set_only_where_files_need_one_and_may_be_left_out():
    def groups(**how):
        return {spec["securityContext"].get("fsGroup") for _, spec, _ in pods(render(**how))}

    assert groups(sets=INSECURE) == {None}
    assert groups(values=FULL) == {None, 10001}
    assert groups(values=OPENSHIFT) == {None}


def test_a_learner_may_be_the_server():
    objects = render(values=EMBEDDED)
    assert ("StatefulSet", "memoire-server") not in kinds(objects)
    (server,) = of(objects, "ConfigMap", "memoire")["data"]["servers.txt"].splitlines()
    assert server == "tcp://memoire-learner-0.memoire-learner.rl.svc:5560"
    learner = container("learner", values=EMBEDDED)
    env = variables(learner)
    assert env["MEMOIRE_LISTEN"] == "tcp://*:5560" and env["MEMOIRE_STATE_DIR"] == "/var/lib/memoire/state"
    names = {"requests", "caches", "notices", "inference", "http", "probes"}
    assert {port["name"] for port in learner["ports"]} == names
    assert learner["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "probes"}


def test_the_page_s_learner_is_a_server_under_the_variables_that_it_is_given(monkeypatch, tmp_path):
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    here = {"MEMOIRE_LISTEN": "tcp://127.0.0.1:0", "MEMOIRE_HTTP": "127.0.0.1:0", "MEMOIRE_PROBES": "127.0.0.1:0",
            "MEMOIRE_NAME": "memoire-learner-0", "MEMOIRE_STATE_DIR": str(tmp_path / "state"),
            "MEMOIRE_HTTP_TOKEN_FILE": str(tmp_path / "token")}  # fmt: skip
    assert here.keys() | {"MEMOIRE_ENDPOINT", "MEMOIRE_KEYS"} == variables(container("learner", values=EMBEDDED)).keys()
    (tmp_path / "token").write_text("0123456789abcdef\n", encoding="ascii")
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    served = []
    monkeypatch.setattr(memoire.Server, "batches", lambda server, _size: served.append(server.name) or [])
    exec(code, {"schema": schema_of(None, "CartPole-v1")})
    assert served == ["memoire-learner-0"] and (tmp_path / "state" / "state.db").exists()


def asks(path, every, timeout=5, **more):
    return {"httpGet": {"path": path, "port": 8081}, "periodSeconds": every, "timeoutSeconds": timeout} | more


def documented(name):
    """Return a probe as docs/operations.md describes it for Pods without the chart."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    return yaml.safe_load(re.search(rf"(?m)^ +{name}: +(.*)", page)[1])


def probed(container):
    """Return the probes of a container, with their port as a number."""
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    probes = {name: json.loads(json.dumps(probe)) for name, probe in container.items() if name.endswith("Probe")}
    for probe in probes.values():
        probe["httpGet"]["port"] = ports[probe["httpGet"]["port"]]
    return probes


@every_case
def test_every_node_is_started_kept_and_sent_clients_by_the_probes_of_the_page(values):
    objects = render(values=values)
    kept, sent = documented("livenessProbe"), documented("readinessProbe")
    # The kubelet kills a stopped node after at most 10 s, 5 times 15 s, and 30 s to end; a slow node has 75 s.
    assert kept == asks("/livez", 10, timeout=15, failureThreshold=5) and sent == asks("/readyz", 5)
    # The other programs of a relay's Pod wait until the relay is connected.
    started = {"relay": asks("/readyz", 1, failureThreshold=600)}
    for name, spec, _ in pods(objects):
        for one in containers(spec):
            shows_pages = any(port["name"] == "probes" for port in one.get("ports", ()))
            start = started.get(one["name"], asks("/livez", 1, failureThreshold=600))
            expected = {"startupProbe": start, "livenessProbe": kept, "readinessProbe": sent}
            sleeps = one.get("command") == ["sleep", "infinity"]
            assert probed(one) == (expected if shows_pages and not sleeps else {}), (name, one["name"])
            others = ("actor", "learner", "doctor", "ask", "drain", "keys", "check")
            assert shows_pages or one["name"] in others, (name, one["name"])


def test_a_program_may_have_other_probes():
    mine = 'learner.probes={"livenessProbe":{"failureThreshold":60},"readinessProbe":{"exec":{"command":["ready"]}}}'
    how = {"values": FULL, "sets": (mine, 'actors.probes={"startupProbe":{"exec":{"command":["up"]}}}')}
    learner, get = container("learner", **how), {"path": "/livez", "port": "probes"}
    assert learner["livenessProbe"] == documented("livenessProbe") | {"httpGet": get, "failureThreshold": 60}
    asked = {"exec": {"command": ["ready"]}, "periodSeconds": 5, "timeoutSeconds": 5}  # the command has no default path
    assert learner["readinessProbe"] == asked
    assert container("actor", **how)["startupProbe"] == {"exec": {"command": ["up"]}}


def test_a_proxy_that_goes_waits_until_nobody_is_sent_to_it_and_then_has_time_to_end():
    def held(**how):
        return {one["name"]: one["lifecycle"] for _, spec, _ in pods(render(**how))
                for one in containers(spec) if "lifecycle" in one}  # fmt: skip

    for values in CASES:
        if values != DIAGNOSTIC:
            pairs = kinds(render(values=values))
            behind = {"proxy", *("inference" for kind, name in pairs if kind == "Deployment" and "-inference" in name)}
            assert held(values=values) == dict.fromkeys(behind, {"preStop": {"sleep": {"seconds": 5}}}), values
    assert held(values=FULL, kubernetes="1.30.0") == held(values=FULL)
    assert held(values=FULL, kubernetes="1.29.0") == held(values=DIAGNOSTIC) == {}  # 1.29 has no sleep action
    grace = {name.partition("/")[2]: spec.get("terminationGracePeriodSeconds") for name, spec, _ in
             pods(render(values=FULL))}  # fmt: skip
    without = [grace.pop(f"memoire-{name}") for name in ("drain", "roundtrip", "check")]  # jobs without data to save
    assert without == [None] * 3
    assert set(grace.values()) == {30}  # a proxy waits 5 s, and a node ends within 10 s


def test_a_relay_begins_before_the_actor_and_ends_after_it():
    (workload,) = [each for each in render(values=EMBEDDED) if each["metadata"]["name"].startswith("memoire-actor-")]
    spec = workload["spec"]["template"]["spec"]
    (relay,), (actor,) = spec["initContainers"], spec["containers"]
    assert relay["name"] == "relay" and relay["restartPolicy"] == "Always" and spec["restartPolicy"] == "OnFailure"
    assert relay["startupProbe"]["httpGet"]["path"] == "/readyz"  # the actor waits for the connection to the cluster
    assert {"name": "MEMOIRE_ENDPOINT", "value": "ipc:///run/memoire/relay"} in actor["env"]
    shared = {mount["name"] for mount in actor["volumeMounts"]} & {mount["name"] for mount in relay["volumeMounts"]}
    assert {"relay", "keys"} <= shared


def test_without_a_relay_actors_connect_to_the_proxies():
    assert "initContainers" not in pod("Deployment", "actor", values=NO_RELAY)
    env = variables(container("actor", values=NO_RELAY))
    assert (env["MEMOIRE_ENDPOINT"], env["MEMOIRE_HTTP"]) == ("tcp://memoire.rl.svc:5560", "*:8080")


def test_the_last_of_two_variables_of_a_name_is_taken():
    env = variables(container("server", values=FULL))
    assert env["EXTRA"] == "2" and env["MEMOIRE_NAME"] == "named-by-hand"


def test_what_is_said_of_a_pod_wins():
    server = pod("StatefulSet", "server", values=FULL)
    assert server["hostname"] == "here" and server["priorityClassName"] == "high"
    spread = {each["topologyKey"]: each for each in server["topologySpreadConstraints"]}["topology.kubernetes.io/zone"]
    assert spread["whenUnsatisfiable"] == "DoNotSchedule"
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "server"
    settings = told(values=FULL)
    assert settings["server"]["cache-limit"] == 1000 and settings["server"]["set"]["multi_step"] == 3
    assert settings["dashboard"]["expected-actors"] == 600 and settings["dashboard"]["root-path"] == "/memoire"


def test_learners_run_on_nodes_with_a_gpu_and_actors_on_others():
    objects = render(values=ROOT / "deploy" / "examples" / "gpu-learner.yaml")
    specs = {labels["app.kubernetes.io/component"]: spec for _, spec, labels in pods(objects)}
    learner, actor = specs["learner"], specs["actor"]
    assert learner["nodeSelector"] == {"node.kubernetes.io/accelerator": "a100"}
    assert actor["nodeSelector"] == specs["proxy"]["nodeSelector"] == {"node.kubernetes.io/pool": "cpu"}
    gpus = {name: sum("nvidia.com/gpu" in one.get("resources", {}).get("limits", {}) for one in containers(spec))
            for name, spec in specs.items()}  # fmt: skip
    assert gpus.pop("learner") == 1 and set(gpus.values()) == {0}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in learner["tolerations"]


def test_images_are_named_by_registry_tag_or_digest():
    images = {one["name"]: one["image"] for _, spec, _ in pods(render(values=FULL)) for one in containers(spec)}
    assert images["server"] == images["relay"] == "registry.example.com/rl/memoire:9.9"
    assert images["actor"] == "registry.example.com/rl/actor:1"
    assert container("learner", values=EMBEDDED)["image"].startswith("rl/learner@sha256:0123")
    secrets = pod("StatefulSet", "server", values=FULL)["imagePullSecrets"]
    assert secrets == [{"name": "pull"}, {"name": "other"}]


def test_the_dashboard_is_shown_by_ingress_and_by_gateway():
    objects = render(values=FULL)
    (rule,) = of(objects, "Ingress")["spec"]["rules"]
    assert rule["host"] == "rl.example.com" and rule["http"]["paths"][0]["path"] == "/memoire"
    route = of(objects, "HTTPRoute")["spec"]
    assert route["hostnames"] == ["rl.example.com"]
    assert route["rules"][0]["backendRefs"] == [{"name": "memoire-dashboard", "port": 80}]
    hosts = told(values=FULL)["dashboard"]["allow-host"]
    assert hosts[0] == "rl.example.com" and "memoire-dashboard.rl.svc" in hosts


def test_containers_may_sleep_to_be_looked_at():
    for _, spec, _ in pods(render(values=DIAGNOSTIC)):
        for one in containers(spec):
            if one["name"] != "doctor":
                assert one["command"] == ["sleep", "infinity"] and "args" not in one and "livenessProbe" not in one


def test_the_notes_say_where_actors_connect_and_how_to_open_the_dashboard(tmp_path):
    output = notes(tmp_path, values=FULL)
    assert "tcp://memoire.rl.svc:5560" in output and "port-forward service/memoire-dashboard" in output
    assert "memoire-keys-actor" in output and "helm -n rl test memoire" in output
    assert "https://rl.example.com/memoire" in output
    (known,) = output.partition("Warnings:")[2].strip().splitlines()
    assert "to store 4Gi" in output and known.startswith("- dashboard.persistence has the default StorageClass")
    plain = notes(tmp_path, *INSECURE, "image.tag=latest")
    assert "may push, draw and read" in plain and "image.tag is latest" in plain


def test_a_learner_with_a_server_has_the_port_of_its_inference_node_by_name():
    (port,) = (each for each in container("learner", values=EMBEDDED)["ports"] if each["name"] == "inference")
    assert f"tcp://*:{port['containerPort']}" == inference_address("tcp://*:5560")
    served = of(render(values=EMBEDDED), "Service", "memoire-learner")["spec"]["ports"]
    assert {"name": "inference", "port": 5563, "targetPort": "inference", "appProtocol": "tcp"} in served
    assert "5563" not in json.dumps(render(values=FULL))


DATA = {"TCP/5560", "TCP/5561", "TCP/5562"}
CLIENT, SCRAPER = '{"memoire.io/client": "true"}', '{"kubernetes.io/metadata.name": "monitoring"}'
SEEN = {f"{SCRAPER} TCP/8081", "dashboard TCP/8080"}
"""Connections for monitoring, which every node accepts."""


def to(*peers):
    """Return one side of a policy: these peers on the data ports, or on the port in their text."""
    named = [[peer] if re.search(r" (TCP|UDP)/\d+$", peer) else [f"{peer} {port}" for port in DATA] for peer in peers]
    return {one for each in named for one in each}


DNS, OUTSIDE_IT = ("anybody TCP/53", "anybody UDP/53"), "10.0.0.0/8 TCP/443"
WATCHED = [f"{name} TCP/8080" for name in ("server", "proxy", "learner", "actor")]
BOARD = {f"{SCRAPER} TCP/8081", "anybody TCP/8265"}, to(*WATCHED, *DNS)
POLICIES = {
    FULL: {
        "actor": (SEEN, to("proxy", OUTSIDE_IT, *DNS)),
        "learner": (SEEN, to("proxy", OUTSIDE_IT, *DNS)),
        "proxy": (SEEN | to(CLIENT), to("server", *DNS)),
        "server": (SEEN | to("proxy", "server", "drain"), to("server", *DNS)),
        "drain": (set(), to("server", *DNS)),
        "test": (set(), to("proxy", *DNS)),
        "dashboard": BOARD,
    },
    EMBEDDED: {
        "actor": (SEEN, to("proxy", "learner TCP/5563", *DNS)),
        "learner": (SEEN | to("proxy", "learner", f"{CLIENT} TCP/5563"), to("proxy", "learner TCP/5563", *DNS)),
        "proxy": (SEEN | to(CLIENT), to("learner", *DNS)),
        "test": (set(), to("proxy", "learner TCP/5563", *DNS)),
        "dashboard": BOARD,
    },
    OUTSIDE: {
        "proxy": (SEEN | to(CLIENT), to("server", "anybody", *DNS)),
        "test": (set(), to("proxy", *DNS)),
        "dashboard": BOARD,
    },
}
"""Connections in and out by each policy alone: a connection that one side refuses would hide a hole on the other side.
"""


@pytest.mark.parametrize("values", POLICIES, ids=["servers", "embedded", "outside"])
def test_each_half_of_each_policy_lets_through_what_it_should_by_itself(values):
    objects = render(values=values)
    kept = [each for each in objects if "annotations" not in each["metadata"]]  # hooks are temporary
    for policies in (halves(objects), halves(kept)):
        assert policies.keys() == POLICIES[values].keys()
        for name, (enters, leaves) in POLICIES[values].items():
            assert (policies[name][0] ^ enters, policies[name][1] ^ leaves) == (set(), set()), name
    of_pods = {each["app.kubernetes.io/component"]: each for _, _, each in pods(objects)}
    for each in (each for each in objects if each["kind"] == "NetworkPolicy"):
        labels, drained = each["metadata"]["labels"], each["metadata"]["name"] == "memoire-drained"
        # A policy without rules refuses all connections.
        assert each["spec"]["policyTypes"] == (["Ingress"] if drained else ["Ingress", "Egress"]), labels
        selected = each["spec"]["podSelector"]["matchLabels"]
        assert selected == {name: labels[name] for name in selected} and len(selected) == 3, labels
        assert selected.items() <= of_pods[labels["app.kubernetes.io/component"]].items()
    clients = {name for name, each in of_pods.items() if each.get("memoire.io/client") == "true"}
    assert clients == {"actor", "learner", "test"} & of_pods.keys()  # the clients of proxies


def test_servers_that_an_upgrade_takes_away_are_drained_before():
    objects = render(sets=("server.replicas=3", "server.drain.timeoutSeconds=90"), values=FULL)
    names = (("Job", "drain"), ("Service", "server"), ("StatefulSet", "server"))
    job, service, workload = (of(objects, kind, f"memoire-{name}") for kind, name in names)
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade,pre-rollback"
    assert "hook-succeeded" in job["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    spec = job["spec"]["template"]["spec"]
    args = main.parser().parse_args(spec["containers"][0]["args"])
    assert args.server == "tcp://{0}-{{n}}.{0}.rl.svc:5560".format(workload["spec"]["serviceName"])
    assert (args.keep, args.timeout) == (workload["spec"]["replicas"], 90.0) == (3, 90.0)
    assert service["metadata"]["name"] == workload["spec"]["serviceName"]
    assert service["spec"]["publishNotReadyAddresses"]
    keys = next(each["secret"] for each in spec["volumes"] if each["name"] == "keys")
    assert keys["secretName"].endswith("-learner"), "who may order a drain"
    assert job["spec"]["activeDeadlineSeconds"] >= (job["spec"]["backoffLimit"] + 1) * 90
    off = {"values": FULL, "sets": ("server.drain.enabled=false",)}
    for how in (off, {"values": EMBEDDED}, {"values": DIAGNOSTIC}):
        assert ("Job", "memoire-drain") not in kinds(render(**how))


def test_a_drain_needs_no_policy_of_the_release_that_it_changes():
    """The drain runs before the new chart's policies exist, and a former chart's policies may not allow it."""
    objects = render(values=FULL)
    ours = [each for each in objects if each["kind"] == "NetworkPolicy" and "annotations" in each["metadata"]]
    hooks = {each["metadata"]["name"]: each["metadata"]["annotations"] for each in ours}
    assert hooks.keys() == {"memoire-draining", "memoire-drained"}
    job = of(objects, "Job", "memoire-drain")["metadata"]["annotations"]
    for annotations in hooks.values():
        assert annotations["helm.sh/hook"] == job["helm.sh/hook"] == "pre-upgrade,pre-rollback"
        assert int(annotations["helm.sh/hook-weight"]) < int(job.get("helm.sh/hook-weight", 0))
        assert annotations["helm.sh/hook-delete-policy"].endswith("hook-succeeded,hook-failed")
    # A rollback runs the drain of the former chart, perhaps without a policy for drains. The release's policies then
    # allow the drain without the hook's policies.
    assert halves(ours) == {"drain": POLICIES[FULL]["drain"], "server": (to("drain", "proxy", "server"), set())}
    for how in ({"sets": ("networkPolicy.enabled=false",)}, {"values": FULL, "sets": ("server.drain.enabled=false",)}):
        assert not any("drain" in name for _, name in kinds(render(**how)) if _ == "NetworkPolicy")


def test_prometheus_scrapes_every_node_under_the_names_that_the_rules_know():
    objects = render(values=FULL)  # no --api-versions: the chart does not ask for the operator
    (endpoint,) = of(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "probes" and endpoint["path"] == "/metrics"
    labels = {each["targetLabel"]: each for each in endpoint["relabelings"]}
    assert labels["job"]["replacement"] == "memoire-$1" and labels["release"]
    scraped = {one["name"] for _, spec, _ in pods(objects) for one in containers(spec)
               if any(port["name"] == "probes" for port in one.get("ports", ()))}  # fmt: skip
    assert scraped == {"server", "proxy", "dashboard", "relay", "learner"}
    for name, _, _ in pods(objects):
        if not name.startswith(("Pod/", "Job/")):
            kind, _, called = name.partition("/")
            notes = of(objects, kind, called)["spec"]["template"]["metadata"]["annotations"]
            assert notes["prometheus.io/port"] == "8081", name


def test_a_learner_with_the_server_in_it_is_a_server_to_the_alerts():
    objects = render(values=EMBEDDED, sets=("monitoring.podMonitor.enabled=true",))
    (endpoint,) = of(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    jobs = [each for each in endpoint["relabelings"] if each["targetLabel"] == "job"]
    replacements = [(each.get("regex"), each["replacement"]) for each in jobs]
    assert replacements == [(None, "memoire-$1"), ("learner", "memoire-server")]


def test_rules_are_those_of_the_sources():
    spec = of(render(values=FULL), "PrometheusRule")["spec"]
    source = yaml.safe_load((ROOT / "deploy" / "monitoring" / "memoire.rules.yaml").read_text(encoding="utf-8"))
    document = json.dumps(spec).replace("https://git.example.com/memoire/docs", "docs")
    assert json.loads(document) == source


def test_boards_are_those_of_the_sources():
    boards = {name: board for each in render(values=FULL) if each["metadata"]["namespace"] == "monitoring"
              for name, board in each["data"].items()}  # fmt: skip
    sources = {f"memoire-{path.name}": path for path in (ROOT / "deploy" / "monitoring").glob("*.json")}
    assert boards.keys() == sources.keys() and boards
    for name, board in boards.items():
        assert json.loads(board) == json.loads(sources[name].read_text(encoding="utf-8"))
