"""Inference nodes in the chart, and learners that are distributed ranks: rendered, and run if possible."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import memoire
from chartkit import CHART, INSECURE, ROOT, container, halves, kinds, of, pod, pods, refusal, render, told, variables
from memoire.cli import main

VALUES = CHART / "ci" / "inference-values.yaml"
PPO = ROOT / "deploy" / "examples" / "gpu-ppo.yaml"
ON = ("inference.enabled=true", "inference.image.repository=rl/node")
ADDRESS = "tcp://memoire-inference.rl.svc:5570"
LEARNERS = (*INSECURE, "learner.enabled=true", "learner.image.repository=rl/learner")


def test_a_node_listens_with_its_own_keys_and_follows_the_models_at_the_proxies():
    spec = pod("Deployment", "inference", values=VALUES)
    (one,) = spec["containers"]
    env = variables(one)
    assert env["MEMOIRE_LISTEN"] == "tcp://*:5570" and env["MEMOIRE_ENDPOINT"] == "tcp://memoire.rl.svc:5560"
    assert env["MEMOIRE_KEYS"] == "/etc/memoire/keys" and env["MEMOIRE_HTTP"] == "*:8080"
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
    assert secrets == {"keys": "memoire-keys-inference", "tokens": "memoire-tokens"}
    ports = {port["name"]: port["containerPort"] for port in one["ports"]}
    assert ports == {"inference": 5570, "http": 8080, "probes": 8081}
    (server,) = pod("StatefulSet", "server", values=VALUES)["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert one[probe] == server[probe]
    assert one["command"] == ["python", "node.py"] and one["name"] == "inference"  # "inference" is a job's name, too
    assert one["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


def test_actors_and_learners_are_told_one_address_behind_which_only_ready_nodes_are():
    for name in ("actor", "learner"):
        assert variables(container(name, sets=ON))["MEMOIRE_INFERENCE"] == ADDRESS
    objects = render(sets=ON)
    asked, each = (of(objects, "Service", f"memoire-inference{end}")["spec"] for end in ("", "-nodes"))
    assert [port["port"] for port in asked["ports"]] == [5570] and "publishNotReadyAddresses" not in asked
    assert each["clusterIP"] == "None" and each["publishNotReadyAddresses"] is True
    assert asked["selector"] == each["selector"]
    labels = of(objects, "Deployment", "memoire-inference")["spec"]["template"]["metadata"]["labels"]
    assert asked["selector"].items() <= labels.items() and labels["memoire.io/client"] == "true"
    assert "dns:memoire-inference-nodes.rl.svc:8080" in told(sets=ON)["dashboard"]["nodes"]
    assert told(sets=ON)["server"]["inference"] == [ADDRESS]  # servers pass the address to every client


PARTS = """
import numpy as np
inputs, outputs = {"obs": (np.float32, (4,))}, {"action": np.int64}
def load(content):
    return content[0]
def function(columns, weights):
    return {"action": np.full(len(columns["obs"]), weights)}
"""


def test_the_page_s_node_answers_under_the_variables_that_it_is_given_and_ends_in_order(tmp_path):
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"(?ms)^```python node\n(.*?)^```$", page)
    schema = memoire.Schema({"obs": (np.float32, (4,)), "action": np.int64, "reward": np.float32})
    inputs, outputs = {"obs": (np.float32, (4,))}, {"action": np.int64}
    with memoire.Server(f"ipc://{tmp_path}/server", schema) as server:
        server.publish("policy", b"\1")
        here = {"MEMOIRE_LISTEN": f"ipc://{tmp_path}/node", "MEMOIRE_ENDPOINT": server.endpoint,
                "MEMOIRE_HTTP": "127.0.0.1:0", "MEMOIRE_PROBES": "127.0.0.1:0", "MEMOIRE_NAME": "node-x"}  # fmt: skip
        assert here.keys() == variables(container("inference", sets=(*INSECURE, *ON))).keys()
        with subprocess.Popen([sys.executable, "-c", PARTS + code], env=os.environ | here) as process:
            try:
                with memoire.RemotePolicy(here["MEMOIRE_LISTEN"], inputs, outputs, timeout=60.0) as policy:
                    answer = policy.act({"obs": np.zeros((2, 4), np.float32)})
                process.terminate()
                assert process.wait(20.0) == 0
            finally:
                process.kill()
    assert answer["action"].tolist() == [1, 1]


def test_helm_test_asks_a_node_for_a_row_beside_the_round_trip():
    spec = of(render(values=VALUES), "Pod", "memoire-roundtrip")["spec"]
    commands = {one["name"]: main.parser().parse_args(one["args"]) for one in spec["containers"]}
    assert commands["doctor"].roundtrip and not commands["doctor"].inference
    assert commands["ask"].inference and ADDRESS in json.dumps(vars(commands["ask"]), default=str)
    assert [one["env"] for one in spec["containers"]] == [[{"name": "MEMOIRE_KEYS", "value": "/etc/memoire/keys"}]] * 2


def test_policies_let_clients_ask_and_nodes_fetch_and_nobody_else():
    policies = halves(render(values=VALUES))
    client, scraper = '{"memoire.io/client": "true"}', '{"kubernetes.io/metadata.name": "monitoring"}'
    enters, leaves = policies["inference"]
    assert enters == {f"{client} TCP/5570", "dashboard TCP/8080", f"{scraper} TCP/8081"}
    assert leaves == {*(f"proxy TCP/{port}" for port in (5560, 5561, 5562)), "anybody TCP/53", "anybody UDP/53"}
    may_ask = {name for name, (_, leaves) in policies.items() if "inference TCP/5570" in leaves}
    clients = {
        each["app.kubernetes.io/component"] for _, _, each in pods(render(values=VALUES)) if "memoire.io/client" in each
    }
    assert may_ask == {"actor", "learner", "test"} and clients == may_ask | {"inference"}
    assert [name for name, (_, leaves) in policies.items() if "inference TCP/8080" in leaves] == ["dashboard"]
    more = (*ON, 'networkPolicy.clients=[{"ipBlock":{"cidr":"10.1.0.0/16"}}]')
    assert "10.1.0.0/16 TCP/5570" in halves(render(sets=more))["inference"][0]
    assert "inference" not in json.dumps([sorted(each[1]) for each in halves(render()).values()])


def test_there_are_as_many_as_their_work_needs_by_cpu_rows_or_keda():
    scaler = of(render(values=VALUES), "HorizontalPodAutoscaler", "memoire-inference")["spec"]
    assert scaler["scaleTargetRef"]["name"] == "memoire-inference"
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 6)
    by = {each["type"] for each in scaler["metrics"]}
    assert by == {"Resource", "Pods"}
    assert "replicas" not in of(render(values=VALUES), "Deployment", "memoire-inference")["spec"]
    scaled = of(render(values=PPO), "ScaledObject", "memoire-inference")["spec"]
    (trigger,) = scaled["triggers"]
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"memoire_\w+", trigger["metadata"]["query"])) <= set(re.findall(r"memoire_\w+", metrics))
    assert scaled["fallback"]["replicas"] == 8 and scaled["scaleTargetRef"] == {"name": "memoire-inference"}
    assert ("HorizontalPodAutoscaler", "memoire-inference") not in kinds(render(values=PPO))


def test_a_budget_keeps_one_of_several_and_never_a_single_one():
    assert ("PodDisruptionBudget", "memoire-inference") in kinds(render(values=VALUES))
    assert ("PodDisruptionBudget", "memoire-inference") in kinds(render(sets=(*ON, "inference.replicas=2")))
    assert ("PodDisruptionBudget", "memoire-inference") not in kinds(render(sets=ON))


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["inference.enabled=true"], "inference.image.repository"),
        ([*ON, "inference.autoscaling.enabled=true"], "set inference.resources.requests.cpu"),
        ([*ON, "inference.autoscaling.enabled=true", "inference.autoscaling.targetCPU=0"], "inference.autoscaling has"),
        ([*ON, "inference.autoscaling.keda.enabled=true"], "set inference.autoscaling.enabled=true"),
        ([*ON, 'inference.rollingUpdate={"maxUnavailable":0,"maxSurge":0}'], "so no Pod could be replaced"),
        ([*ON, 'inference.resources={"requests":{"cpu":2},"limits":{"cpu":1}}'], "inference.resources: the limit"),
        ([*LEARNERS, "learner.kind=Job", "learner.persistence.enabled=true"], "learner.kind=StatefulSet"),
        ([*ON, "inference.replica=2"], "replica"),
    ],
)
def test_values_that_cannot_be_are_refused_with_what_to_write_instead(sets, words):
    assert words in refusal(*sets)


def test_learners_and_nodes_have_gpus_and_a_node_s_is_free_before_the_next_one_begins():
    specs = {labels["app.kubernetes.io/component"]: spec for _, spec, labels in pods(render(values=PPO))}
    for name, place in (("learner", "a100"), ("inference", "t4")):
        (one,) = specs[name]["containers"]
        assert one["resources"]["limits"]["nvidia.com/gpu"] == 1 and specs[name]["runtimeClassName"] == "nvidia"
        assert specs[name]["nodeSelector"] == {"node.kubernetes.io/accelerator": place}
    assert not [name for name in ("actor", "proxy") if "nvidia.com/gpu" in json.dumps(specs[name])]
    strategy = of(render(values=PPO), "Deployment", "memoire-inference")["spec"]["strategy"]
    assert strategy == {"rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_each_of_several_learners_knows_its_rank_and_where_the_first_one_is(kind):
    several = (*LEARNERS, "learner.replicas=3", f"learner.kind={kind}")
    (item,) = [each for each in render(sets=several) if each["kind"] == kind and "-learner" in each["metadata"]["name"]]
    spec = item["spec"]["template"]["spec"]
    env = {one["name"]: one for one in spec["containers"][0]["env"]}
    label = "apps.kubernetes.io/pod-index" if kind == "StatefulSet" else "batch.kubernetes.io/job-completion-index"
    assert env["RANK"]["valueFrom"] == {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}
    values = {name: env[name]["value"] for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")}
    assert values == {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
    assert env["MASTER_ADDR"]["value"] == f"{item['metadata']['name']}-0.memoire-learner.rl.svc"
    service = of(render(sets=several), "Service", "memoire-learner")["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    assert (spec.get("subdomain") or item["spec"]["serviceName"]) == "memoire-learner"


def test_a_job_of_learners_ends_with_them_and_another_program_is_another_job():
    def job(*more):
        (workload,) = [each for each in render(sets=(*LEARNERS, "learner.kind=Job", *more)) if each["kind"] == "Job"
                   and each["metadata"]["name"].startswith("memoire-learner")]  # fmt: skip
        return workload

    workload = job("learner.replicas=2")
    assert workload["spec"]["completions"] == workload["spec"]["parallelism"] == 2
    assert workload["spec"]["completionMode"] == "Indexed"
    assert workload["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    names = {job(*more)["metadata"]["name"] for more in ((), ("learner.replicas=2",), ("learner.image.tag=2",))}
    assert len(names) == 3 and workload["metadata"]["name"] in names


def test_one_learner_is_told_of_no_rank_and_only_ranks_reach_each_other():
    assert "WORLD_SIZE" not in json.dumps(render(sets=LEARNERS))
    for count, may in ((1, False), (2, True)):
        policies = halves(render(sets=(*LEARNERS, f"learner.replicas={count}")))
        assert [name for name, (_, leaves) in policies.items() if "learner any/any" in leaves] == ["learner"] * may
        assert ("learner any/any" in policies["learner"][0]) is may
