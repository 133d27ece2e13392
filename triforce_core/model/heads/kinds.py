"""The class of each kind of head in `joins`."""

from __future__ import annotations

from collections.abc import Callable

from triforce_core.model.config import ModelConfig
from triforce_core.model.heads.assistant import AssistantModel
from triforce_core.model.heads.dflash import DFlashModel
from triforce_core.model.heads.head import Eagle3Head, MtpHead, OwnTensors, StreamsMtpHead
from triforce_core.model.heads.joins import Assistant, DFlash, Eagle3, Join, Mtp, StreamsMtp
from triforce_core.model.transformer import Model

# Each takes the config of the head, the model that it drafts for, and what it has of its own.
HEADS: dict[type[Join], Callable[[ModelConfig, Model, OwnTensors], Model]] = {
    Mtp: MtpHead,
    StreamsMtp: StreamsMtpHead,
    Eagle3: Eagle3Head,
    DFlash: DFlashModel,
    Assistant: AssistantModel,
}
