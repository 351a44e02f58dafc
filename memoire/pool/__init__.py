"""Caches and episodes that a server holds, and draws from them."""
