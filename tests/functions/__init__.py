"""The engine for callers that are not tasks, on real servers."""
