"""What a stranger gets: the public names, a wheel with the right folders, an install without a compiler."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
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


def files_of_the_checkout() -> list[str]:
    return [
        name
        for name in git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
        if (ROOT / name).exists()
    ]


def copied_sources(folder: Path) -> Path:
    """A copy of the checkout, so that a build touches nothing of it."""
    source = folder / "source"
    for name in files_of_the_checkout():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    return source


def build_wheel(folder: Path, **environment: str) -> list[str]:
    """Files of the wheel."""
    source = copied_sources(folder)
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


def test_every_package_of_the_checkout_is_listed():
    """A folder that is forgotten in pyproject.toml is missing from wheels alone: no other test would see it."""
    block = re.search(r"packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)[1]
    listed = re.findall(r'"([\w.]+)"', block)
    folders = [
        path.parent.relative_to(ROOT)
        for top in ("surgeon_fx", "kernels", "passes")
        for path in (ROOT / top).rglob("__init__.py")
    ]
    names = [".".join(folder.parts) for folder in folders]
    assert listed == sorted(name if name.startswith("surgeon_fx") else f"surgeon_fx.{name}" for name in names)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the git checkout")
def test_the_source_archive_holds_the_checkout(tmp_path):
    source = copied_sources(tmp_path)
    command = [
        sys.executable,
        "-c",
        "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as found:
        names = {name.partition("/")[2] for name in found.getnames()}
    ours = {name for name in files_of_the_checkout() if not name.startswith((".git", ".pre-commit"))}
    assert not ours - names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


BLOCKED = """
import sys, warnings
from importlib.machinery import PathFinder
find = PathFinder.find_spec
missing = ("timm", "torchvision", "tabulate", "tqdm")
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in missing else find(name, *rest)
warnings.simplefilter("error")
"""
WITHOUT = """
import surgeon_fx
from surgeon_fx.cli import main
x = torch.rand(4, 3, 32, 32)
print(surgeon_fx.refresh(model, x, loss_fn=surgeon_fx.entropy))
print(surgeon_fx.explain(model, x), surgeon_fx.plan(model, x), surgeon_fx.fit(model, x, budget="2MiB"), sep="\\n")
surgeon_fx.adapt.Surgeon(surgeon_fx.zoo.create("resnet20_cifar"))(x)
assert main(["doctor"]) == main(["models"]) == 0
assert main(["plan", "--model", "resnet20_cifar", "--batch", "2", "--method", "full,static"]) == 0
assert main(["plan", "--model", "tv:resnet18"]) == 2
assert main(["plan", "--model", "resnet18"]) == 2
"""


def test_works_without_the_packages_that_only_some_models_need():
    readme = (ROOT / "README.md").read_text()
    lines = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    assert len([line for line in lines.splitlines() if line]) == 5
    command = [sys.executable, "-c", BLOCKED + lines + WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = done.stderr.splitlines()
    assert errors == [
        "error: this model or file needs torchvision: pip install torchvision",
        "error: no model is called 'resnet18'; did you mean resnet50, resnext29?; timm, which knows more, is missing: "
        "pip install timm",
    ]
    assert "layer  " in done.stdout
    assert "full tuning  " in done.stdout


def test_import_is_quiet_and_light():
    """Importing the package loads nothing that only some need."""
    script = "import sys, surgeon_fx; print(*[n for n in sys.argv[1:] if n in sys.modules])"
    names = ["timm", "torchvision", "tabulate", "triton", "transformers", "matplotlib"]
    done = subprocess.run([sys.executable, "-W", "error", "-c", script, *names], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
