"""Converts values to payloads and back: serialization, compression, and what options add.

`codec.PayloadCodec` is the way in for the flow and for tools; the other modules are its parts.
"""
