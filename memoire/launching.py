"""Public names for programs that start and supervise several processes on one machine.

A launcher starts processes, restarts processes that die, and ends all processes together:

    with Launcher(say=print_note) as launcher:
        run = LocalRun(launcher, Nodes(schema=schema, proxies=0))
        if run.begin():
            learner = launcher.start("learner", "my_learner", *run.cluster.endpoints)
            launcher.supervise([learner])
            run.watch()

A launched process uses `LauncherLine` to talk to its launcher. `memoire launch` runs a `LaunchedRun`.

Each name is imported at its first use.
"""

from typing import TYPE_CHECKING

from memoire.building import lazy_imports

if TYPE_CHECKING:
    from memoire.nodes.launcher import Child as Child
    from memoire.nodes.launcher import Launcher as Launcher
    from memoire.nodes.local import LaunchedRun as LaunchedRun
    from memoire.nodes.local import LaunchOptions as LaunchOptions
    from memoire.nodes.local import LocalCluster as LocalCluster
    from memoire.nodes.local import LocalRun as LocalRun
    from memoire.nodes.local import Nodes as Nodes
    from memoire.nodes.local import check_counts as check_counts
    from memoire.nodes.local import with_keys as with_keys
    from memoire.nodes.settings import make_envs as make_envs
    from memoire.nodes.settings import sizes as sizes
    from memoire.nodes.supervision import LauncherLine as LauncherLine
    from memoire.nodes.supervision import ProcessOutput as ProcessOutput
    from memoire.nodes.supervision import accept_all_text as accept_all_text
    from memoire.nodes.supervision import print_line as print_line
    from memoire.nodes.supervision import print_note as print_note

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_imports(__name__)  # type checkers see the imports above, and missing names
