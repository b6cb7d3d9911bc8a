"""The records in Redis; apart from `testing`, only this package imports redis-py."""
