"""Where one Redis and a Cluster of three bend: connections, waiters, leases, failover, memory."""
