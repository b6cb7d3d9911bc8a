"""Leases: the right to run until a deadline, kept alive by one thread a process.

The server's record says until when an execution may run; no one else begins before. The holder
cannot read that clock, so it goes by its own, which is never set back (and on Linux goes on while
the machine is suspended: `lease.clock`), and takes the pessimistic view: a
lease is *trusted until* the moment at which the request that granted it was **sent**, plus the
lease, minus a margin for clocks that run at different rates. As long as a lease is trusted, no
rival can have begun. Once it is not, one may have, and only the server knows: the token decides,
and a stale holder's outcome is refused.

A virtual machine that is paused by its host, and whose clocks stand still with it, knows nothing
of the time that it missed: it trusts a lease that is over until its heartbeat has asked. Only the
token helps there, in the system downstream.

A heartbeat extends every lease when a third of it is over, so two may fail before trust ends. It
extends exactly the execution it was told of (its token), never "whatever holds this key now".
"""
