"""What a worker adds to its tasks: start-up checks, inspect commands, events and metrics."""
