"""What hides single updates from the server, one way per file."""
