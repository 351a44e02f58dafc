"""Command line `python -m memoire.tmrl`: the processes of the configured pipeline, and unchanged `tmrl` scripts.

run FILE [ARGUMENTS]     runs a script that imports `tmrl` or `rtgym`, unchanged
--server                 a server                     --trainer [--wandb]   the configured trainer
--worker                 a worker, until stopped      --expert              a worker that keeps its model
--test                   episodes with the worker's model, without a server
--benchmark              durations of steps of the environment
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from memoire.errors import CrcFailed, MemoireError, ParameterError
from memoire.rl.trainer import begin_fresh

MODULES: Final = (
    "actor", "config", "config.config_constants", "config.config_objects", "custom", "envs", "memory",
    "memory_dataloading", "networking", "nn", "training", "training_offline", "util",
)  # fmt: skip
"""Modules of `tmrl` that scripts may import."""
IN_CUSTOM: Final = ("custom_algorithms", "custom_memories", "custom_models", "utils", "utils.nn")
"""Modules of TMRL's `tmrl.custom`, which are one module in memoire."""
PACKAGES: Final = ("tmrl", "tmrl.config", "tmrl.custom", "tmrl.custom.utils")
BENCHMARK_STEPS: Final = 1000
CRC_STATUS: Final = 3
"""Exit status of a trainer that rebuilt a transition differently from its worker's record."""


class ForwardedNames:
    """Import finder that maps `tmrl` and `rtgym` to memoire's modules; it ignores installed packages of these names."""

    def __init__(self) -> None:
        self._names = {"tmrl": "memoire.tmrl", "rtgym": "memoire.tmrl.rtgym"}
        self._specs: dict[str, Any] = {}  # specs of memoire's modules by name
        self._names |= {f"tmrl.{name}": f"memoire.tmrl.{name}" for name in MODULES}
        self._names |= {f"tmrl.custom.{name}": "memoire.tmrl.custom" for name in IN_CUSTOM}

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Return a spec of memoire's module for a name of `tmrl` or `rtgym`; None for other names."""
        if name.partition(".")[0] not in ("tmrl", "rtgym"):
            return None
        if name not in self._names:
            raise ModuleNotFoundError(f"memoire.tmrl has no module for {name!r}", name=name)
        return importlib.util.spec_from_loader(name, self, is_package=name in PACKAGES)  # type: ignore[arg-type]

    def create_module(self, spec: object) -> ModuleType:
        """Return memoire's module for a spec."""
        module = importlib.import_module(self._names[spec.name])  # type: ignore[attr-defined]
        self._specs[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec; the module was executed under its own name."""
        module.__spec__ = self._specs[module.__name__]


def run_script(path: str, arguments: list[str]) -> None:
    """Run a script that was written for `tmrl`. Modules beside the script can be imported, as in Python's own start."""
    before, finder = (sys.argv, list(sys.path)), ForwardedNames()
    for name in [each for each in sys.modules if each.partition(".")[0] in ("tmrl", "rtgym")]:
        del sys.modules[name]
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        sys.argv, sys.path[:] = before


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if words[:1] == ["run"]:
            if len(words) < 2:
                raise ParameterError.with_text("Give a script: python -m memoire.tmrl run script.py")
            run_script(words[1], words[2:])
        else:
            _run_role(_parser().parse_args(words))
    except MemoireError as error:
        print(f"memoire.tmrl: {error}", file=sys.stderr)
        return CRC_STATUS if isinstance(error, CrcFailed) else 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m memoire.tmrl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    roles = parser.add_mutually_exclusive_group(required=True)
    for role in ("server", "worker", "trainer", "test", "expert", "benchmark"):
        roles.add_argument(f"--{role}", dest="role", action="store_const", const=role)
    parser.add_argument("--wandb", action="store_true", help="log the trainer's figures to wandb")
    parser.add_argument("--fresh", action="store_true", help="rename the trainer's files, begin a new run; asks first")
    parser.add_argument("--yes", action="store_true", help="rename files without asking")
    parser.add_argument("--keys", help="folder of this role's keys")
    parser.add_argument("--insecure", action="store_true", help="connect without keys, on a network that you trust")
    return parser


def _run_role(args: argparse.Namespace) -> None:
    from memoire.tmrl import networking
    from memoire.tmrl.config import config_constants as cfg

    options = {"keys": args.keys, "insecure": args.insecure}
    if args.role == "server":
        with networking.Server(**options) as server:
            print(f"serving at {server.server.endpoint}", flush=True)
            while not server.wait(60.0):
                pass
    elif args.role == "trainer":
        if args.fresh:
            begin_fresh((cfg.CHECKPOINT_PATH, cfg.MODEL_PATH_TRAINER), is_sure=args.yes)
        with networking.Trainer(**options) as trainer:
            trainer.run_with_wandb(key=cfg.WANDB_KEY or None) if args.wandb else trainer.run()
    else:
        _run_worker(args.role, options)


def _run_worker(role: str, options: dict[str, object]) -> None:
    from memoire.tmrl import networking
    from memoire.tmrl.config import config_constants as cfg
    from memoire.tmrl.config import config_objects

    is_alone = role in ("test", "benchmark")
    with networking.RolloutWorker(
        config_objects.make_env, config_objects.make_actor, max_samples_per_episode=cfg.RW_MAX_SAMPLES_PER_EPISODE,
        standalone=is_alone, **options,  # type: ignore[arg-type]
    ) as worker:  # fmt: skip
        if role == "test":
            worker.run_episodes(nb_episodes=10)
            returns = [each.returned for each in worker.results["test"]]
            print(f"mean return {sum(returns) / max(1, len(returns)):.3f} over {len(returns)} episodes")
        elif role == "benchmark":
            print(worker.run_env_benchmark(BENCHMARK_STEPS))
        else:
            worker.run(test_episode_interval=10, expert=role == "expert")


if __name__ == "__main__":
    sys.exit(main())
