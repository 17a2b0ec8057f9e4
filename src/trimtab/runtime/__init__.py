"""Where the head and the hands meet: measuring, deciding, applying."""
