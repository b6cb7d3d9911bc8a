"""What the middleware decides, without a server or a store."""
