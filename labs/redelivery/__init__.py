"""How soon the messages of a killed worker begin elsewhere, under load."""
