"""The conductor: plan, run what is missing, show, compare, report."""
