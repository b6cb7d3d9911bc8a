"""A consumer that forwards messages in batches, without their duplicates."""
