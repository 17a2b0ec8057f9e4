"""From a model and a sample batch to a `Workload`."""
