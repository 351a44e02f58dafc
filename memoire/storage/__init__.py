"""State folders, snapshots and logs on disk."""
