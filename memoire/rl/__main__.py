"""`python -m memoire.rl`: the processes of a run, all at once or one by one.

up FILE              server, trainer and workers of FILE on this machine, until its goal is reached
serve FILE           its server                    work URL... FILE   one of its workers
train URL... FILE    its trainer                   try FILE           test episodes by the newest model, no server

collect URL FILE     a collector of an on-policy learner
infer URL FILE       an inference node that acts by the learner's models
observe URL... FILE  an observer of an agent, or of the first that answers of several
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
from memoire.launching import LauncherLine, accept_all_text, say
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
REPORTED = 20
"""Newest test episodes whose returns a worker reports."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; its exit status."""
    accept_all_text()
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if given.verbose else logging.WARNING, format="%(message)s")
    try:
        status: int = given.run(given)
    except MemoireError as error:
        print(f"memoire.rl {given.verb}: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m memoire.rl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    up = _verb(verbs, "up", _up, "run a pipeline on this machine")
    up.add_argument("--seconds", type=float, help="give up after so many seconds")
    up.add_argument("--accidents", action="store_true", help="kill a worker and the trainer once, on purpose")
    _add_fresh(up, "put the run's files aside and begin anew; asks before")
    up.add_argument("--no-dashboard", action="store_true", help="start none")
    serve = _verb(verbs, "serve", _serve, "run its server")
    serve.add_argument("--endpoint", default="tcp://127.0.0.1:5560", help="address (tcp://127.0.0.1:5560)")
    serve.add_argument("--beside", help="ports of caches and notices, after a restart")
    serve.add_argument("--http", default="127.0.0.1:0", help="address of its pages (a free port)")
    _add_on_policy(verbs)
    for verb, run, text in (("work", _work, "run a worker"), ("train", _train, "run its trainer")):
        each = _verb(verbs, verb, run, text, with_urls=True)
        each.add_argument("--http", help="address of its pages, such as 127.0.0.1:8080 (none)")
        if verb == "work":
            each.add_argument("--rank", type=int, default=0, help="which worker this is: names its files and seed")
        else:
            _add_fresh(each, "put the trainer's files aside and begin anew; asks before")
    tried = _verb(verbs, "try", _try, "test episodes by a model in a file")
    tried.add_argument("--weights", help="the file; by default the trainer's newest")
    tried.add_argument("--episodes", type=int, default=10)
    tried.add_argument("--render-mode", help="what env(render_mode=...) is called with, such as human")
    return parser


def _add_on_policy(verbs: Any) -> None:
    """The verbs of on-policy runs, whose learner is a program of its own."""
    collect = _verb(verbs, "collect", _collect, "run a collector of an on-policy learner", with_url=True)
    collect.add_argument("--table", default="", help="the learner's table (its first one)")
    collect.add_argument(
        "--inference", action="append", metavar="URL", help="ask this inference node for actions; may be given again"
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
    parser.add_argument("file", metavar="FILE", help="Python file that makes the pipeline")
    parser.add_argument("--keys", help="keys folder")
    parser.add_argument("--verbose", action="store_true", help="show what is logged")
    parser.set_defaults(run=run)
    return parser


def _up(given: argparse.Namespace) -> int:
    accidents = ACCIDENTS if given.accidents else ()
    if given.fresh:
        begin_fresh([read_file(given.file, "pipeline").path], is_sure=given.yes)
    run = Run(given.file, seconds=given.seconds, accidents=accidents, dashboard=not given.no_dashboard)
    return run.run()


def _serve(given: argparse.Namespace) -> int:
    with LauncherLine() as line:
        pipeline = read_file(given.file, "pipeline")
        host, ports = given.endpoint.rpartition(":")[0], given.beside.split(",") if given.beside else []
        push, publish = (f"{host}:{each}" for each in ports) if ports else (None, None)
        server = Server(
            Endpoints(given.endpoint, push=push, publish=publish),
            tables={TABLE: pipeline.make_table()}, run=pipeline.run, name="server", seed=pipeline.seed,
            state=State(folder_of(pipeline) / "server", snapshot_caches=True),
            keys=keys_of(given.keys, pipeline, "server"),
        )  # fmt: skip
        with contextlib.closing(server), contextlib.closing(NodePages(given.http, server)) as pages:
            beside = [server.push_endpoint, server.pub_endpoint]
            line.ready(endpoint=server.endpoint, http=f"http://{pages.address}", beside=beside)
            say(f"serving {pipeline.run} at {server.endpoint}")
            while line.wait(60.0):
                pass
    return 0


def _work(given: argparse.Namespace) -> int:
    with LauncherLine() as line:
        pipeline, tests = read_file(given.file, "pipeline"), list[float]()
        work, own = pipeline.work, f"worker-{given.rank}"
        folder = folder_of(pipeline)
        worker = RolloutWorker(
            pipeline.env, pipeline.policy, given.urls, table=TABLE, keys=keys_of(given.keys, pipeline, "actor"),
            name=os.environ.get("MEMOIRE_NAME") or own, device=work.device,
            max_samples_per_episode=work.max_samples_per_episode, model_path=folder / f"{own}.safetensors",
            model_path_history=folder / f"{own}_", model_history=work.model_history,
            obs_preprocessor=work.obs_preprocessor, is_paced=work.is_paced,
        )  # fmt: skip

        def on_episode(kind: str, result: EpisodeResult) -> None:
            if kind == "test":
                tests.append(result.returned)
                line.report(tests=len(tests), test_returns=tests[-REPORTED:], pid=os.getpid())

        with worker, contextlib.closing(NodePages(given.http, worker)):
            if pipeline.seed is not None:
                seed = 1000 * pipeline.seed + given.rank
                worker.env.reset(seed=seed)
                seed_process(seed)
            line.ready()
            threading.Thread(target=_stop_with, args=(line, worker.stop), daemon=True).start()
            worker.run(work.test_episode_interval, test_pause=work.test_pause, on_episode=on_episode)
    return 0


def _stop_with(line: LauncherLine, stop: Any) -> None:
    """Call `stop` when the launcher, or a signal, asks for an end."""
    while not (line.stopping or line.finishing):
        time.sleep(REPORT_INTERVAL)
    stop()


def _train(given: argparse.Namespace) -> int:
    with LauncherLine() as line:
        pipeline = read_file(given.file, "pipeline")
        seed_process(pipeline.seed)  # of first weights
        folder = folder_of(pipeline)
        model, checkpoint = folder / "model.safetensors", folder / "checkpoint"
        if given.fresh:
            begin_fresh([model, checkpoint], is_sure=given.yes)
        trainer = Trainer(
            pipeline.make_agent(), given.urls, pipeline.training, table=TABLE,
            keys=keys_of(given.keys, pipeline, "learner"), name="trainer", model_path=model,
            checkpoint_path=checkpoint, profile_folder=folder / "profiles",
        )  # fmt: skip
        with trainer, contextlib.closing(NodePages(given.http, trainer)):
            line.ready()
            threading.Thread(target=_stop_with, args=(line, trainer.stop), daemon=True).start()
            threading.Thread(target=_report, args=(line, trainer), daemon=True).start()
            trainer.run()
            if line.finishing or trainer.loop.is_done:
                trainer.reader.finish()
    return 0


def _report(line: LauncherLine, trainer: Trainer) -> None:
    """Tell a launcher how training stands."""
    while line.is_launched and not trainer.is_stopping:
        state = trainer.loop.state
        line.report(updates=state.updates, samples=trainer.loop.samples, epoch=state.epoch,
                    waits=trainer.loop.explain())  # fmt: skip
        time.sleep(REPORT_INTERVAL)


def _collect(given: argparse.Namespace) -> int:
    with LauncherLine() as line:
        collection = read_file(given.file, "collection")
        policy: Policy = collection.policy()
        if given.inference:
            policy = RemoteActor(given.inference, collection.schema(), timeout=ANSWER_TIMEOUT, keys=given.keys)
        with Collector(given.url, collection.make_envs(), policy=policy, table=given.table, keys=given.keys,
                       seed=collection.seed) as collector:  # fmt: skip
            line.ready()
            while not (collector.client.finished or line.stopping or line.finishing):
                collector.run(seconds=REPORT_INTERVAL)
            found = collector.collected()
        print(f"recorded {found.steps} steps of {found.episodes} episodes; the newest model was {found.version}")
    return 0


def _infer(given: argparse.Namespace) -> int:
    with LauncherLine() as line:
        node = read_file(given.file, "collection").node(given.endpoint, given.url, keys=given.keys)
        with contextlib.closing(node), contextlib.closing(NodePages(given.http, node)):
            line.ready(endpoint=node.endpoint)
            say(f"answering at {node.endpoint}")
            while line.wait(60.0):
                pass
    return 0


def _observe(given: argparse.Namespace) -> int:
    with LauncherLine() as line:
        with Observer(given.urls, read_file(given.file, "run_episode"), keys=given.keys) as observer:
            line.ready()
            while not (line.stopping or line.finishing):
                observer.run(timeout=REPORT_INTERVAL)
        print(f"returned {observer.done} episodes")
    return 0


def _try(given: argparse.Namespace) -> int:
    pipeline = read_file(given.file, "pipeline")
    options = {} if given.render_mode is None else {"render_mode": given.render_mode}
    path = given.weights or pipeline.path / "model.safetensors"
    results = try_policy(lambda: pipeline.env(**options), pipeline.policy, path, given.episodes)
    for number, each in enumerate(results, start=1):
        print(f"episode {number}: return {each.returned:.2f} in {each.length} steps")
    print(f"mean return {np.mean([each.returned for each in results]):.2f} over {len(results)} episodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
