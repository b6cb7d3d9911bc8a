"""What the flow runs on: a thread that blocks, or an event loop."""
