"""What `memoire keys in-cluster` and `memoire keys check` take; argparse is all that this needs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .options import Commands


def add_to(actions: Commands) -> None:
    """Add both to the actions of `memoire keys`."""
    made = actions.add_parser(
        "in-cluster",
        help="in a Pod: make the Secrets of keys and tokens that are not there",
        description="Make the Secrets NAME-server, NAME-actor, ... and the Secret of tokens, through the API server of "
        "the cluster that this Pod runs in. What is there is kept. A Secret that is missing beside others is "
        "added, and the others learn of its key. The account needs get and patch of these Secrets, and create of "
        "Secrets in the namespace.",
    )
    _add_names(made)
    made.add_argument("--namespace", default="", help="of the Secrets (default: the Pod's own)")
    made.add_argument("--timeout", type=float, default=60.0, help="seconds for all of it (default: %(default)s)")
    made.add_argument(
        "--api-server",
        metavar="URL",
        default="",
        help="another one, such as that of `kubectl proxy`: http://127.0.0.1:8001",
    )
    made.set_defaults(command=_make)
    looked = actions.add_parser(
        "check",
        help="say whether mounted Secrets of keys and tokens are there and can be used",
        description="FOLDER has a folder for each role, with the own.pub of its Secret, and the folder tokens. Exit "
        "status: 0 all is well; 1 a Secret is missing, or cannot be used.",
    )
    looked.add_argument("folder", metavar="FOLDER", type=Path, help="where they are mounted")
    _add_names(looked)
    looked.add_argument(
        "--require",
        metavar="ROLE",
        action="append",
        default=[],
        choices=["inference"],
        help="a role whose Secret may be missing otherwise: inference",
    )
    looked.set_defaults(command=_check)


def _add_names(to: argparse.ArgumentParser) -> None:
    to.add_argument("--secrets", metavar="NAME", default="", help="what the Secrets of keys begin with (default: none)")
    to.add_argument("--tokens", metavar="NAME", default="", help="the Secret of tokens (default: none)")


def _make(given: argparse.Namespace) -> int:
    from . import in_cluster
    from .api_server import ApiServer

    account = in_cluster.account(given.api_server, given.namespace, os.environ)
    return in_cluster.make(given.secrets, given.tokens, ApiServer(account, given.timeout))


def _check(given: argparse.Namespace) -> int:
    from . import in_cluster

    return in_cluster.check(given.secrets, given.tokens, given.folder, frozenset(given.require))
