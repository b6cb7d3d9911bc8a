"""The records' contract, over every kind of Redis that is here."""
