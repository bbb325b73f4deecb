import pytest
import torch
from adapt_cases import Small


@pytest.fixture
def model():
    """What the tests adapt."""
    torch.manual_seed(0)
    return Small()


@pytest.fixture
def x():
    """A batch for it."""
    return torch.rand(8, 3, 12, 12, generator=torch.Generator().manual_seed(1))
