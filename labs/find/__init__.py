"""How soon the dashboard finds a record among many."""
