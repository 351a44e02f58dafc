"""Compiles TorchRL's extension out of the sources in its wheel, for the torch that is here: a wheel fits only one.

Without it TorchRL has no priorities. It takes a minute and a C++ compiler, once. Where torch finds a GPU, CUDA's
compiler makes the trees that are on it, too.
"""

import subprocess
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

SOURCES, ON_GPU = ("pybind.cpp", "utils.cpp"), "cuda_segment_tree.cu"


def build() -> None:
    """Write the extension beside the package, if the one that is there does not fit."""
    try:
        import torchrl._torchrl as there
    except ImportError:
        there = None
    has_gpu = torch.cuda.is_available()
    if there is None or (has_gpu and not hasattr(there, "CudaSumSegmentTreeFp32")):
        compile_for(has_gpu)


def compile_for(has_gpu: bool) -> None:
    """The extension, with or without trees on the GPU."""
    from torch.utils.cpp_extension import include_paths, library_paths

    found = find_spec("torchrl")
    assert found is not None and found.submodule_search_locations is not None
    folder, kind = Path(found.submodule_search_locations[0]), "cuda" if has_gpu else "cpu"
    flags = ["-O3", "-std=c++20", "-DTORCH_EXTENSION_NAME=_torchrl", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", *["-DWITH_CUDA"] * has_gpu]
    flags += [f"-I{path}" for path in (*include_paths(kind), sysconfig.get_paths()["include"])]
    libraries = [f"-L{path}" for path in library_paths(kind)] + ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    libraries += ["-ltorch_cuda", "-lc10_cuda"] if has_gpu else []
    with tempfile.TemporaryDirectory() as made:
        compilers = {name: ["g++", "-fPIC"] for name in SOURCES}
        if has_gpu:
            compilers[ON_GPU] = ["nvcc", "-Xcompiler", "-fPIC", "-arch=native", "--expt-relaxed-constexpr"]
        working = [
            subprocess.Popen([*compiler, *flags, "-c", folder / "csrc" / name, "-o", f"{made}/{name}.o"])
            for name, compiler in compilers.items()
        ]
        ended = [process.wait() for process in working]
        if any(ended):
            raise SystemExit("TorchRL's extension cannot be compiled here: what its compilers say is above")
        extension = folder / f"_torchrl{sysconfig.get_config_var('EXT_SUFFIX')}"
        draft = extension.with_suffix(".part")
        objects = map(str, Path(made).glob("*.o"))
        subprocess.run(["g++", "-shared", *objects, *libraries, "-o", draft], check=True)
        draft.replace(extension)


if __name__ == "__main__":
    build()
