"""The figures of a comparison: what each shows, as plain data, and how it is drawn."""
