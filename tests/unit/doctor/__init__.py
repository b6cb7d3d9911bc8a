"""Tests of the checks of `doctor`."""
