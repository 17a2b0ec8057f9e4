"""The figures: every claim as a ratio measured in one run."""
