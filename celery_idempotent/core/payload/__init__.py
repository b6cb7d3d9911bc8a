"""Converts values to bytes and back: serialization, compression, offload."""
