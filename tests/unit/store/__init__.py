"""Scripts as text, outcomes as bytes, URLs."""
