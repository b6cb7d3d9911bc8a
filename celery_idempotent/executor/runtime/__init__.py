"""What the flow runs on: threads or an event loop."""
