"""What the gate costs, measured: ``make bench``."""
