"""Whose key each client id belongs to: nobody else may speak for it. Pure."""

from __future__ import annotations

from memoire.accounting.account import Account
from memoire.security.throttle import IdOwners, check_owner
from memoire.wire.identity import NO_CLIENT

from .state import ServerState


class ClientOwners:
    """Owners of client ids: accounts know theirs, and ids without an account are kept here."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._owners = IdOwners()

    def check(self, client: bytes, principal: str, now: float) -> None:
        """Bind a client id to the key that uses it first, for as long as the id is known here.

        Args:
            principal: Role and name of the key that a message came by; "" if it came by none.

        Raises:
            ProtocolError: it belongs to another key (code "owner"), or too many ids are known (code "busy").
        """
        if not principal or client == NO_CLIENT:
            return
        account = self._state.ledger.find(client)
        if account is None:
            self._owners.check(client, principal, now)
        elif account.owner:
            check_owner(client, account.owner, principal)
        else:
            account.owner = principal
            self._state.committer.touch(self._state.run.name, account)

    def move_to(self, account: Account) -> None:
        """The client has an account now, which knows its owner from here on."""
        account.owner = account.owner or self._owners.pop(account.client)
