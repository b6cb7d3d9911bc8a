"""Leases: the right to run until a deadline, extended by the heartbeat of a process or event loop.

The record holds the deadline, by the server's clock; before the deadline, no other execution
begins. The holder cannot read that clock. It uses its own (`lease.clock`) and takes the pessimistic
view: a lease is *trusted until* the moment at which the request that granted it was **sent**, plus
the length of the lease, minus a margin for clocks that run at different rates. While a lease is
trusted, no other execution can have begun. Afterwards another one may have begun. Only the server
can detect that: it compares tokens and refuses a stale outcome.

If a host pauses a virtual machine and stops its clocks, the machine trusts an expired lease until
its next heartbeat. Then only the fencing token protects the downstream system.

Each store has a thread or timer of its own: a store that does not reply delays no other. The
heartbeat extends each lease after a third of its length, so two requests may fail before the lease
is no longer trusted. It extends the lease of one token, not of the execution that currently holds
the key.
"""
