"""A consumer that filters duplicates out of a stream and forwards the rest, a batch at a time."""
