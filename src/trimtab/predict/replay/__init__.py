"""A training step replayed event by event, and its timeline."""
