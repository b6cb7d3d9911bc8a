"""What the laboratories share: packets that arrive late."""
