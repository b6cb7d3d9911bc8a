"""Workers of two versions of this library on one queue."""
