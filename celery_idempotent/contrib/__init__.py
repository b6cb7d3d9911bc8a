"""Optional integrations with other libraries, imported by the user."""
