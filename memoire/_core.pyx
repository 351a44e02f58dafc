"""The loops: entry store, trees, TD(lambda), windows, cache building, draws over held caches, gathering, checksum."""

cimport numpy as cnp

import numpy as np

cnp.import_array()

# ---------------------------------------------------------------------------------------------------------- engine


# ----------------------------------------------------------------------------------------------------- wire and pool
