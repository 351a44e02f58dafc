"""Kernels that compiled modules share: headers and declarations, with nothing to import at run time."""
