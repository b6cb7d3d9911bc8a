"""Leases: the right to run until a deadline, extended by the heartbeat of a process or event loop.

The record has the deadline, by the server's clock; before it, no other execution begins. The holder
cannot read that clock. It uses its own (`lease.clock`) and takes the pessimistic view: a lease is
*trusted until* the moment at which the request that granted it was **sent**, plus the length of the
lease, minus a margin for clocks that run at different rates. While a lease is trusted, no other
execution can have begun. Afterwards one may have, which only the server can detect: it compares
tokens and refuses a stale outcome.

If a virtual machine is paused by its host and its clocks stop as well, it trusts an expired lease
until its next heartbeat. Only the fencing token protects then, in the system downstream.

Each store has a thread or timer of its own, so that one that does not reply delays no other.
A heartbeat extends every lease after a third of its length, so that two requests may fail before it
is no longer trusted. It extends the lease of one token, not of whichever execution holds the key.
"""
