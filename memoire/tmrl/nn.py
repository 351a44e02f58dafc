"""Small tools for networks."""

from __future__ import annotations

import copy
from typing import TypeVar

from memoire.errors import NotInstalled

with NotInstalled.explained("pip install 'memoire-rl[rl]'"):
    import torch

M = TypeVar("M", bound=torch.nn.Module)


def no_grad(model: M) -> M:
    """The module itself, of which no parameter is trained any more."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    return model


def copy_shared(model: M) -> M:
    """A copy of a module with parameters and buffers of its own, in the same memory: what one learns, both know."""
    shared: dict[int, object] = {
        id(each): torch.nn.Parameter(each.detach(), each.requires_grad) for each in model.parameters()
    }
    shared |= {id(each): each.detach() for each in model.buffers()}
    return copy.deepcopy(model, shared)
