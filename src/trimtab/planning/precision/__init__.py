"""Which operators of which ranks are lowered, and to what."""
