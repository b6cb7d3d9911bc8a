"""The contract of records, on every kind of Redis that is installed."""
