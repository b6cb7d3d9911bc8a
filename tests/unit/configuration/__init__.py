"""Tests of the configuration of apps and tasks."""
