"""The middleware behind real web servers."""
