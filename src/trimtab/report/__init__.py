"""What happened, for people to read."""
