"""Command `python -m memoire.rl`: runs all processes of a run, or a single process.

up FILE              server, trainer and workers of FILE on this machine, until the goal is reached
serve FILE           server of FILE                work URL... FILE   one worker of FILE
train URL... FILE    trainer of FILE               try FILE           test episodes by the newest model, no server

collect URL FILE     a collector of an on-policy learner
infer URL FILE       an inference node that acts by the learner's models
observe URL... FILE  an observer of an agent, or of the first of several agents that answers
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
import time
from typing import Any

import numpy as np

from memoire import Endpoints, Server, State
from memoire.errors import MemoireError
from memoire.launching import LauncherLine, accept_all_text, print_line
from memoire.nodes.http import NodePages

from .collector import Collector, RemoteActor
from .observer import Observer
from .pipeline import ACCIDENTS, TABLE, Run, folder_of, keys_of, read_file, seed_process
from .policies import Policy
from .trainer import Trainer, begin_fresh
from .worker import EpisodeResult, RolloutWorker, try_policy

REPORT_INTERVAL = 0.25
"""Seconds between two reports to a launcher."""
ANSWER_TIMEOUT = 60.0
"""Seconds that a collector waits for actions, and for its first model."""
MAX_REPORTED_RETURNS = 20
"""Number of newest test episodes whose returns a worker reports."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    accept_all_text()
    args = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(message)s")
    try:
        status: int = args.run(args)
    except MemoireError as error:
        print(f"memoire.rl {args.verb}: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m memoire.rl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    up = _verb(verbs, "up", _up, "run a pipeline on this machine")
    up.add_argument("--seconds", type=float, help="time limit in seconds, after which the run gives up")
    up.add_argument("--accidents", action="store_true", help="kill a worker and the trainer once, on purpose")
    _add_fresh(up, "move the run's files to a backup and start from scratch; asks first")
    up.add_argument("--no-dashboard", action="store_true", help="start no dashboard")
    serve = _verb(verbs, "serve", _serve, "run its server")
    serve.add_argument("--endpoint", default="tcp://127.0.0.1:5560", help="address (tcp://127.0.0.1:5560)")
    serve.add_argument("--beside", metavar="PORT,PORT", help="ports for caches and notices, to keep after a restart")
    serve.add_argument("--http", default="127.0.0.1:0", help="address of its pages (a free port)")
    _add_on_policy(verbs)
    for verb, run, text in (("work", _work, "run a worker"), ("train", _train, "run its trainer")):
        each = _verb(verbs, verb, run, text, with_urls=True)
        each.add_argument("--http", help="address of its pages, such as 127.0.0.1:8080 (none)")
        if verb == "work":
            each.add_argument("--rank", type=int, default=0, help="number of this worker: names its files and its seed")
        else:
            _add_fresh(each, "move the trainer's files to a backup and start from scratch; asks first")
    tried = _verb(verbs, "try", _try, "test episodes by a model in a file")
    tried.add_argument("--weights", help="file of the model (default: the trainer's newest)")
    tried.add_argument("--episodes", type=int, default=10, help="number of test episodes (10)")
    tried.add_argument("--render-mode", help="argument of env(render_mode=...), such as human")
    return parser


def _add_on_policy(verbs: Any) -> None:
    collect = _verb(verbs, "collect", _collect, "run a collector of an on-policy learner", with_url=True)
    collect.add_argument("--table", default="", help="the learner's table (its first one)")
    collect.add_argument(
        "--inference", action="append", metavar="URL", help="ask this inference node for actions; may be repeated"
    )
    infer = _verb(verbs, "infer", _infer, "run an inference node that acts by a learner's models", with_url=True)
    infer.add_argument("--endpoint", default="tcp://127.0.0.1:5570", help="its address (tcp://127.0.0.1:5570)")
    infer.add_argument("--http", help="address of its pages, such as 127.0.0.1:8080 (none)")
    _verb(verbs, "observe", _observe, "run an observer of an agent", with_urls=True)


def _add_fresh(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--fresh", action="store_true", help=text)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _verb(
    verbs: Any, name: str, run: Any, text: str, *, with_url: bool = False, with_urls: bool = False
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    if with_url:
        parser.add_argument("url", metavar="URL", help="address of the server")
    if with_urls:
        parser.add_argument("urls", metavar="URL", nargs="+", help="address of the server, or several")
    parser.add_argument("file", metavar="FILE", help="Python file that defines the run")
    parser.add_argument("--keys", help="keys folder of this process")
    parser.add_argument("--verbose", action="store_true", help="show log lines of level INFO")
    parser.set_defaults(run=run)
    return parser


def _up(args: argparse.Namespace) -> int:
    accidents = ACCIDENTS if args.accidents else ()
    if args.fresh:
        begin_fresh([read_file(args.file, "pipeline").path], is_sure=args.yes)
    run = Run(args.file, seconds=args.seconds, accidents=accidents, dashboard=not args.no_dashboard)
    return run.run()


def _serve(args: argparse.Namespace) -> int:
    with LauncherLine() as line:
        pipeline = read_file(args.file, "pipeline")
        host, ports = args.endpoint.rpartition(":")[0], args.beside.split(",") if args.beside else []
        push, publish = (f"{host}:{each}" for each in ports) if ports else (None, None)
        server = Server(
            Endpoints(args.endpoint, push=push, publish=publish),
            tables={TABLE: pipeline.make_table()}, run=pipeline.run, name="server", seed=pipeline.seed,
            state=State(folder_of(pipeline) / "server", snapshot_caches=True),
            keys=keys_of(args.keys, pipeline, "server"),
        )  # fmt: skip
        with contextlib.closing(server), contextlib.closing(NodePages(args.http, server)) as pages:
            beside = [server.push_endpoint, server.pub_endpoint]
            line.ready(endpoint=server.endpoint, http=f"http://{pages.address}", beside=beside)
            print_line(f"serving {pipeline.run} at {server.endpoint}")
            while line.wait(60.0):
                pass
    return 0


def _work(args: argparse.Namespace) -> int:
    with LauncherLine() as line:
        pipeline, tests = read_file(args.file, "pipeline"), list[float]()
        work, default_name = pipeline.work, f"worker-{args.rank}"
        folder = folder_of(pipeline)
        worker = RolloutWorker(
            pipeline.env, pipeline.policy, args.urls, table=TABLE, keys=keys_of(args.keys, pipeline, "actor"),
            name=os.environ.get("MEMOIRE_NAME") or default_name, device=work.device,
            max_samples_per_episode=work.max_samples_per_episode, model_path=folder / f"{default_name}.safetensors",
            model_path_history=folder / f"{default_name}_", model_history=work.model_history,
            obs_preprocessor=work.obs_preprocessor, is_paced=work.is_paced,
        )  # fmt: skip

        def on_episode(kind: str, result: EpisodeResult) -> None:
            if kind == "test":
                tests.append(result.returned)
                line.report(tests=len(tests), test_returns=tests[-MAX_REPORTED_RETURNS:], pid=os.getpid())

        with worker, contextlib.closing(NodePages(args.http, worker)):
            if pipeline.seed is not None:
                seed = 1000 * pipeline.seed + args.rank
                worker.env.reset(seed=seed)
                seed_process(seed)
            line.ready()
            threading.Thread(target=_stop_with, args=(line, worker.stop), daemon=True).start()
            worker.run(work.test_episode_interval, test_pause=work.test_pause, on_episode=on_episode)
    return 0


def _stop_with(line: LauncherLine, stop: Any) -> None:
    while not (line.stopping or line.finishing):
        time.sleep(REPORT_INTERVAL)
    stop()


def _train(args: argparse.Namespace) -> int:
    with LauncherLine() as line:
        pipeline = read_file(args.file, "pipeline")
        seed_process(pipeline.seed)  # the seed sets the initial weights
        folder = folder_of(pipeline)
        model, checkpoint = folder / "model.safetensors", folder / "checkpoint"
        if args.fresh:
            begin_fresh([model, checkpoint], is_sure=args.yes)
        trainer = Trainer(
            pipeline.make_agent(), args.urls, pipeline.training, table=TABLE,
            keys=keys_of(args.keys, pipeline, "learner"), name="trainer", model_path=model,
            checkpoint_path=checkpoint, profile_folder=folder / "profiles",
        )  # fmt: skip
        with trainer, contextlib.closing(NodePages(args.http, trainer)):
            line.ready()
            threading.Thread(target=_stop_with, args=(line, trainer.stop), daemon=True).start()
            threading.Thread(target=_report, args=(line, trainer), daemon=True).start()
            trainer.run()
            if line.finishing or trainer.loop.is_done:
                trainer.reader.finish()
    return 0


def _report(line: LauncherLine, trainer: Trainer) -> None:
    while line.is_launched and not trainer.is_stopping:
        state = trainer.loop.state
        line.report(updates=state.updates, samples=trainer.loop.samples, epoch=state.epoch,
                    waits=trainer.loop.explain())  # fmt: skip
        time.sleep(REPORT_INTERVAL)


def _collect(args: argparse.Namespace) -> int:
    with LauncherLine() as line:
        collection = read_file(args.file, "collection")
        policy: Policy = collection.policy()
        if args.inference:
            policy = RemoteActor(args.inference, collection.schema(), timeout=ANSWER_TIMEOUT, keys=args.keys)
        with Collector(args.url, collection.make_envs(), policy=policy, table=args.table, keys=args.keys,
                       seed=collection.seed) as collector:  # fmt: skip
            line.ready()
            while not (collector.client.finished or line.stopping or line.finishing):
                collector.run(seconds=REPORT_INTERVAL)
            totals = collector.collected()
        print(f"recorded {totals.steps} steps of {totals.episodes} episodes; the newest model was {totals.version}")
    return 0


def _infer(args: argparse.Namespace) -> int:
    with LauncherLine() as line:
        node = read_file(args.file, "collection").node(args.endpoint, args.url, keys=args.keys)
        with contextlib.closing(node), contextlib.closing(NodePages(args.http, node)):
            line.ready(endpoint=node.endpoint)
            print_line(f"answering at {node.endpoint}")
            while line.wait(60.0):
                pass
    return 0


def _observe(args: argparse.Namespace) -> int:
    with LauncherLine() as line:
        with Observer(args.urls, read_file(args.file, "run_episode"), keys=args.keys) as observer:
            line.ready()
            while not (line.stopping or line.finishing):
                observer.run(timeout=REPORT_INTERVAL)
        print(f"returned {observer.done} episodes")
    return 0


def _try(args: argparse.Namespace) -> int:
    pipeline = read_file(args.file, "pipeline")
    options = {} if args.render_mode is None else {"render_mode": args.render_mode}
    path = args.weights or pipeline.path / "model.safetensors"
    results = try_policy(lambda: pipeline.env(**options), pipeline.policy, path, args.episodes)
    for number, each in enumerate(results, start=1):
        print(f"episode {number}: return {each.returned:.2f} in {each.length} steps")
    print(f"mean return {np.mean([each.returned for each in results]):.2f} over {len(results)} episodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
