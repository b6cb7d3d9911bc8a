"""The longer examples of the pages, which quote these files."""
