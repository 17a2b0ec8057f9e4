"""Find units in the structure of any model, and check each split against the unsplit block."""
