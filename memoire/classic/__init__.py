"""The seed documents' classes over today's engine, so that a script written from their API page runs.

`ReplayMemory`, `ReplayMemoryServer` and `ReplayMemoryClient` keep that page's names, argument order and return values,
and hold no logic of their own: entries, windows and weights are `replay.memory.Memory`'s, sockets are
`server.server.Server`'s and `client.client.Client`'s. What the page leaves open is settled in docs/contract.md, row by
row. New programs are shorter with `Buffer`, `connect` and `Server`.
"""

from .fields import FLAGS as FLAGS
