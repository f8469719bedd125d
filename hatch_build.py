"""Compiles the modules that every call runs through with mypyc, where ORIEL_COMPILE=1 asks for a compiled wheel.

Images and published wheels are compiled; without ORIEL_COMPILE a wheel is pure Python. ORIEL_COMPILE=debug leaves out
the C compiler's optimisations, which is half of the time: for tests only. The list of modules is in pyproject.toml,
with this hook. The sources go into the wheel as well, for tracebacks and type checkers; Python prefers
the compiled module beside them. A checkout is never compiled: an editable install is pure.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LEVELS = {"1": "3", "debug": "0"}  # ORIEL_COMPILE -> optimisation level of the C compiler
GROUP = "oriel_compiled"  # the library that all of them share: <GROUP>__mypyc


class CompiledModules(BuildHookInterface):  # type: ignore[type-arg]
    """See the module's head."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._made: Path | None = None
        level = LEVELS.get(os.environ.get("ORIEL_COMPILE", ""))
        if level is None or version == "editable":
            return
        self._made = made = Path(mkdtemp(prefix="oriel-compiled-"))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for library in compiled(Path(self.root), self.config["modules"], made, level):
            build_data["force_include"][str(library)] = str(library.relative_to(made / "lib"))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._made is not None:
            shutil.rmtree(self._made)


def compiled(root: Path, modules: list[str], folder: Path, level: str) -> list[Path]:
    """Compile sources (relative to `root`); the libraries lie under `folder`/lib as they are to lie in the wheel."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        sys.exit(f"oriel: ORIEL_COMPILE=1 needs a C compiler, and there is no {compiler} (Debian: apt install gcc)")
    try:
        from mypyc.build import mypycify
        from setuptools import setup
        from setuptools.command.build_ext import build_ext
    except ImportError:
        sys.exit("oriel: ORIEL_COMPILE=1 needs mypy and setuptools; `make wheel` has both")

    class Parallel(build_ext):
        """Compiles the C files of a library on all cores; setuptools takes them one after the other."""

        def build_extension(self, ext: Any) -> None:
            one = self.compiler.compile

            def compile_all(sources: list[str], **options: Any) -> list[str]:
                with ThreadPoolExecutor(os.cpu_count()) as threads:
                    return [
                        made for each in threads.map(lambda source: one([source], **options), sources) for made in each
                    ]

            self.compiler.compile = compile_all
            super().build_extension(ext)
            self.compiler.compile = one

    before = Path.cwd()
    os.chdir(root)
    try:
        setup(
            name="oriel-serving",
            packages=[],
            py_modules=[],
            cmdclass={"build_ext": Parallel},
            ext_modules=mypycify(
                modules,
                opt_level=level,
                debug_level="0",
                multi_file=True,
                group_name=GROUP,
                target_dir=str(folder / "c"),
            ),
            script_args=["-q", "build_ext", "--build-lib", str(folder / "lib"), "--build-temp", str(folder / "o")],
        )
    finally:
        os.chdir(before)
    return sorted((folder / "lib").rglob("*.so"))
