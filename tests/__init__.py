"""Tests, one folder for each kind; see .github/CONTRIBUTING.md."""
