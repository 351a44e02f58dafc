"""The loops: entry store, trees, TD(lambda), windows, cache building, draws over held caches, gathering, checksum."""

cimport numpy as cnp

import numpy as np

cnp.import_array()

cdef extern from *:
    """
    #ifdef MEMOIRE_CHECKED
    #define MEMOIRE_IS_CHECKED 1
    #else
    #define MEMOIRE_IS_CHECKED 0
    #endif
    """
    int MEMOIRE_IS_CHECKED

CHECKED = MEMOIRE_IS_CHECKED == 1

# ---------------------------------------------------------------------------------------------------------- engine


# ----------------------------------------------------------------------------------------------------- wire and pool
