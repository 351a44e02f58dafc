"""Setup of a checkout: a private .venv with memoire built in it. Run by the Makefile; standard library only.

    python3 tools/setup_venv.py run       packages for `memoire demo`
    python3 tools/setup_venv.py dev       also packages for tests, lint and benchmarks
    python3 tools/setup_venv.py checked   also a second build, with bounds checks, in build/checked
    python3 tools/setup_venv.py ppo       packages for `make demo-ppo`: Box2D, and torch as below
    python3 tools/setup_venv.py torch     packages for tests, and torch in the folder $MEMOIRE_TORCH or build/torch

Each step writes a stamp with a hash of its inputs, so that a second run skips the step. Old Pythons must be able to
parse this file, so that the error can name the version that is needed.
"""

import contextlib
import glob
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMPS = os.path.join(VENV, "stamps")
PYTHON = os.path.join(VENV, "bin", "python")
OLDEST = (3, 11)
TICK = 1.0
"""Seconds between two updates of the counter on a terminal."""
MIN_REPORTED_TIME = 2.0
"""Seconds from which a step's time is printed if the output is no terminal."""
with open(os.path.join(ROOT, "Makefile")) as makefile:
    NAMES = re.search("^PYTHONS := (.*)$", makefile.read(), re.MULTILINE).group(1).split()


def give_up(problem, advice):
    sys.exit("\nmemoire cannot be set up: %s\n%s\n" % (problem, advice))


def install_hint(debian, fedora, alpine, mac):
    """Return the install command for this system, or all four commands if the system is unknown."""
    try:
        with open("/etc/os-release") as release:
            system = release.read().lower()
    except OSError:
        system = ""
    hints = [
        (("debian", "ubuntu"), "sudo apt-get install " + debian),
        (("fedora", "rhel", "centos"), "sudo dnf install " + fedora),
        (("alpine",), "sudo apk add " + alpine),
        (("darwin",), mac),
    ]
    if platform.system() == "Darwin":
        system = "darwin"
    fitting = [command for words, command in hints if any(word in system for word in words)]
    return "Install it with one of:\n    " + "\n    ".join(fitting[:1] or [command for _, command in hints])


def check_python(oldest=OLDEST, names=NAMES):
    """Restart under one of the names if this Python is too old; exit with advice if no other one runs."""
    if sys.version_info >= oldest:
        return
    for name in names:
        path = shutil.which(name)
        if path and _runs(path):
            os.execv(path, [path] + sys.argv)
    give_up(
        "python3 is %s, and %d.%d or newer is needed." % ((platform.python_version(),) + oldest),
        "If one is installed under another name, name it: make PYTHON=/path/to/python3.12 ...\n"
        + install_hint(
            "python3.11 python3.11-venv python3.11-dev", "python3.12-devel", "python3-dev", "brew install python"
        ),
    )


def _runs(path):
    """Return True if the program runs: pyenv has shims for versions that are not selected, too."""
    return subprocess.call([path, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def check_venv():
    try:
        import ensurepip  # noqa: F401  Debian leaves it out of python3
        import venv  # noqa: F401
    except ImportError:
        version = "python%d.%d-venv" % sys.version_info[:2]
        give_up(
            "%s has no venv module (or no ensurepip)." % sys.executable,
            install_hint("python3-venv  (or %s)" % version, "python3-libs", "python3", "brew install python"),
        )


def compiler():
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def check_compiler():
    """Compile a small file against Python's headers, the only proof that the compiler works."""
    command = compiler()
    if not shutil.which(command[0]):
        give_up(
            "there is no C compiler (%s)." % command[0],
            install_hint("gcc libc6-dev", "gcc", "gcc musl-dev", "xcode-select --install")
            + "\nIf you have another one, name it: make CC=clang ...",
        )
    include = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "probe.c")
        for header in ("stdio.h", "Python.h"):
            with open(source, "w") as file:
                file.write("#include <%s>\nint probe(void) { return 0; }\n" % header)
            tried = subprocess.run(
                command + ["-c", "-I" + include, source, "-o", os.path.join(folder, "probe.o")],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            if tried.returncode == 0:
                continue
            if header == "stdio.h":
                problem = "the C compiler (%s) cannot compile a file that includes stdio.h." % " ".join(command)
                hint = install_hint("gcc libc6-dev", "gcc glibc-devel", "gcc musl-dev", "xcode-select --install")
            else:
                problem = "Python's headers are missing (no usable Python.h in %s)." % include
                hint = install_hint(
                    "python3-dev  (or python%d.%d-dev)" % sys.version_info[:2],
                    "python3-devel",
                    "python3-dev",
                    "brew install python",
                )
            give_up(problem, hint + "\nOutput of the compiler:\n" + tried.stdout.decode(errors="replace"))


def digest(*parts):
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def content(*patterns):
    files = sorted(path for pattern in patterns for path in glob.glob(os.path.join(ROOT, pattern), recursive=True))
    return digest(*[path + "\0" + open(path, encoding="utf-8").read() for path in files])


def is_done(step, key):
    try:
        with open(os.path.join(STAMPS, step)) as stamp:
            return stamp.read() == key
    except OSError:
        return False


def done(step, key):
    os.makedirs(STAMPS, exist_ok=True)
    with open(os.path.join(STAMPS, step), "w") as stamp:
        stamp.write(key)


def call(what, *command, **environment):
    """Run a command in the checkout and print the time that it takes; print its output only if it fails."""
    variables = dict(os.environ, **environment)
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            follow(what, process, began, sys.stdout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode:
            output.seek(0)
            sys.stdout.write(output.read().decode(errors="replace"))
            give_up("a step failed: %s." % what, "The command was: " + " ".join(map(shlex.quote, command)))


def follow(what, process, began, out):
    """Print the step's name until the process ends: with a counter of seconds on a terminal, else once."""
    is_live = out.isatty()
    out.write("memoire: " + what + ("" if is_live else "\n"))
    out.flush()
    while True:
        try:
            process.wait(TICK if is_live else None)
        except subprocess.TimeoutExpired:
            pass
        seconds = "%.0f s" % (time.monotonic() - began)
        if is_live:
            out.write("\rmemoire: %s ... %s" % (what, seconds) + ("" if process.returncode is None else "\n"))
            out.flush()
        elif time.monotonic() - began >= MIN_REPORTED_TIME:
            out.write("memoire: that took %s\n" % seconds)
        if process.returncode is not None:
            return


def pip_install(what, *packages):
    call(what, PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", *packages)


def make_venv():
    key = digest(sys.version, sys.base_prefix, ROOT)
    if is_done("venv", key):
        return key
    check_venv()
    shutil.rmtree(VENV, ignore_errors=True)
    call("making .venv with Python %s" % platform.python_version(), sys.executable, "-m", "venv", VENV)
    done("venv", key)
    return key


def install(project, above):
    """Install the package, editable, with the demo's dependencies; later builds are a step of their own."""
    key = digest(above, content("pyproject.toml"))
    if is_done("run", key):
        return key
    check_compiler()
    pip_install("installing the build's dependencies", *project["build-system"]["requires"])
    pip_install("building and installing memoire", "--no-build-isolation", "--editable", ".[lz4,demo,dashboard]")
    done("run", key)
    done("build", build_key(key))
    return key


def build_key(above):
    return digest(
        above, " ".join(compiler()), content("setup.py", "memoire/**/*.pyx", "memoire/**/*.pxd", "memoire/**/*.h")
    )


def build(above):
    key = build_key(above)
    if not is_done("build", key):
        check_compiler()
        call("building memoire", PYTHON, "setup.py", "-q", "build_ext", "--inplace", "--force")
        done("build", key)


def are_compiled(lib):
    """Return True if the folder has the compiled module of each .pyx of the package."""
    sources = glob.glob(os.path.join(ROOT, "memoire", "**", "*.pyx"), recursive=True)
    names = [os.path.relpath(source, ROOT)[: -len(".pyx")] for source in sources]
    return all(glob.glob(os.path.join(lib, name + ".*so")) for name in names)


def build_checked(above):
    """Build a second copy of the package with bounds checks, for PYTHONPATH=build/checked/lib."""
    key = build_key(above)
    lib = os.path.join("build", "checked", "lib")
    if not is_done("checked", key) or not are_compiled(os.path.join(ROOT, lib)):
        check_compiler()
        command = [PYTHON, "setup.py", "-q", "build", "--build-base", "build/checked", "--build-lib", lib, "--force"]
        call("building memoire with bounds checks", *command, MEMOIRE_CHECKED="1")
        done("checked", key)
    else:  # The script copies Python files each time: copying is quick, and no copy can be stale
        for stale in glob.glob(os.path.join(ROOT, lib, "memoire", "**", "*.py"), recursive=True):
            os.remove(stale)
        shutil.copytree(
            os.path.join(ROOT, "memoire"),
            os.path.join(ROOT, lib, "memoire"),
            ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.pyx", "*.pxd", "*.h"),
            dirs_exist_ok=True,
        )


def install_group(name, what, project, above):
    packages = project["dependency-groups"][name]
    key = digest(above, *packages)
    if not is_done(name, key):
        pip_install(what, *packages)
        done(name, key)


def install_torch(project):
    """Install torch and its dependencies into a separate folder that several checkouts may share."""
    folder = os.path.abspath(os.environ.get("MEMOIRE_TORCH") or os.path.join(ROOT, "build", "torch"))
    stamp, key = os.path.join(folder, "memoire-stamp"), digest(sys.version, *project["dependency-groups"]["torch"])
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with alone(folder + ".lock"), tempfile.NamedTemporaryFile(suffix=".txt") as versions:
        with contextlib.suppress(OSError), open(stamp) as file:
            if file.read() == key:
                return
        shutil.rmtree(folder, ignore_errors=True)
        print("memoire: torch and its dependencies take 1 GB in %s, or 5 GB with CUDA" % folder)
        # Packages that .venv has get the same version here, since this folder comes first on the path.
        subprocess.run([PYTHON, "-m", "pip", "freeze", "--exclude-editable"], stdout=versions, check=True)
        limits = ["--target=" + folder, "--constraint=" + versions.name]
        pip_install("installing torch", *limits, *project["dependency-groups"]["torch"])
        with open(stamp, "w") as file:
            file.write(key)


@contextlib.contextmanager
def alone(path=""):
    """Hold the checkout's lock, or the lock at `path`, so that two `make` wait for each other."""
    import fcntl

    with open(path or os.path.join(ROOT, ".venv.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(target):
    check_python()
    import tomllib

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)
    with alone():
        key = install(project, make_venv())
        build(key)
        if target in ("dev", "checked", "torch"):
            install_group("dev", "installing the development tools", project, key)
        if target == "ppo":
            install_group("ppo", "installing Box2D", project, key)
        if target in ("torch", "ppo"):
            install_torch(project)
        if target == "checked":
            build_checked(key)


if __name__ == "__main__":
    main(sys.argv[1])
