"""The gate: begin, then run, replay or refuse, then settle."""
