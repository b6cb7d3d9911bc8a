"""Options of one call: which exist, and which are misspelt or in a wrong place."""
