"""A payments API with retries that are safe: FastAPI handles requests, Celery charges."""
