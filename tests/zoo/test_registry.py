"""Models by name: the zoo's own and those of other packages."""

import subprocess
import sys

import pytest
import torch
from zoo_cases import parameters

from surgeon_fx import zoo
from surgeon_fx.zoo import external


def test_entries():
    assert zoo.names()[0] == "wrn28_10"
    entry = zoo.entry("segformer_b5")
    assert (entry.name, entry.classes, entry.input_shape) == ("segformer_b5", 19, (1, 3, 540, 960))
    assert entry.mean == (0.485, 0.456, 0.406)
    assert zoo.entry("wrn28_10").mean is None
    with pytest.raises(ValueError, match="no model is called 'wrn28-10'; did you mean wrn28_10"):
        zoo.entry("wrn28-10")


def test_timm_names():
    pytest.importorskip("timm")
    with torch.device("meta"):
        assert parameters(zoo.create("resnet18", num_classes=7)) == 11_180_103
        assert parameters(zoo.create("timm:resnet50")) == 25_557_032
    assert zoo.input_shape("resnet18") == (1, 3, 224, 224)
    assert zoo.input_shape("timm:inception_v3") == (1, 3, 299, 299)


def test_torchvision_names():
    pytest.importorskip("torchvision")
    with torch.device("meta"):
        assert parameters(zoo.create("tv:resnet50")) == 25_557_032
        assert parameters(zoo.create("tv:fcn_resnet50", num_classes=19)) > 30_000_000
        zoo.create("tv:inception_v3")
    assert zoo.input_shape("tv:inception_v3") == (1, 3, 299, 299)
    assert zoo.input_shape("tv:resnet50") == (1, 3, 224, 224)
    assert zoo.input_shape("tv:r3d_18") == (1, 3, 16, 112, 112)


def test_hugging_face_names():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        assert type(zoo.create("hf:segformer", depths=[1, 1, 1, 1])).__name__ == "SegformerForSemanticSegmentation"
        assert type(zoo.create("hf:vit", num_hidden_layers=1)).__name__ == "ViTForImageClassification"
        bare = zoo.create("hf:segformer", task="ImageClassification")
    assert type(bare).__name__ == "SegformerForImageClassification"
    assert zoo.input_shape("hf:vit") == (1, 3, 224, 224)
    with pytest.raises(ValueError, match="no image size"):
        zoo.input_shape("hf:gpt2")


def test_unknown_names_suggest_the_nearest():
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match="no model is called 'wrn28_11'; did you mean wrn28_10"):
        zoo.create("wrn28_11")
    with pytest.raises(ValueError, match="did you mean .*resnet18"):
        zoo.create("resnet1_8")
    with pytest.raises(ValueError, match="did you mean .*resnet50"):
        zoo.input_shape("timm:resnet_50")
    with pytest.raises(ValueError, match="must start with one of timm:, tv:, hf:"):
        zoo.create("jax:resnet50")


@pytest.mark.parametrize(("prefix", "module"), [("tv:", "torchvision"), ("hf:", "transformers")])
def test_unknown_names_of_other_packages(prefix, module):
    pytest.importorskip(module)
    with pytest.raises(ValueError, match="no model is called 'resnet_5'; did you mean"):
        zoo.create(f"{prefix}resnet_5")


def test_missing_package_is_named(monkeypatch):
    def missing(package):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(external.importlib, "import_module", missing)
    for name, package in {"timm:resnet18": "timm", "tv:resnet18": "torchvision", "hf:vit": "transformers"}.items():
        with pytest.raises(ImportError, match=f"pip install {package}"):
            zoo.create(name)
    with pytest.raises(ValueError, match="no model is called 'resnet18'.*pip install timm"):
        zoo.create("resnet18")


def test_import_brings_no_other_package_in():
    heavy = "{'timm', 'torchvision', 'transformers', 'safetensors'}"
    code = f"import sys, surgeon_fx.zoo as z; z.create('vit_cifar'); print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
