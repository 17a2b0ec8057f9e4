"""Sequence parallelism: norms, dropout and residuals of a layer work on each rank's places of the sequence."""
