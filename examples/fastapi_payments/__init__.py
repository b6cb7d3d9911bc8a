"""A payments API whose clients may ask again: FastAPI in front, Celery behind."""
