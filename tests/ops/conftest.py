import pytest
from op_cases import Layers


@pytest.fixture
def layers():
    return Layers()
