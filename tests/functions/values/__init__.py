"""Values that functions, blocks and steps return."""
