"""The versions that are supported, each tried in an environment of its own: ``make matrix``."""
