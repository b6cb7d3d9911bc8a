"""A snapshot of the public interface: every change shows as a difference in ``snapshot.txt``."""
