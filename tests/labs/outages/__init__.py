"""Outages of the store while real workers work: what is lost, and what is done twice."""
