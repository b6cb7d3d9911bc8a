"""The apps of the tests, with one framework each."""
