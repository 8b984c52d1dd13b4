"""Training as checkpoints see it: a state that is a dictionary, and a step that changes it.

In mixed precision the model's weights are bfloat16, AdamW works on float32 masters of them, and
gradients are rounded to bfloat16; the arithmetic is float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from resume_models import Losses, Weights

State = dict[str, Any]

PEAK, WARMUP, END = 1e-3, 20, 800
DECAY, EPS = 0.1, 1e-8


def learning_rate(step: int) -> float:
    """Rise, then fall as a cosine."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return PEAK * (0.05 + 0.475 * (1 + math.cos(math.pi * (step - WARMUP) / (END - WARMUP))))


def begin(weights: Weights, beta2: float) -> State:
    """Give the state before the first step."""
    return {
        "model": {name: w.bfloat16() for name, w in weights.items()},
        "optimizer": {
            "fp32_master": {name: w.clone() for name, w in weights.items()},
            "exp_avg": {name: torch.zeros_like(w) for name, w in weights.items()},
            "exp_avg_sq": {name: torch.zeros_like(w) for name, w in weights.items()},
            "step": 0,
            "param_groups": [{"lr": 0.0, "betas": (0.9, beta2), "eps": EPS, "weight_decay": DECAY}],
        },
    }


def step(state: State, losses: Losses, tokens: torch.Tensor) -> torch.Tensor:
    """Change the state by one step of AdamW; give the loss of each token before it."""
    weights = {name: w.float().requires_grad_() for name, w in state["model"].items()}
    found = losses(weights, tokens)
    gradients = torch.autograd.grad(found.mean(), list(weights.values()), allow_unused=True)
    optimizer = state["optimizer"]
    group = optimizer["param_groups"][0]
    group["lr"] = rate = learning_rate(optimizer["step"])
    optimizer["step"] += 1
    beta1, beta2 = group["betas"]
    first = 1 - beta1 ** optimizer["step"]
    second = math.sqrt(1 - beta2 ** optimizer["step"])
    for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
        g = torch.zeros_like(weight) if gradient is None else gradient.bfloat16().float()
        m, v = optimizer["exp_avg"][name], optimizer["exp_avg_sq"][name]
        master = optimizer["fp32_master"][name]
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if master.ndim > 1:
            master.mul_(1 - rate * group["weight_decay"])
        master.addcdiv_(m, v.sqrt().div_(second).add_(group["eps"]), value=-rate / first)
        state["model"][name] = master.bfloat16()
    return found.detach()
