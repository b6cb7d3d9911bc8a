"""Ways to make things go wrong."""
