"""Formulas for CUDA operators without a CPU kernel in torch, by torch's operators for all devices.

Used by emulated_kernels.py on meta and CPU tensors. Names and arguments are those of aten's native_functions.yaml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# ---- dropout, whose CPU kernel takes no generator


def native_dropout(x, p, train, generator=None):
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


# ---- cells of LSTM and GRU; the workspace is what backward needs


def lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, 1)
    tanh = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad = grad_hy * o * (1 - tanh * tanh) + (0 if grad_cy is None else grad_cy)
    parts = grad * g * i * (1 - i), grad * cx * f * (1 - f), grad * i * (1 - g * g), grad_hy * tanh * o * (1 - o)
    gates = torch.cat(parts, 1)
    return gates, grad * f, gates.sum(0) if has_bias else None


def gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (ir, iz, in_), (hr, hz, hn) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def gru_cell_backward(grad, workspace, has_bias):
    r, z, n, hx, hn = workspace.chunk(5, 1)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r, grad_z = grad_n * hn * r * (1 - r), grad * (hx - n) * z * (1 - z)
    of_input, of_hidden = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad * z, *biases


# ---- batch norm in parts, of SyncBatchNorm; the channel is dimension 1


def _channels(x, values):
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def _others(x):
    return [dim for dim in range(x.dim()) if dim != 1]


def batch_norm_stats(x, eps):
    var, mean = torch.var_mean(x.float(), _others(x), correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    y = (x.float() - _channels(x, mean)) * _channels(x, invstd)
    if weight is not None:
        y = y * _channels(x, weight) + _channels(x, bias)
    return y.to(x.dtype)


def batch_norm_gather_stats(x, mean, invstd, running_mean, running_var, momentum, eps, counts):
    counts = counts.to(mean.dtype).reshape(-1, 1)
    total = counts.sum()
    all_mean = (mean * counts).sum(0) / total
    squares = ((invstd**-2 - eps + (mean - all_mean) ** 2) * counts).sum(0)
    if running_mean is not None:
        running_mean.lerp_(all_mean.to(running_mean.dtype), momentum)
        running_var.lerp_((squares / (total - 1)).to(running_var.dtype), momentum)
    return all_mean, (squares / total + eps).rsqrt()


def batch_norm_backward_reduce(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
    total = grad.float().sum(_others(x))
    product = (grad.float() * (x.float() - _channels(x, mean))).sum(_others(x))
    narrow = x.dtype if weight is None else weight.dtype
    of_weight = (product * invstd).to(narrow) if weight_g else None
    return total if input_g else None, product if input_g else None, of_weight, total.to(narrow) if bias_g else None


def batch_norm_backward_elemt(grad, x, mean, invstd, weight, total, product, count):
    count = count.sum()
    scale = invstd if weight is None else invstd * weight
    centered = (x.float() - _channels(x, mean)) * _channels(x, product / count * invstd * invstd)
    return ((grad.float() - _channels(x, total / count) - centered) * _channels(x, scale)).to(x.dtype)


# ---- RMSNorm


def rms_norm_backward(grad, x, shape, rstd, weight, mask):
    rows, dims = list(range(x.dim() - len(shape))), list(range(x.dim() - len(shape), x.dim()))
    normal = x.float() * rstd
    scaled = grad.float() if weight is None else grad.float() * weight
    of_x = (scaled - normal * (scaled * normal).mean(dims, keepdim=True)) * rstd
    of_weight = grad.float() * normal
    of_weight = of_weight.sum(rows) if rows else of_weight
    return of_x.to(x.dtype) if mask[0] else None, of_weight.to(x.dtype) if mask[1] and weight is not None else None


# Operators that draw random numbers without a generator argument; their formulas accept one.
RANDOM = ("native_dropout",)
FORMULAS: dict[str, Callable[..., Any]] = {
    "native_dropout": native_dropout,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "batch_norm_stats": batch_norm_stats,
    "batch_norm_elemt": batch_norm_elemt,
    "batch_norm_gather_stats_with_counts": batch_norm_gather_stats,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
    "_fused_rms_norm_backward": rms_norm_backward,
}
