"""What the middleware for ASGI, WSGI and Django have in common: everything but their I/O."""
