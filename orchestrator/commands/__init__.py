"""The commands beside a sweep: compare, export, gate, sync, store. Each is a module with a `main`."""
