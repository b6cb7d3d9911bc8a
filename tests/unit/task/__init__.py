"""Tests of message headers and of the times of messages."""
