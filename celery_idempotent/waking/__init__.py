"""Delivers a message that was put back because of a conflict as soon as its key is free."""
