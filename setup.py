"""Build of the compiled modules, each for the abi3; MEMOIRE_CHECKED=1 turns on bounds checks and assertions.

Everything else is in pyproject.toml. The generated C goes to the build folder, so the source tree has no C file, and a
checked build (`--build-base build/checked`) lies beside the plain one.
"""

import os

import numpy
from setuptools import Extension, setup

MODULES = (
    "memoire._core",
    "memoire.net._multipart",
    "memoire.tables.caches._draw",
    "memoire.wire._bytes",
    "memoire.wire._container",
)
CHECKED = os.environ.get("MEMOIRE_CHECKED") == "1"
ABI = "0x030B0000"  # CPython 3.11: the first limited API with the buffer protocol
DIRECTIVES = {
    "language_level": "3",
    "boundscheck": CHECKED,
    "wraparound": False,
    "initializedcheck": CHECKED,
    "cdivision": not CHECKED,
    "overflowcheck": False,
    # Calls are faster without binding: the limited API has no vectorcall for Cython's own function type, which needs a
    # tuple for each call. The signatures are in the docstrings, where inspect reads them.
    "binding": False,
    "embedsignature": True,
    "embedsignature.format": "clinic",
    "autotestdict": False,
}


def compiled(name: str) -> Extension:
    """Return the extension of a module, built from the .pyx of the same name."""
    extension = Extension(
        name,
        [name.replace(".", "/") + ".pyx"],
        include_dirs=[numpy.get_include(), "memoire/_kernels"],
        define_macros=[
            ("Py_LIMITED_API", ABI),
            ("CYTHON_LIMITED_API", "1"),
            ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
            ("NPY_TARGET_VERSION", "NPY_1_23_API_VERSION"),
            ("MEMOIRE_CHECKED" if CHECKED else "CYTHON_WITHOUT_ASSERTIONS", "1"),
        ],
        # The checked build finds mistakes: it is quick to compile and has the C library's buffer checks, which need -O.
        extra_compile_args=["-std=c11", *(["-O1", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"] if CHECKED else ["-O3"])],
        py_limited_api=True,
    )
    # If Cython is installed, setuptools uses Cython's build_ext, which reads these two.
    extension.cython_c_in_temp = True
    extension.cython_directives = DIRECTIVES
    return extension


setup(
    ext_modules=[compiled(name) for name in MODULES],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
