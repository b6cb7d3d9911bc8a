"""Settings of tasks and stores, read from the app and its tasks."""
