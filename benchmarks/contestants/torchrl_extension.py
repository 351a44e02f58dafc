"""Compiles TorchRL's extension out of the sources in its wheel, for the torch that is here: a wheel fits only one.

Without it TorchRL has no priorities. It takes a minute and a C++ compiler, once.
"""

import subprocess
import sysconfig
from importlib.util import find_spec
from pathlib import Path

SOURCES = ("pybind.cpp", "utils.cpp")


def build() -> None:
    """Write the extension beside the package, if the one that is there does not fit."""
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    try:
        import torchrl._torchrl  # noqa: F401
    except ImportError:
        found = find_spec("torchrl")
        assert found is not None and found.submodule_search_locations is not None
        folder = Path(found.submodule_search_locations[0])
        flags = ["-O3", "-std=c++20", "-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=_torchrl"]
        flags += ["-DTORCH_API_INCLUDE_EXTENSION_H"]
        flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        flags += [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
        flags += [f"-L{path}" for path in library_paths()] + ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
        made = folder / f"_torchrl{sysconfig.get_config_var('EXT_SUFFIX')}"
        draft = made.with_suffix(".part")
        sources = [str(folder / "csrc" / name) for name in SOURCES]
        subprocess.run(["g++", *sources, *flags, "-o", draft], check=True)
        draft.replace(made)


if __name__ == "__main__":
    build()
