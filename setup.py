"""Build `memoire._core`: one abi3 extension; MEMOIRE_CHECKED=1 builds it with bounds checks on."""

import os

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

CHECKED = os.environ.get("MEMOIRE_CHECKED") == "1"
ABI = "0x030B0000"  # CPython 3.11: the first limited API with the buffer protocol

core = Extension(
    "memoire._core",
    ["memoire/_core.pyx"],
    include_dirs=[numpy.get_include()],
    define_macros=[
        ("Py_LIMITED_API", ABI),
        ("CYTHON_LIMITED_API", "1"),
        ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
        ("NPY_TARGET_VERSION", "NPY_1_23_API_VERSION"),
    ],
    extra_compile_args=["-O3", "-std=c11"],
    py_limited_api=True,
)

setup(
    ext_modules=cythonize(
        [core],
        compiler_directives={
            "language_level": "3",
            "boundscheck": CHECKED,
            "wraparound": False,
            "initializedcheck": CHECKED,
            "cdivision": not CHECKED,
            "overflowcheck": False,
            "embedsignature": False,
        },
    ),
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
