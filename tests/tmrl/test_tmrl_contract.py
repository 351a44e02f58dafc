"""The names, orders and defaults of the seed's tutorial, in one table; what is beyond them is keyword-only."""

import inspect
import math
import sys
from typing import Any

import pytest

import memoire.tmrl.config.config_constants as cfg
import memoire.tmrl.config.config_objects as cfg_obj
from memoire.errors import ParameterError, WrongType
from memoire.tmrl import networking, training
from memoire.tmrl.__main__ import main as run_main
from memoire.tmrl.addresses import port_of

REQUIRED = inspect.Parameter.empty


def offline() -> Any:
    from memoire.tmrl import envs, memory_dataloading, training_offline

    expected = {
        "env_cls": envs.GenericGymEnv,
        "memory_cls": memory_dataloading.MemoryDataloading,
        "training_agent_cls": training.TrainingAgent,
        "epochs": 10,
        "rounds": 50,
        "steps": 2000,
        "update_model_interval": 100,
        "update_buffer_interval": 100,
        "max_training_steps_per_env_step": 1.0,
        "sleep_between_buffer_retrieval_attempts": 0.1,
        "profiling": False,
        "agent_scheduler": None,
        "start_training": 0,
        "device": None,
    }
    return training_offline.TrainingOffline, expected


TABLE: dict[str, Any] = {
    "Server": lambda: (networking.Server, {"min_samples_per_server_packet": 1}),
    "RolloutWorker": lambda: (
        networking.RolloutWorker,
        {
            "env_cls": None,
            "actor_module_cls": None,
            "sample_compressor": None,
            "device": "cpu",
            "server_ip": None,
            "min_samples_per_worker_packet": 1,
            "max_samples_per_episode": math.inf,
            "model_path": cfg.MODEL_PATH_WORKER,
            "obs_preprocessor": None,
            "crc_debug": False,
            "model_path_history": cfg.MODEL_PATH_SAVE_HISTORY,
            "model_history": cfg.MODEL_HISTORY,
            "standalone": False,
        },
    ),
    "Trainer": lambda: (
        networking.Trainer,
        {
            "training_cls": cfg_obj.TRAINER,
            "server_ip": cfg.SERVER_IP_FOR_TRAINER,
            "model_path": cfg.MODEL_PATH_TRAINER,
            "checkpoint_path": cfg.CHECKPOINT_PATH,
            "dump_run_instance_fn": None,
            "load_run_instance_fn": None,
        },
    ),
    "TrainingOffline": offline,
    "TrainingAgent": lambda: (
        training.TrainingAgent,
        {"observation_space": REQUIRED, "action_space": REQUIRED, "device": REQUIRED},
    ),
    "TrainingAgent.train": lambda: (training.TrainingAgent.train, {"self": REQUIRED, "batch": REQUIRED}),
    "TrainingAgent.get_actor": lambda: (training.TrainingAgent.get_actor, {"self": REQUIRED}),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_signature_is_the_seeds(name: str) -> None:
    made, expected = TABLE[name]()
    parameters = inspect.signature(made).parameters.values()
    found = {each.name: each.default for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY}
    assert list(found) == list(expected) and found == expected


def test_the_calls_of_the_tutorial_have_their_names() -> None:
    for owner, name, wanted in (
        (networking.RolloutWorker, "run", "test_episode_interval"),
        (networking.Trainer, "run_with_wandb", "entity"),
        (networking.Trainer, "run_with_wandb", "project"),
        (networking.Trainer, "run_with_wandb", "run_id"),
        (networking.Trainer, "run_with_wandb", "key"),
    ):
        assert wanted in inspect.signature(getattr(owner, name)).parameters


@pytest.mark.parametrize("end", [networking.Server, networking.RolloutWorker, networking.Trainer])
def test_the_ports_security_and_password_of_a_newer_script_are_taken_or_refused(end: Any, caplog: Any) -> None:
    classes = {"env_cls": dict, "actor_module_cls": dict} if end is networking.RolloutWorker else {}
    with pytest.raises(ParameterError, match='security must be None, or "TLS" with keys'):
        end(security="TLS", **classes)
    if end is not networking.Server:
        with pytest.raises(ParameterError, match="server_port must be the same as port=1, or left out, got 2"):
            end(port=1, server_port=2, **classes)
        assert port_of(None, 6666, security=None, password="", keys=None, role="actor") == 6666
    assert not caplog.records
    assert port_of(6666, None, security=None, password="words", keys=None, role="actor") == 6666
    assert "the password is not used" in caplog.text


def test_the_names_of_a_newer_script_are_there() -> None:
    assert (cfg.PASSWORD, cfg.DEBUG_MODE) == ("", False)
    training_offline = pytest.importorskip("memoire.tmrl.training_offline")
    assert training_offline.TorchTrainingOffline is training_offline.TrainingOffline


def test_arguments_in_the_order_of_tmrl_0_7_are_refused_by_name():
    worker, trainer = networking.RolloutWorker, networking.Trainer
    for call, name in (
        (lambda: worker(dict, dict, None, "cpu", 1000, "w.tmod"), "server_ip"),
        (lambda: worker(dict, dict, None, "cpu", math.inf), "server_ip"),
        (lambda: worker(dict, dict, model_path_history=7), "model_path_history"),
        (lambda: trainer(dict, "127.0.0.1", 6666, "password"), "model_path"),
        (lambda: trainer(dict, "127.0.0.1", checkpoint_path=1), "checkpoint_path"),
        (lambda: trainer(dict, [7]), "server_ip"),
    ):
        with pytest.raises(WrongType, match=rf"^{name} .*order of TMRL before 0.7"):
            call()


def test_a_script_runs_unchanged_from_any_folder_with_the_modules_beside_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "beside_the_script.py").write_text("from rtgym import RealTimeGymInterface as interface\n")
    (tmp_path / "script.py").write_text(
        "import sys\nfrom beside_the_script import interface\nfrom tmrl.networking import Trainer\nimport tmrl.util\n"
        "print(__name__, sys.argv[1:], interface.__module__, Trainer.__module__, tmrl.util.prod([2, 3]))\n"
    )
    monkeypatch.chdir("/")
    before = list(sys.path), list(sys.argv), list(sys.meta_path)
    try:
        assert run_main(["run", str(tmp_path / "script.py"), "worker"]) == 0
    finally:
        sys.modules.pop("beside_the_script", None)
    assert capsys.readouterr().out == "__main__ ['worker'] memoire.rl.realtime memoire.tmrl.networking 6\n"
    assert (sys.path, sys.argv, sys.meta_path) == before and run_main(["run"]) == 2
