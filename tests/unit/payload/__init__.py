"""Tests of unit/payload."""
