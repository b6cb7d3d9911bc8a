"""The common part of the ASGI, WSGI and Django middleware: everything but their I/O."""
