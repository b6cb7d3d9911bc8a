"""The store: the only room that talks to Redis."""
