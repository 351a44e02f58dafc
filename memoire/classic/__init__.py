"""The documented classes over today's memory: `memoire.ReplayMemory`, `ReplayMemoryClient`, `ReplayMemoryServer`."""

from .classic import FLAGS as FLAGS
