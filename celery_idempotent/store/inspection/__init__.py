"""Reading many records, and facts about the server, for people and monitoring."""
