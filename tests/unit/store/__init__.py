"""Scripts, commands, transports and URLs."""
