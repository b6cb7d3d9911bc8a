"""For Django: middleware for requests with an Idempotency-Key."""
