"""What the laboratories share: ledgers, packets that arrive late, processes, tables."""
