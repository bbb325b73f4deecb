import math

import pytest

from surgeon_fx import RatioTable


@pytest.fixture
def table():
    return RatioTable(["stem.conv", "layer1.conv", "head"])


def test_starts_exact_in_network_order(table):
    assert list(table.items()) == [("stem.conv", 0.0), ("layer1.conv", 0.0), ("head", 0.0)]


def test_fill_set_update(table):
    table.fill(0.9)
    table["head"] = 0.5
    table.update({"stem.conv": 1})
    assert dict(table) == {"stem.conv": 1.0, "layer1.conv": 0.9, "head": 0.5}


def test_save_and_load(table, tmp_path):
    table.update({"head": 0.25})
    table.save(tmp_path / "ratios.json")
    other = RatioTable(table)
    other.load(tmp_path / "ratios.json")
    assert dict(other) == dict(table)


@pytest.mark.parametrize("ratio", [-0.1, 1.5, math.nan])
def test_bad_ratio_is_refused_and_nothing_changes(table, ratio):
    with pytest.raises(ValueError, match="ratio must be the share to drop"):
        table.update({"head": 0.5, "stem.conv": ratio})
    with pytest.raises(ValueError, match="ratio must be"):
        table.fill(ratio)
    assert set(table.values()) == {0.0}


def test_unknown_name_suggests_the_nearest(table, tmp_path):
    with pytest.raises(ValueError, match="no rewritten layer is called 'layer1.conv1'; did you mean layer1.conv"):
        table["layer1.conv1"] = 0.5
    with pytest.raises(KeyError, match="no rewritten layer"):
        table["tail"]
    (tmp_path / "bad.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        table.load(tmp_path / "bad.json")
