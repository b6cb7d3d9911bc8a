"""Clients and servers: in the process of the test, and as processes of their own."""
