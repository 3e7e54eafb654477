"""Finished stages, durable or not there: the commit protocol, backends, leases, retention."""
