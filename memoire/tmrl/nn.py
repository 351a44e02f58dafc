"""Helpers for torch modules: freezing, and copies that share memory."""

from __future__ import annotations

import copy
from typing import TypeVar

from memoire.errors import NotInstalled

with NotInstalled.explained("pip install 'memoire-rl[rl]'"):
    import torch

M = TypeVar("M", bound=torch.nn.Module)


def no_grad(model: M) -> M:
    """Turn gradients off for all parameters of a module, and return the module."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    return model


def copy_shared(model: M) -> M:
    """Return a copy of a module with its own parameters and buffers in the same memory: training changes both."""
    shared: dict[int, object] = {
        id(each): torch.nn.Parameter(each.detach(), each.requires_grad) for each in model.parameters()
    }
    shared |= {id(each): each.detach() for each in model.buffers()}
    return copy.deepcopy(model, shared)
