"""`memoire doctor --inference`."""

import numpy as np

import memoire
from memoire.cli import doctor, main
from memoire.replay.columns import Column

ROWS = {"obs": {"speed": (np.float32, (2,))}, "nodes": Column(np.int32, (None, 3))}
HERE = "tcp://127.0.0.1:0"


def count(columns):
    return {"value": columns["nodes_length"].astype(np.float32)}


def test_the_doctor_asks_a_row(capsys):
    with memoire.Inference(HERE, ROWS, {"value": np.float32}, count) as node:
        assert main.main(["doctor", "--inference", node.endpoint]) == doctor.WELL
    said = capsys.readouterr().out
    assert "ok   inputs: obs.speed float32[2], nodes int32[any, 3]" in said and "ok   outputs: value float32" in said
    assert "a row is answered" in said and said.endswith("all is well\n")


def test_the_doctor_says_what_the_function_says(capsys):
    def function(columns):
        raise RuntimeError("no GPU")

    with memoire.Inference(HERE, ROWS, {"value": np.float32}, function) as node:
        assert main.main(["doctor", "--inference", node.endpoint]) == doctor.REFUSED
    assert "failed: RuntimeError: no GPU" in capsys.readouterr().out


def test_the_doctor_knows_a_server_from_an_inference_node(capsys):
    schema = memoire.Schema({"obs": np.float32, "reward": np.float32})
    with memoire.Server(HERE, schema) as server:
        assert main.main(["doctor", "--inference", server.endpoint]) == doctor.NOT_MEMOIRE
    assert "is no inference node" in capsys.readouterr().out


def test_the_doctor_says_that_nobody_listens(capsys):
    with memoire.Inference(HERE, ROWS, {"value": np.float32}, count) as node:
        endpoint = node.endpoint
    assert main.main(["doctor", "--inference", endpoint, "--timeout", "1"]) == doctor.NOTHING_LISTENS
