"""For Django: middleware for requests with an Idempotency-Key, and the table of SQL outcomes."""
