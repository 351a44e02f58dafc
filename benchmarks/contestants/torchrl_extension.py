"""Compilation of TorchRL's extension from the sources in its wheel, for the installed torch: a wheel fits one torch.

TorchRL has no priorities without the extension. The compilation takes a minute and a C++ compiler, once. If torch finds
a GPU, CUDA's compiler also compiles the trees for the GPU.
"""

import subprocess
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

SOURCES, ON_GPU = ("pybind.cpp", "utils.cpp"), "cuda_segment_tree.cu"


def build() -> None:
    """Write the extension into the package, if the existing extension does not fit."""
    try:
        import torchrl._torchrl as extension
    except ImportError:
        extension = None
    has_gpu = torch.cuda.is_available()
    if extension is None or (has_gpu and not hasattr(extension, "CudaSumSegmentTreeFp32")):
        compile_for(has_gpu)


def compile_for(has_gpu: bool) -> None:
    """Compile the extension, with or without trees on the GPU."""
    from torch.utils.cpp_extension import include_paths, library_paths

    spec = find_spec("torchrl")
    assert spec is not None and spec.submodule_search_locations is not None
    folder, kind = Path(spec.submodule_search_locations[0]), "cuda" if has_gpu else "cpu"
    flags = ["-O3", "-std=c++20", "-DTORCH_EXTENSION_NAME=_torchrl", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", *["-DWITH_CUDA"] * has_gpu]
    flags += [f"-I{path}" for path in (*include_paths(kind), sysconfig.get_paths()["include"])]
    libraries = [f"-L{path}" for path in library_paths(kind)] + ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    libraries += ["-ltorch_cuda", "-lc10_cuda"] if has_gpu else []
    with tempfile.TemporaryDirectory() as output:
        compilers = {name: ["g++", "-fPIC"] for name in SOURCES}
        if has_gpu:
            compilers[ON_GPU] = ["nvcc", "-Xcompiler", "-fPIC", "-arch=native", "--expt-relaxed-constexpr"]
        working = [
            subprocess.Popen([*compiler, *flags, "-c", folder / "csrc" / name, "-o", f"{output}/{name}.o"])
            for name, compiler in compilers.items()
        ]
        ended = [process.wait() for process in working]
        if any(ended):
            raise SystemExit("TorchRL's extension cannot be compiled here: the errors of the compilers are above")
        extension = folder / f"_torchrl{sysconfig.get_config_var('EXT_SUFFIX')}"
        draft = extension.with_suffix(".part")
        objects = map(str, Path(output).glob("*.o"))
        subprocess.run(["g++", "-shared", *objects, *libraries, "-o", draft], check=True)
        draft.replace(extension)


if __name__ == "__main__":
    build()
