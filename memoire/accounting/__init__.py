"""Accounts of clients: counts of their episodes, steps and caches, each counted exactly once."""
