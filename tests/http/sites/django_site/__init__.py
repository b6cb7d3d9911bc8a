"""A Django project with sessions, CSRF protection and the middleware."""
