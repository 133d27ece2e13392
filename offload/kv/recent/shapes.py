"""The geometry of any recent store. Sizes need no tensors."""

from __future__ import annotations

from triforce_offload.kv.index.shape import IndexShape
from triforce_offload.kv.states.shape import StateShape
from triforce_offload.kv.windows.shape import WindowShape

RecentShape = WindowShape | StateShape | IndexShape
