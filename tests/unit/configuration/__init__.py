"""Tests of unit/configuration."""
