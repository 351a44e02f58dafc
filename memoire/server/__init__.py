"""A server: it takes caches in, and learners draw from it."""
