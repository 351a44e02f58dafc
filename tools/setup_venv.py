"""Set up this checkout: a private .venv with memoire built in it. Run by the Makefile; standard library only.

    python3 tools/setup_venv.py run       what `memoire demo` needs
    python3 tools/setup_venv.py dev       and what tests, lint and benchmarks need
    python3 tools/setup_venv.py checked   and a second build, with bounds checks, under build/checked
    python3 tools/setup_venv.py ppo       what `make demo-ppo` needs: Box2D, and torch in that folder
    python3 tools/setup_venv.py torch     what tests need, and torch in the folder that $MEMOIRE_TORCH names

Each step leaves a stamp with a hash of what it depends on: a second run finds it and does nothing. Old Pythons must be
able to read this file, or they could not say what is wrong with them.
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
"""Seconds between two counts on a terminal."""
WORTH_SAYING = 2.0
"""Seconds of a step that are said elsewhere."""
with open(os.path.join(ROOT, "Makefile")) as makefile:
    NAMES = re.search("^PYTHONS := (.*)$", makefile.read(), re.MULTILINE).group(1).split()


def give_up(problem, advice):
    sys.exit("\nmemoire cannot be set up: %s\n%s\n" % (problem, advice))


def install_hint(debian, fedora, alpine, mac):
    """How to get a thing on this system; all four lines where the system is a stranger."""
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
    """Go on under a Python that is new enough, whichever name it has."""
    if sys.version_info >= oldest:
        return
    for name in names:
        path = shutil.which(name)
        if path and _runs(path):
            os.execv(path, [path] + sys.argv)
    give_up(
        "python3 is %s, and %d.%d or newer is needed." % ((platform.python_version(),) + oldest),
        "If one is installed under another name, say so: make PYTHON=/path/to/python3.12 ...\n"
        + install_hint(
            "python3.11 python3.11-venv python3.11-dev", "python3.12-devel", "python3-dev", "brew install python"
        ),
    )


def _runs(path):
    """Whether it is a Python: a shim of pyenv is there for versions that are not chosen, too."""
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
    """Compile a small file against Python's headers: the only proof that it works."""
    command = compiler()
    if not shutil.which(command[0]):
        give_up(
            "there is no C compiler (%s)." % command[0],
            install_hint("gcc libc6-dev", "gcc", "gcc musl-dev", "xcode-select --install")
            + "\nIf you have another one, say so: make CC=clang ...",
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
            give_up(problem, hint + "\nThe compiler said:\n" + tried.stdout.decode(errors="replace"))


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
    """Run a command in the checkout, and show how long it takes; its output is shown only when it fails."""
    variables = dict(os.environ, **environment)
    began = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=said, stderr=subprocess.STDOUT)
        try:
            follow(what, process, began, sys.stdout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode:
            said.seek(0)
            sys.stdout.write(said.read().decode(errors="replace"))
            give_up("a step failed: %s." % what, "The command was: " + " ".join(map(shlex.quote, command)))


def follow(what, process, began, out):
    """Say what is done until a process has ended: in one line that counts seconds on a terminal, else once."""
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
        elif time.monotonic() - began >= WORTH_SAYING:
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
    """The package itself, editable, with what the demo needs; building it is a step of its own."""
    key = digest(above, content("pyproject.toml"))
    if is_done("run", key):
        return key
    check_compiler()
    pip_install("installing what the build needs", *project["build-system"]["requires"])
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
    """Whether each .pyx of the package has its compiled module in this folder."""
    sources = glob.glob(os.path.join(ROOT, "memoire", "**", "*.pyx"), recursive=True)
    names = [os.path.relpath(source, ROOT)[: -len(".pyx")] for source in sources]
    return all(glob.glob(os.path.join(lib, name + ".*so")) for name in names)


def build_checked(above):
    """The whole package a second time, compiled with checks: what PYTHONPATH=build/checked/lib finds."""
    key = build_key(above)
    lib = os.path.join("build", "checked", "lib")
    if not is_done("checked", key) or not are_compiled(os.path.join(ROOT, lib)):
        check_compiler()
        command = [PYTHON, "setup.py", "-q", "build", "--build-base", "build/checked", "--build-lib", lib, "--force"]
        call("building memoire with bounds checks", *command, MEMOIRE_CHECKED="1")
        done("checked", key)
    else:  # Python files are copied anew each time: that takes no time, and none can be stale
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
    """Have torch and what comes with it in a folder of its own that several checkouts may share."""
    folder = os.path.abspath(os.environ.get("MEMOIRE_TORCH") or os.path.join(ROOT, "build", "torch"))
    stamp, key = os.path.join(folder, "memoire-stamp"), digest(sys.version, *project["dependency-groups"]["torch"])
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with alone(folder + ".lock"), tempfile.NamedTemporaryFile(suffix=".txt") as versions:
        with contextlib.suppress(OSError), open(stamp) as file:
            if file.read() == key:
                return
        shutil.rmtree(folder, ignore_errors=True)
        print("memoire: torch and what it needs take 1 GB in %s, and 5 GB if it comes with CUDA" % folder)
        # What .venv has, too, gets the same version: the folder is found first.
        subprocess.run([PYTHON, "-m", "pip", "freeze", "--exclude-editable"], stdout=versions, check=True)
        limits = ["--target=" + folder, "--constraint=" + versions.name]
        pip_install("installing torch", *limits, *project["dependency-groups"]["torch"])
        with open(stamp, "w") as file:
            file.write(key)


@contextlib.contextmanager
def alone(path=""):
    """Two `make` in one checkout wait for each other, or two that share the folder whose lock is at a path."""
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
