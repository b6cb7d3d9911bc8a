"""Settings, messages and arguments, through real Celery apps."""
