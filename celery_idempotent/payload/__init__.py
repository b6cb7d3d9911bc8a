"""Values to bytes and back: serialization, compression, encryption, offload."""
