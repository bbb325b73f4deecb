"""Builds the C kernels. Everything else about the package stands in pyproject.toml.

The library is plain C, loaded with ctypes: one file serves every Python, so it carries no ABI tag. A machine without a
compiler still installs: the reason is left in a file where the loader finds it, and a pure-torch path takes over.
"""

import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FAILURE_NOTE = "build_failure.txt"  # read by kernels/native/__init__.py


class BuildNative(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols  # no PyInit function to export

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        note = target.with_name(FAILURE_NOTE)
        failures = []
        # Compiled for OpenMP and not linked against it: the symbols resolve to the runtime torch has loaded.
        for openmp in (["-fopenmp"], ["-Xpreprocessor", "-fopenmp"], []):
            ext.extra_compile_args = ["-O3", "-std=gnu11", "-fvisibility=hidden", *openmp]
            # Never unloaded once loaded: torch's import table may point into it.
            ext.extra_link_args = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-Wl,-z,nodelete"]
            try:
                super().build_extension(ext)
            except Exception as error:
                failures.append(f"{' '.join(openmp) or 'without OpenMP'}: {error}")
            else:
                if sys.platform == "darwin" or b"__kmpc_fork_call" not in target.read_bytes():
                    note.unlink(missing_ok=True)
                    return
                target.unlink()  # clang's OpenMP, and torch on Linux brings GNU's: rather one thread than no library
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        note.write_text("\n".join(failures) + "\n")
        print(f"surgeon_fx: the C kernels were not built, pure torch will be used instead: {failures}", file=sys.stderr)

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            for name in (
                Path(self.get_ext_filename(ext.name)),
                Path(self.get_ext_filename(ext.name)).with_name(FAILURE_NOTE),
            ):
                built, source = Path(self.build_lib, name), Path("kernels/native", name.name)
                source.unlink(missing_ok=True)
                if built.exists():
                    self.copy_file(str(built), str(source))


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "surgeon_fx.kernels.native.prune_pack",
            sources=sorted(glob("kernels/native/*.c")),
            depends=glob("kernels/native/*.h"),
            libraries=[] if sys.platform == "win32" else ["m"],
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
