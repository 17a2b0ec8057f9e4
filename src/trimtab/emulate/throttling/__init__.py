"""Ways to slow a rank down."""
