"""The public verbs, one file each. They act in place and return the model."""
