"""The Hugging Face Trainer: as eager at ratio 0, within a budget, and the model is as it was afterwards."""

import pytest
import torch

import surgeon_fx
from surgeon_fx.retained import retained_bytes

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install surgeon-fx[hf]")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate: pip install surgeon-fx[hf]")

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments  # noqa: E402

from surgeon_fx.integrations.hf import SurgeonCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the Trainer's own
INTERPRETED = surgeon_fx.Config(capture=False)


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        max_position_embeddings=32,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def dataset(count=24):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (count, 16), generator=generator)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return [
        {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": label}
        for i, label in zip(ids, labels, strict=True)
    ]


def train(model, folder, callbacks=(), steps=3, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        seed=0,
        disable_tqdm=True,
        logging_strategy="no",
        **{"save_strategy": "no", **options},
    )
    trainer = Trainer(model, arguments, train_dataset=dataset(), callbacks=list(callbacks))
    trainer.train()
    return trainer


def assert_same(first, second):
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, surgeon_fx.Config()),
        ({"bf16": True}, INTERPRETED),
        ({"fp16": True}, INTERPRETED),
        ({"gradient_checkpointing": True}, INTERPRETED),
        ({"gradient_accumulation_steps": 2}, INTERPRETED),
    ],
    ids=["graphs", "bf16", "fp16", "checkpointing", "accumulation"],
)
def test_three_steps_equal_eager(tmp_path, options, config, capsys):
    eager, model = bert(), bert()
    train(eager, tmp_path, **options)
    callback = SurgeonCallback(config=config)
    train(model, tmp_path, [callback], **options)
    assert_same(model, eager)
    assert not torch.equal(model.classifier.weight, bert().classifier.weight)
    assert "BertForSequenceClassification at 8x16" in capsys.readouterr().out  # the plan
    batch = {key: torch.stack([one[key] for one in dataset()[:8]]) for key in dataset()[0]}
    assert retained_bytes(model(**batch).loss, model) == retained_bytes(eager(**batch).loss, eager)  # as it was
    assert {"bf16", "fp16"} & options.keys() or "forward" not in model.__dict__  # accelerate leaves its own
    with pytest.raises(ValueError, match="not transformed"):
        surgeon_fx.ratios(model)


def test_a_budget_is_met_and_refreshed(tmp_path):
    eager = bert()
    batch = {key: torch.stack([one[key] for one in dataset()[:8]]) for key in dataset()[0]}
    whole = retained_bytes(eager(**batch), eager)
    budget = whole // 2
    held, tables = [], []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            tables.append(dict(surgeon_fx.ratios(model)))
            held.append(retained_bytes(model(**batch), model))

    model = bert()
    callback = SurgeonCallback(budget=budget, refresh_every=2, config=INTERPRETED, print_plan=False, samples=4)
    train(model, tmp_path, [callback, Watch()], steps=4)
    assert all(0.8 * budget < size <= budget for size in held), (budget, held)
    assert tables[0] != tables[1] == tables[2] != tables[3]  # after the second step, and after the fourth
    assert callback.pruning.importance.G


def test_what_is_saved_is_of_the_models_own_class(tmp_path):
    model = bert()
    callback = SurgeonCallback(ratio=0.9, config=INTERPRETED, print_plan=False)
    trainer = train(model, tmp_path, [callback], save_strategy="steps", save_steps=2)
    trainer.save_model(str(tmp_path / "last"))
    for folder in ("last", "checkpoint-2"):
        loaded = BertForSequenceClassification.from_pretrained(tmp_path / folder)
        assert loaded.config.architectures == ["BertForSequenceClassification"]
        assert type(loaded) is type(model)
    assert_same(BertForSequenceClassification.from_pretrained(tmp_path / "last"), model)
    again = bert()
    callback = SurgeonCallback(ratio=0.9, config=INTERPRETED, print_plan=False)
    train_again = Trainer(again, trainer.args, train_dataset=dataset(), callbacks=[callback])
    train_again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(again, model)


def test_gradient_checkpointing_composes_with_pruning():
    """Checkpointed blocks keep their inputs alone, pruned or not: less than either."""
    x = {key: torch.stack([one[key] for one in dataset()[:8]]) for key in dataset()[0]}
    held = {}
    for name, checkpointed, ratio in (("pruned", False, 0.9), ("checkpointed", True, None), ("both", True, 0.9)):
        model = bert().train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model = model if ratio is None else surgeon_fx.transform(model)
        if ratio is not None:
            surgeon_fx.ratios(model).fill(ratio)
        output = model(**x)
        held[name] = retained_bytes(output.loss, model)
        output.loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert held["both"] <= held["checkpointed"]
    assert held["both"] < held["pruned"]


def test_options_are_checked():
    with pytest.raises(ValueError, match="give one of them"):
        SurgeonCallback(ratio=0.9, budget="1MiB")
    with pytest.raises(ValueError, match="refresh_every must be"):
        SurgeonCallback(refresh_every=0)
