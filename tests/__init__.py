"""One folder a kind: unit, store (real servers), worker (real processes), examples."""
