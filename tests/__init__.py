"""Tests, one folder for each kind; see CONTRIBUTING.md."""
