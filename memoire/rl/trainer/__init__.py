"""A trainer with a memory of its own, and the workers that send it samples."""
