"""Local training, one way per file."""
