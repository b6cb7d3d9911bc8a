"""The executor without a server."""
