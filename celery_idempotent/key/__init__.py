"""Keys: from a task's arguments to the name of its record. Pure, no I/O."""
