"""Networks that leave: shrunk, in a format that others load, held to the outputs of the masked network."""
