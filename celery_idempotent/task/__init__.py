"""Who may call the gate: each file one kind of caller."""
