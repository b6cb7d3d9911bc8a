"""What operators see of a worker: start-up checks, inspect commands, events and statistics."""
