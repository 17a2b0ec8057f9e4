"""What happened: a run's events, and what is made of them (the live view, the summary, traces, the page)."""
