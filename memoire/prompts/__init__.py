"""Prompts for language models: the ledger of one table, and the calls of those who use it. No lock, no socket."""
