"""C sources of the kernels; each kernel is a file."""
