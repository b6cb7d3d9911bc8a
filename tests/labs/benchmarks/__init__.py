"""What the gate costs: counts first, seconds second, each beside what was asked.

``make bench`` runs every measure of :mod:`tests.labs.benchmarks.measures`, each in a process and on
servers of its own, and says which goals are met. A measure lets all contestants take turns in
rounds, so that each of them sees the machine as it is, and gives medians with their middle half.
"""
