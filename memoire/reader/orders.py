"""What a learner or an operator orders and asks of all servers: the calls of `Reader` that are about no batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memoire.accounting.merge import ClusterTotals, ServerAccounts
from memoire.errors import MemoireError
from memoire.replay.parameters import NAMES
from memoire.replay.sampling import Sampler, changes_of
from memoire.suggestions import checked_names
from memoire.wire import messages

from .admin import ClusterAdmin


class ClusterOrders:
    """Orders to every server that a reader knows, and questions to them. Each call returns within its timeout. A server
    whose disk is full is asked again until then; its `Refused` (code "disk") is what the call raises or returns.
    """

    _admin: ClusterAdmin

    @checked_names(NAMES, called="Reader.configure")
    def configure(
        self,
        timeout: float | None = None,
        *,
        sampler: Sampler | None = None,
        discount: float | Sequence[float] | None = None,
        discard_mismatched: bool = False,
        **fields: Any,
    ) -> None:
        """Change parameters at every known server, and so at all clients; returns when the servers have them. Takes
        what `Buffer.configure` takes.

        Args:
            discard_mismatched: Have servers drop caches whose samples were made with other values, such as another
                discount. A server that holds such caches refuses these parameters without it.

        Raises:
            MemoireTimeout: a server did not answer in time; names it. The others have the change: servers that are read
                together need the same parameters, so call again when it is back.
            Refused: a server does not take them.
        """
        self._admin.configure(timeout, changes_of(sampler, discount, fields), discard_mismatched)

    def finish(self, timeout: float | None = None) -> None:
        """Declare the run over at every server; returns when all of them know it.

        Servers that are away are waited for until `timeout`. If they are not back then, a warning names them: their
        clients work on until this is called again.

        Raises:
            MemoireTimeout: none of them answered in time.
        """
        self._admin.finish(timeout)

    def begin_run(self, name: str, timeout: float | None = None) -> None:
        """Have every server count in the run called `name` from now on; see `Server.begin_run`. A new run starts at
        zero. A former run goes on from its totals.

        Raises:
            MemoireTimeout: a server did not answer in time; names it. Call again when it is back.
            Refused: `name` is not allowed as a name.
        """
        self._admin.begin_run(name, timeout)

    def totals(self, run: str | None = None, timeout: float | None = None) -> ClusterTotals:
        """What all servers together have counted, each client once, wherever it was at home.

        A server that does not answer in time is named in `missing`, and so is an address on a proxy's list where nobody
        has answered since the proxy began. Exact for what clients have told; they tell it twice a second.

        Args:
            run: Name of the experiment; None is the one that is counted now.

        Raises:
            MemoireTimeout: no server answered.
            Refused: the servers that answered know no such run.
        """
        return self._admin.totals(run, timeout)

    def accounts(
        self, run: str | None = None, timeout: float | None = None, servers: Sequence[str] | None = None
    ) -> dict[str, ServerAccounts | MemoireError]:
        """Every server's accounts of a run, by its name, or why there are none.

        Args:
            run: Name of the experiment; None is the one that each server counts now.
            servers: Names of those to ask; None asks all.
        """
        return self._admin.accounts(run, timeout, servers)

    def ask(
        self, bodies: Mapping[str, messages.Body], timeout: float | None = None
    ) -> dict[str, messages.Body | MemoireError]:
        """One request to each of some servers, by their names, all at once; the answers, or why there are none.

        Raises:
            ParameterError: a name is none of the servers'.
            Closed: the reader was closed.
        """
        return self._admin.ask(bodies, timeout)

    def snapshot(self, name: str, timeout: float | None = 600.0) -> dict[str, messages.Snapshot | MemoireError]:
        """Have every server write what it holds into its own state folder, as `snapshots/NAME.snapshot`, while it goes
        on; each server's answer when its file is on disk, or why it is not there.

        Args:
            name: Letters, digits, "_", "." and "-", at most 100. A file of this name is replaced.

        Raises:
            MemoireTimeout: an address leads to nobody, so that a server would not hear of it; nothing was ordered.
        """
        return self._admin.snapshot(name, timeout)

    def tell(self, name: str, body: messages.Body, timeout: float | None = None) -> messages.Taken:
        """One request that is answered by TAKEN to one server.

        Raises:
            MemoireTimeout: it did not answer in time.
            Refused: it does not do it.
        """
        return self._admin.tell(name, body, timeout)
