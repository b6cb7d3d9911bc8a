"""Tests of unit/doctor."""
