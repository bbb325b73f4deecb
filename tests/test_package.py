"""What a stranger gets: the public names, a wheel with the right folders, an install without a compiler."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import surgeon_fx
from surgeon_fx.kernels import native

ROOT = Path(__file__).parents[1]


def test_public_names():
    assert surgeon_fx.__all__ == [
        *("Config", "Importance", "NoEffectWarning", "RatioTable"),
        *("adapt", "entropy", "explain", "fit", "kernels", "plan", "ratios", "refresh", "restore", "transform", "zoo"),
    ]
    assert set(surgeon_fx.kernels.__all__) >= {
        "compress",
        "decompress",
        "kept_count",
        "pack_bits",
        "pack_sign",
        "unpack_bits",
    }


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def build_wheel(folder: Path, **environment: str) -> list[str]:
    """Files of the wheel, built from a copy of the sources so that nothing of this checkout is touched."""
    source = folder / "source"
    for name in git("ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(pip, check=True, env={**os.environ, **environment}, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the git checkout")
def test_wheel_holds_the_subpackages_and_no_top_level_kernels(tmp_path):
    if native.unavailable_reason():
        pytest.skip(native.unavailable_reason())
    names = build_wheel(tmp_path)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"surgeon_fx"}
    assert {"surgeon_fx/kernels/__init__.py", "surgeon_fx/passes/__init__.py", "surgeon_fx/py.typed"} <= set(names)
    assert "surgeon_fx/kernels/native/prune_pack.so" in names
    assert not [name for name in names if "/tests/" in name]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the git checkout")
def test_without_a_compiler_the_wheel_still_builds_and_says_why(tmp_path):
    names = build_wheel(tmp_path, CC="/nonexistent/cc")
    assert "surgeon_fx/kernels/native/prune_pack.so" not in names
    assert "surgeon_fx/kernels/native/build_failure.txt" in names
