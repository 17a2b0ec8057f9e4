"""A plan made by the job itself, while it trains."""
