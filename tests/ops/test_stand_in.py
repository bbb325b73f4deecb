"""A tensor for an operation that asks for a layout alone: right in everything but its memory."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

import surgeon_fx
from surgeon_fx.ops.common import MAPPED_BYTES, stand_in

LARGE = torch.empty(4, 64, 96, 96, device="meta")
LAYOUTS = {
    "contiguous": LARGE,
    "channels_last": LARGE.to(memory_format=torch.channels_last),
    "slice": LARGE[:, ::2, 1:],
    "expanded": LARGE[:1].expand(4, -1, -1, -1),
    "small": torch.empty(2, 3, device="meta"),
    "empty": torch.empty(0, 3, device="meta"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_has_the_layout(layout, dtype):
    x = LAYOUTS[layout]
    made = stand_in(torch.ones(1), x.shape, x.stride(), dtype)
    assert (made.shape, made.stride(), made.dtype, made.device.type) == (x.shape, x.stride(), dtype, "cpu")
    if made.untyped_storage().nbytes() >= MAPPED_BYTES:
        assert not made.any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_takes_no_room_in_an_input_gradient(layout):
    def resident_pages():
        return int(Path("/proc/self/statm").read_text().split()[1])

    x = torch.empty(64, 256, 64, 64, device="meta")  # 256 MiB
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    before = resident_pages()
    made = stand_in(torch.ones(1), x.shape, x.stride(), torch.float32)
    made.contiguous(memory_format=getattr(torch, f"{layout}_format" if layout == "contiguous" else layout))
    assert resident_pages() - before < 4096


@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_fake_among_fakes(layout):
    x = LAYOUTS[layout]
    with FakeTensorMode():
        made = stand_in(torch.ones(1), x.shape, x.stride(), torch.float32)
    assert isinstance(made, FakeTensor)
    assert (made.shape, made.stride(), made.device.type) == (x.shape, x.stride(), "cpu")


def test_takes_no_room_in_a_plan():
    """A convolution has its output and both gradients beside what is held, in any layout."""
    model = surgeon_fx.transform(nn.Sequential(nn.Conv2d(3, 128, 3, padding=1), nn.Conv2d(128, 128, 1, bias=False)))
    surgeon_fx.ratios(model).fill(0.9)
    x = torch.empty(8, 3, 64, 64, device="meta")
    maps = 3 * 8 * 128 * 64 * 64 * 4
    for layout in (torch.contiguous_format, torch.channels_last):
        planned = surgeon_fx.plan(model.to(memory_format=layout), x.contiguous(memory_format=layout))
        assert maps <= planned.peak_bytes <= planned.saved_bytes + maps + 2**20
