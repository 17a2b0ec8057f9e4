"""Named models and the data they train on."""
