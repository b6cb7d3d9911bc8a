"""How commands reach Redis."""
