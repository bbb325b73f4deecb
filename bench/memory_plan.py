"""Memory of every way to adapt a model, from shapes alone: the paper's count, what backward holds, and the peak.

    python bench/memory_plan.py --model segformer_b5
    python bench/memory_plan.py --model resnet50 --batch 16 --budget 512MiB --html plan.html
    python bench/memory_plan.py --all-paper
    python bench/memory_plan.py --model resnet20_cifar --verify

`surgeon-fx plan` is the same command. Nothing is allocated but for `--verify`, which runs the real thing.
"""

from __future__ import annotations

import argparse

from surgeon_fx.planner import methods


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods.add_arguments(parser)
    return methods.run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
