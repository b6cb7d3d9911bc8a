"""Tests of key derivation."""
