"""Client-level mechanisms, one per file."""
