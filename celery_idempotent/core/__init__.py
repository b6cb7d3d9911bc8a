"""What runs a task with default options."""
