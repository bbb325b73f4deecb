"""The table of pruning ratios: read at run time, so that changing it needs no new trace."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from surgeon_fx.kernels.layout import check_ratio


def shared_ratio(ratios: Mapping[str, float], owner: str, sharers: Iterable[str]) -> float:
    """The ratio of a save that several layers share: the lowest of those that prune; 0 if its owner does not."""
    own = ratios.get(owner, 0.0)
    return own and min([own, *(ratio for name in sharers if (ratio := ratios.get(name, 0.0)) > 0)])


class RatioTable(Mapping[str, float]):
    """Layer name -> share of its saved activation to drop, in network order. Starts at 0: exact."""

    def __init__(self, names: Iterable[str]) -> None:
        self._ratios = dict.fromkeys(names, 0.0)
        self.prunes = False  # whether any layer drops anything: asked by every operation that keeps something exactly

    def __getitem__(self, name: str) -> float:
        try:
            return self._ratios[name]
        except KeyError:
            raise KeyError(self._unknown(name)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._ratios

    def __setitem__(self, name: str, ratio: float) -> None:
        self.update({name: ratio})

    def __iter__(self) -> Iterator[str]:
        return iter(self._ratios)

    def __len__(self) -> int:
        return len(self._ratios)

    def fill(self, ratio: float) -> None:
        """One ratio for every layer."""
        self._ratios = dict.fromkeys(self._ratios, check_ratio(ratio))
        self.prunes = any(self._ratios.values())

    def update(self, ratios: Mapping[str, float]) -> None:
        """Sets several ratios: all of them, or none if one is refused."""
        for name in ratios:
            if name not in self._ratios:
                raise ValueError(self._unknown(name))
        self._ratios |= {name: check_ratio(ratio) for name, ratio in ratios.items()}
        self.prunes = any(self._ratios.values())

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self._ratios, indent=1) + "\n")

    def load(self, path: str | Path) -> None:
        """Sets the ratios found in a file that `save` wrote; layers it does not name keep theirs."""
        try:
            found = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not a file of ratios that `save` wrote: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{path} must hold a JSON object of layer names and ratios, got {type(found).__name__}")
        self.update(found)

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(str(name), self._ratios, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else f"; there are {len(self)} layers"
        return f"no rewritten layer is called {name!r}{hint}"

    def __repr__(self) -> str:
        return f"RatioTable({self._ratios})"
