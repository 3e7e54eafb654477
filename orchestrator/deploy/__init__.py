"""Networks as they are deployed: shrunk, in a format that others load, held to the masked network, measured."""
