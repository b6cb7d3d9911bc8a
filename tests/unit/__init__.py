"""Pure rooms and pure parts: no server, and no process but for golden keys and a refused start."""
