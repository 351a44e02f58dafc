"""What clients have done, counted exactly once."""
