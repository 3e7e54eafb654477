"""The store of finished stages: commits that are whole or absent, backends, leases, retention."""
