"""Test-time adaptation on corrupted images: every method over one stream, its errors, memory and time side by side.

    python bench/tta.py --data ../shared/data/cifar10c --model resnet56_cifar \\
        --weights ../shared/data/weights/cifar10_resnet56.safetensors
    python bench/tta.py --data CIFAR-10-C --model wrn28_10 --weights Standard.pt --method source,tent,surgeon \\
        --lr grid --seeds 0,1,2 --plot plots/
    python bench/tta.py --data ACDC --model segformer_b5 --weights segformer_b5.pth --batch 1 --lr 7.5e-6
    python bench/tta.py --from-json

The model adapts on through all corruptions and is never reset; what counts is the error of the predictions it returns
for a batch, before it has learnt from it. With several learning rates each method takes the one that does best on the
first corruptions (`--select`) with the first seed. Rows are written as corruptions are finished, and `--resume` runs
what is missing: a run that was interrupted starts again from its first corruption, as its model has not been kept.

A row of metric "error" has a corruption's error, and in its case the errors batch by batch; "ratios" has SURGEON's
ratios per layer, pass by pass; "selection" the errors learning rates were chosen by. The rest is what a call costs
(`--no-measure` leaves that out), measured in a process per method that take turns.

`surgeon-fx adapt` is the same command.
"""

from __future__ import annotations

import argparse

from common import RESULTS

from surgeon_fx.adapt import command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    parser.set_defaults(json=RESULTS / "tta.jsonl")
    return command.run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
