"""Kernels that compiled modules share: headers and declarations, without a module to import at run time."""
