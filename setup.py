"""Build `memoire._core`: one abi3 extension; MEMOIRE_CHECKED=1 builds it with bounds checks and assertions on.

The generated C goes to the build folder: a checked build (`--build-base build/checked`) lies beside the plain one, and
no C file is ever in the source tree.
"""

import os

import numpy
from setuptools import Extension, setup

CHECKED = os.environ.get("MEMOIRE_CHECKED") == "1"
ABI = "0x030B0000"  # CPython 3.11: the first limited API with the buffer protocol

core = Extension(
    "memoire._core",
    ["memoire/_core.pyx"],
    include_dirs=[numpy.get_include(), "memoire/_kernels"],
    define_macros=[
        ("Py_LIMITED_API", ABI),
        ("CYTHON_LIMITED_API", "1"),
        ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
        ("NPY_TARGET_VERSION", "NPY_1_23_API_VERSION"),
        ("MEMOIRE_CHECKED" if CHECKED else "CYTHON_WITHOUT_ASSERTIONS", "1"),
    ],
    # The checked build is for finding mistakes: quick to compile, with the C library's buffer checks (they need -O).
    extra_compile_args=["-std=c11", *(["-O1", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"] if CHECKED else ["-O3"])],
    py_limited_api=True,
)
# setuptools' build_ext is Cython's where Cython is installed, and reads these two.
core.cython_c_in_temp = True
core.cython_directives = {
    "language_level": "3",
    "boundscheck": CHECKED,
    "wraparound": False,
    "initializedcheck": CHECKED,
    "cdivision": not CHECKED,
    "overflowcheck": False,
    # Functions without what Python's own have beside their code are called quicker under the limited API, which has no
    # vectorcall for Cython's: a tuple less for each call. Signatures are in their docstrings, where inspect reads them.
    "binding": False,
    "embedsignature": True,
    "embedsignature.format": "clinic",
    "autotestdict": False,
}

setup(
    ext_modules=[core],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
