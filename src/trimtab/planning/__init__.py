"""Every decision, as pure functions of what was measured and predicted; and the plan they add up to."""
