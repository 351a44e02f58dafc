"""Programs that learn."""
