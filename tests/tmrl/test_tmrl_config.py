"""Constants of the TMRL layer, read when they are used: from a call, the environment, a file or a default."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import memoire.tmrl.config.config_constants as cfg
from memoire.errors import DataError, ParameterError, UnknownName
from memoire.tmrl.config.config_constants import TABLE, Constants


def constants(folder, config=None, **environment):
    if config is not None:
        (folder / "config").mkdir(parents=True, exist_ok=True)
        (folder / "config" / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return Constants({"MEMOIRE_TMRL": str(folder), **environment})


def test_without_a_file_there_are_defaults_and_nothing_is_made(tmp_path, monkeypatch):
    folder = tmp_path / "none"
    known = constants(folder)
    assert known["RUN_NAME"] == "run"
    assert known["WEIGHTS_FOLDER"] == folder / "weights"
    for name, path in (("WORKER", "run.pth"), ("SAVE_HISTORY", "run_"), ("TRAINER", "run_t.pth")):
        assert known[f"MODEL_PATH_{name}"] == str(folder / "weights" / path)
    assert known["CHECKPOINT_PATH"] == str(folder / "checkpoints" / "run_t.cpt")
    assert (known["PORT_TRAINER"], known["PORT_ROLLOUT"]) == (55555, 55556)
    assert (known["SERVER_IP_FOR_TRAINER"], known["SERVER_IP_FOR_WORKER"]) == ("127.0.0.1", "127.0.0.1")
    assert (known["MODEL_HISTORY"], known["RW_MAX_SAMPLES_PER_EPISODE"], known["CRC_DEBUG"]) == (0, np.inf, 0)
    assert len(dict(known)) == len(TABLE)
    assert not folder.exists()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Constants({})["TMRL_FOLDER"] == tmp_path / "TmrlData"


def test_the_file_selects_paths_by_the_run_name_and_says_where_the_server_is(tmp_path):
    known = constants(tmp_path, {"RUN_NAME": "drone-1", "SAVE_MODEL_EVERY": 5, "ENV": {"x": 1},
                                 "LOCALHOST_TRAINER": False, "PUBLIC_IP_SERVER": "10.0.0.5"})  # fmt: skip
    assert known["MODEL_PATH_WORKER"] == str(tmp_path / "weights" / "drone-1.pth")
    assert (known["WANDB_RUN_ID"], known["MODEL_HISTORY"], known["TMRL_CONFIG"]["ENV"]) == ("drone-1", 5, {"x": 1})
    assert (known["SERVER_IP_FOR_TRAINER"], known["SERVER_IP_FOR_WORKER"]) == ("10.0.0.5", "127.0.0.1")


def test_a_call_counts_before_the_environment_and_that_before_the_file(tmp_path):
    known = constants(tmp_path, {"PORT_TRAINER": 1000, "RUN_NAME": "a"}, MEMOIRE_TMRL_PORT_TRAINER="2000")
    assert (known["PORT_TRAINER"], known["RUN_NAME"]) == (2000, "a")
    known.use({"PORT_TRAINER": "3000"})
    assert known["PORT_TRAINER"] == 3000
    known.use({"TMRL_FOLDER": tmp_path / "other"})
    assert known["RUN_NAME"] == "run"


def test_two_names_of_one_port_say_the_same_wherever_it_is_said(tmp_path):
    ports = lambda known: tuple(known[name] for name in ("PORT", "PORT_TRAINER", "PORT_ROLLOUT"))  # noqa: E731
    assert ports(constants(tmp_path, {"PORT": 1000})) == (1000, 1000, 1001)
    assert ports(constants(tmp_path, {"PORT": 1000}, MEMOIRE_TMRL_PORT_TRAINER="2000")) == (2000, 2000, 2001)
    known = constants(tmp_path, {"PORT_ROLLOUT": 7}, MEMOIRE_TMRL_PORT="2000")
    assert ports(known) == (2000, 2000, 7)
    known.use({"PORT": 3000})
    assert ports(known) == (3000, 3000, 7)
    for wrong in (lambda: constants(tmp_path, {"PORT": 1, "PORT_TRAINER": 2})["PORT"],
                  lambda: known.use({"PORT": 1, "PORT_TRAINER": 2})):  # fmt: skip
        with pytest.raises(ParameterError, match=r"PORT_TRAINER.* must be 1, as PORT.* says"):
            wrong()
    assert ports(known) == (3000, 3000, 7)


def test_the_file_is_read_once_until_told_otherwise(tmp_path):
    known = constants(tmp_path, {"RUN_NAME": "a"})
    assert known["RUN_NAME"] == "a"
    constants(tmp_path, {"RUN_NAME": "b"})
    assert known["RUN_NAME"] == "a"
    known.forget()
    assert known["RUN_NAME"] == "b"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("RUN_NAME", 3, "text"), ("PORT_TRAINER", 1.5, "a whole number"), ("PORT_TRAINER", "x", "a whole number"),
     ("RESET_TRAINING", "maybe", "true or false"), ("RW_MAX_SAMPLES_PER_EPISODE", None, "a number")],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_with_where_it_stands(name, value, expected, tmp_path):
    known = constants(tmp_path, {name: value})
    with pytest.raises(ParameterError, match=f"{name} in {tmp_path}.*must be {expected}"):
        known[name]
    with pytest.raises(ParameterError, match=f"{name} must be {expected}"):
        known.use({name: value})


def test_truth_and_infinity_are_read_from_text(tmp_path):
    known = constants(tmp_path, MEMOIRE_TMRL_RESET_TRAINING="true", MEMOIRE_TMRL_RW_MAX_SAMPLES_PER_EPISODE="inf")
    assert known["RESET_TRAINING"] is True
    assert known["RW_MAX_SAMPLES_PER_EPISODE"] == np.inf
    assert constants(tmp_path, {"CRC_DEBUG": True})["CRC_DEBUG"] == 1


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_file_that_is_no_table_is_named(text, tmp_path):
    with pytest.raises(DataError, match=f"{tmp_path}.*config.json"):
        constants(tmp_path, text)["RUN_NAME"]


def test_the_module_has_each_constant_and_no_other():
    assert Constants()["RUN_NAME"] == cfg.RUN_NAME
    assert {"RUN_NAME", "WEIGHTS_FOLDER", "CHECKPOINTS_FOLDER", "use"} <= set(dir(cfg))
    annotated = Path(cfg.__file__).read_text(encoding="utf-8").split("\nif TYPE_CHECKING:\n")[1].split("\n\n")[0]
    assert set(re.findall(r"^ +([A-Z_]+): ", annotated, re.MULTILINE)) == set(TABLE)
    with pytest.raises(AttributeError, match=r"no constant 'RUN_NAM' \(did you mean 'RUN_NAME'"):
        _ = cfg.RUN_NAM


def test_the_module_takes_values_for_this_process():
    code = (
        "import memoire.tmrl.config.config_constants as cfg; cfg.use(RUN_NAME='x'); cfg.reload(); "
        "print(cfg.MODEL_PATH_TRAINER)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert Path(done.stdout.strip()).name == "x_t.pth"


def test_a_constant_that_there_is_none_of_cannot_be_set():
    with pytest.raises(UnknownName, match="use takes no 'RUN_NAM'. Did you mean 'RUN_NAME'"):
        cfg.use(RUN_NAM="x")
    with pytest.raises(UnknownName, match="use takes no 'TMRL_CONFIG'"):
        cfg.use(TMRL_CONFIG={})


def test_importing_makes_no_file_and_needs_no_torch(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None; import memoire.tmrl, memoire.tmrl.util, memoire.tmrl.envs, "
        "memoire.tmrl.rtgym, memoire.tmrl.config.config_constants"
    )
    environment = {**os.environ, "HOME": str(tmp_path), "MEMOIRE_TMRL": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)
    assert list(tmp_path.iterdir()) == []
