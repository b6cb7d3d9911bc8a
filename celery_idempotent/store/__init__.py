"""The records in Redis. This package alone imports redis-py."""
