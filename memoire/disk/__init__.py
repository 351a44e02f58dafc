"""What a server and others keep on disk."""
