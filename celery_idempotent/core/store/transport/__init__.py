"""How commands reach Redis: `server` for one server, `client` through a redis-py client."""
