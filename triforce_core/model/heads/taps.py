"""Hidden states between layers, which heads draft from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


class Taps:
    """Copies of the hidden states that enter some layers of a forward, side by side.

    states: [rows, taps * hidden]
    """

    def __init__(self, layers: Sequence[int], states: torch.Tensor, rows: Sequence[range]) -> None:
        """layers: the layers; the number of layers stands for the output of the last
        states: room for the copies
        rows: rows of the forward that are copied, one range after another
        """
        self.states = states
        self._layers = layers
        self._rows = rows

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        """Copy the hidden states [all rows, hidden] that enter a layer, if the layer is tapped."""
        width = hidden.shape[1]
        for place, tapped in enumerate(self._layers):
            if tapped == layer:
                first = place * width
                for rows, states in self.parts():
                    states[:, first : first + width] = hidden[rows.start : rows.stop]

    def parts(self) -> Iterator[tuple[range, torch.Tensor]]:
        """Yield rows that follow one another, and their states."""
        return zip(self._rows, self.states.split([len(rows) for rows in self._rows]), strict=True)
