"""The Python blocks of the README run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = [
    pytest.param(block, id=f"{path.parent.name}/{path.name}:{i}")
    for path in (ROOT / "README.md", ROOT / "kernels" / "README.md")
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block):
    exec(block, {"x": __import__("torch").randn(64, 64)})
