"""What each rank should do: pure functions of what was measured."""
