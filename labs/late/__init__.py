"""What happens if Redis executes a command late: packets that are held back, and a frozen Redis."""
