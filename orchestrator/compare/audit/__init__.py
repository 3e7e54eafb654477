"""The checklist that a pruning comparison should pass: its rules, and how each is answered."""
