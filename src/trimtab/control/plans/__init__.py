"""Following a plan: the plan a job runs under, and switching to another one on all ranks at once."""
