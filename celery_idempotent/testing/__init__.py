"""Private Redis-compatible servers for the tests of applications."""
