"""Network faults, injected by a TCP proxy."""
