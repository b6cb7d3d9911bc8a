"""The public interface, frozen: a change to it shows up as a difference in ``snapshot.txt``."""
