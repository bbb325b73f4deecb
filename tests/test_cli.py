import pytest

from surgeon_fx import __version__
from surgeon_fx.cli import main
from surgeon_fx.kernels import native


@pytest.mark.skipif(native.unavailable_reason() != "", reason="needs the C kernels")
def test_doctor_names_the_backend_in_use(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert __version__ in out
    assert native.instruction_set() in out
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("cpu ")] == [["cpu", "in", "use"]]


def test_doctor_says_why_the_c_kernels_are_not_in_use(capsys, monkeypatch):
    monkeypatch.setattr(native, "unavailable_reason", lambda: "the C kernels were not built: no gcc")
    assert main(["doctor"]) == 0
    assert "not in use: the C kernels were not built: no gcc" in capsys.readouterr().out


def test_version_and_bad_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == __version__
    with pytest.raises(SystemExit, match="2"):
        main(["operate"])
