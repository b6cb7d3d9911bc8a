"""The HTTP middleware: its rules, and its behaviour behind real servers."""
