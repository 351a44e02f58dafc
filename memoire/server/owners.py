"""Whose key each client id belongs to: nobody else may speak for it. Pure."""

from __future__ import annotations

from collections import OrderedDict

from memoire.accounting.account import Account
from memoire.errors import ProtocolError
from memoire.wire.identity import NO_CLIENT

from .state import ServerState

MAX_OWNERS = 1 << 14
"""Client ids without an account, of readers and such, that are known to belong to a key."""


class ClientOwners:
    """Owners of client ids: accounts know theirs, and ids without an account are kept here."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._owners: OrderedDict[bytes, str] = OrderedDict()

    def check(self, client: bytes, principal: str) -> None:
        """Bind a client id to the key that uses it first, for as long as the id is known here.

        Args:
            principal: Role and name of the key that a message came by; "" if it came by none.

        Raises:
            ProtocolError: (code "owner") it belongs to another key.
        """
        if not principal or client == NO_CLIENT:
            return
        account = self._state.ledger.find(client)
        owner = self._owners.get(client, "") if account is None else account.owner
        if owner == principal:
            return
        if owner:
            raise ProtocolError("owner", f"client {client.hex()[:8]} belongs to the key {owner}, not {principal}")
        if account is not None:
            account.owner = principal
            self._state.committer.touch(self._state.run.name, account)
        else:
            self._owners[client] = principal
            while len(self._owners) > MAX_OWNERS:
                self._owners.popitem(last=False)

    def move_to(self, account: Account) -> None:
        """The client has an account now, which knows its owner from here on."""
        account.owner = account.owner or self._owners.pop(account.client, "")
