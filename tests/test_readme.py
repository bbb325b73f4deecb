"""The Python blocks of the README and the documentation run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPTIONAL = ("accelerate", "lightning", "peft", "transformers")  # what a block on a trainer may need
BLOCKS = [
    pytest.param(block, id=f"{path.parent.name}/{path.name}:{i}")
    for path in (ROOT / "README.md", ROOT / "kernels" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    try:
        exec(block, {"__name__": "block"})
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}")


def test_no_command_needs_a_path_that_a_reader_does_not_have():
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.py")):
        assert "../shared" not in path.read_text(), path


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
