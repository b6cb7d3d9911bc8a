"""Purges millions of expired rows while a writer claims rows of its own."""
