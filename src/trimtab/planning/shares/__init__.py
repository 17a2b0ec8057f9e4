"""How many samples of the global batch each data-parallel rank takes."""
