"""Per-sample gradients without Opacus' hooks, for the layers whose rule is cheaper than a hook.

A linear layer's per-sample gradient of rank one is kept as its two factors: its norm is the product
of their norms, and the clipped sum is one matrix product ("book-keeping", Bu et al. 2023,
arXiv:2210.00038). Everything else is multiplied out, a convolution over unfolded inputs a few rows
at a time. Norms that Bu et al. take from Gram matrices are not used: their cancellation in float32
can make a norm too small.

Shape letters: B rows, O outputs, I inputs (of a convolution, kernel positions times channels),
L positions (of a sequence or an image; the calls of a layer within one forward pass count as more).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from opacus.layers.dp_rnn import DPRNNBase, RNNLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.linalg import vector_norm
from torch.nn import functional
from torch.nn.grad import conv2d_input

from fl_app.errors import ModelError
from fl_app.training._batches import channels_last

_CACHED = 2**18
"""Numbers that are worked on at a time: 1 MiB, so that they stay in a core's cache."""


class SampleGradients(ABC):
    """The gradients of B rows with respect to one parameter."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def norms(self, order: int) -> Tensor:
        """Returns the norm of each row's gradient [B], float64 where the device has it."""

    @abstractmethod
    def without(self, dropped_B: Tensor) -> SampleGradients:
        """Returns the gradients with zero for the rows of `dropped_B`, whatever they held."""

    @abstractmethod
    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """Returns the sum of factor times gradient over the rows, shaped like the parameter.

        Args:
            factors_B: as wide as `norms`, each in [0, 1].
        """


@dataclass(frozen=True, slots=True)
class Dense(SampleGradients):
    """Gradients multiplied out, [B, ...] in any memory order."""

    grads: Tensor

    def __len__(self) -> int:
        return len(self.grads)

    def norms(self, order: int) -> Tensor:
        """Returns the norm of each row's gradient [B]."""
        dtype, grads = wide(self.grads), self._flat()
        if grads.numel() <= _CACHED:
            norms_B: Tensor = vector_norm(grads, order, dim=1, dtype=dtype)
            return norms_B
        # Rows at a time: torch copies what it takes norms of into the wider type.
        parts = [vector_norm(grads[part], order, dim=1, dtype=dtype) for part in _parts(grads)]
        return torch.cat(parts)

    def without(self, dropped_B: Tensor) -> SampleGradients:
        """Returns the gradients with zero for the rows of `dropped_B`."""
        flags = dropped_B.view(-1, *[1] * (self.grads.dim() - 1))
        return Dense(self.grads.masked_fill(flags, 0.0))

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """Returns the sum of factor times gradient over the rows."""
        total = factors_B.to(self.grads.dtype) @ self._flat()
        if self.grads.is_contiguous():
            return total.view(self.grads.shape[1:])
        order = self._order()
        ordered = total.view([self.grads.shape[1 + axis] for axis in order])
        return ordered.permute([order.index(axis) for axis in range(len(order))])

    def _order(self) -> list[int]:
        """Returns the axes of the parameter from the outermost in memory to the innermost."""
        strides = self.grads.stride()[1:]
        return sorted(range(len(strides)), key=lambda axis: -strides[axis])

    def _flat(self) -> Tensor:
        if self.grads.is_contiguous():
            return self.grads.flatten(1)
        return self.grads.permute(0, *[1 + axis for axis in self._order()]).flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer(SampleGradients):
    """Gradients of rank one: row b's is ``outputs_BO[b]`` times ``inputs_BI[b]`` transposed."""

    outputs_BO: Tensor
    inputs_BI: Tensor

    def __len__(self) -> int:
        return len(self.outputs_BO)

    def norms(self, order: int) -> Tensor:
        """Returns the norm of each row's gradient [B]: for L1 and L2 the product of two norms."""
        dtype = wide(self.outputs_BO)
        outputs_B: Tensor = vector_norm(self.outputs_BO, order, dim=1, dtype=dtype)
        inputs_B: Tensor = vector_norm(self.inputs_BI, order, dim=1, dtype=dtype)
        return outputs_B * inputs_B

    def without(self, dropped_B: Tensor) -> SampleGradients:
        """Returns the gradients with zero for the rows of `dropped_B`."""
        flags_B1 = dropped_B[:, None]
        return Outer(
            outputs_BO=self.outputs_BO.masked_fill(flags_B1, 0.0),
            inputs_BI=self.inputs_BI.masked_fill(flags_B1, 0.0),
        )

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """Returns the sum of factor times gradient over the rows [O, I].

        Both factors of a row are brought to at most 1 first: a tiny and a huge one would lose
        digits in float32, and with them the bound on the row's share.
        """
        outputs_BO, largest_output_B = _unit(self.outputs_BO)
        inputs_BI, largest_input_B = _unit(self.inputs_BI)
        scales_B = factors_B * largest_output_B * largest_input_B
        return (outputs_BO * scales_B.to(outputs_BO.dtype)[:, None]).T @ inputs_BI


def _unit(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row divided by its largest magnitude, and these [B] (1 for a row of zeros)."""
    if rows.shape[1] == 0:
        return rows, rows.new_ones(len(rows), dtype=wide(rows))
    largest_B1 = rows.abs().amax(1, keepdim=True)
    largest_B1 = torch.where(largest_B1 > 0, largest_B1, 1.0)
    return rows / largest_B1, largest_B1[:, 0].to(wide(rows))


def wide(tensor: Tensor) -> torch.dtype:
    """Returns the type to take norms in: float32 norms of many numbers come out too small."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


@dataclass(slots=True)
class Products:
    """A linear weight's per-sample gradients before multiplication: one pair a call of the layer.

    Attributes:
        outputs: gradients of the outputs, each [B, L, O].
        inputs: each [B, L, I].
    """

    outputs: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)

    def gradients(self) -> SampleGradients:
        """Returns the sum over all positions and calls of each row's outer products."""
        outputs_BLO, inputs_BLI = (
            tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
            for tensors in (self.outputs, self.inputs)
        )
        if outputs_BLO.shape[1] == 1:
            return Outer(outputs_BO=outputs_BLO[:, 0], inputs_BI=inputs_BLI[:, 0])
        return Dense(torch.bmm(outputs_BLO.transpose(1, 2), inputs_BLI))


def sample_gradients(parameter: Tensor, num_rows: int) -> SampleGradients:
    """Returns the gradients of the last backward pass; zeros if it did not reach `parameter`.

    Raises:
        ModelError: they are not one a row.
    """
    kept = getattr(parameter, "grad_sample", None)
    if kept is None:
        return Dense(parameter.new_zeros((num_rows, *parameter.shape)))
    gradients = kept.gradients() if isinstance(kept, Products) else Dense(kept)
    if len(gradients) != num_rows:
        raise ModelError(
            "model: a layer's per-sample gradients are not one a record; keep the records as the "
            "first axis in every layer"
        )
    return gradients


def _add(parameter: Tensor, grads: Tensor) -> None:
    kept = getattr(parameter, "grad_sample", None)
    if kept is not None and len(kept) != len(grads):
        raise ModelError("model: a layer is called with different numbers of records")
    parameter.grad_sample = grads if kept is None else kept + grads  # type: ignore[attr-defined]


class _Linear(torch.autograd.Function):
    """``functional.linear`` whose backward pass keeps the factors of per-sample gradients."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (saved.detach() for saved in ctx.saved_tensors)
        outputs_BLO = grad.reshape(len(grad), -1, grad.shape[-1])
        if ctx.layer.bias is not None:
            _add(ctx.layer.bias, outputs_BLO.sum(1))
        if ctx.layer.weight.grad_sample is None:
            ctx.layer.weight.grad_sample = Products()
        products: Products = ctx.layer.weight.grad_sample
        products.outputs.append(outputs_BLO)
        products.inputs.append(x.reshape(len(x), -1, x.shape[-1]))
        return None, grad @ weight if ctx.needs_input_grad[1] else None, None, None


class _Conv2d(torch.autograd.Function):
    """``functional.conv2d`` whose backward pass keeps per-sample gradients."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return functional.conv2d(x, weight, bias, *_geometry(layer))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (saved.detach() for saved in ctx.saved_tensors)
        if ctx.layer.bias is not None:
            _add(ctx.layer.bias, grad.sum((2, 3)))
        _add(ctx.layer.weight, _conv2d_gradients(ctx.layer, x, grad))
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        x_grad = conv2d_input(x.shape, weight, grad, *_geometry(ctx.layer))  # type: ignore[no-untyped-call]
        return None, x_grad, None, None


def _geometry(layer: nn.Conv2d) -> tuple[Any, ...]:
    padding = (0, 0) if _is_padded_before(layer) else layer.padding
    return layer.stride, padding, layer.dilation, layer.groups


def _is_padded_before(layer: nn.Conv2d) -> bool:
    """Returns whether something other than equal rims of zeros is put around the images."""
    return isinstance(layer.padding, str) or layer.padding_mode != "zeros"


class _MaxPool2x2(torch.autograd.Function):
    """``functional.max_pool2d(x, 2)`` by comparing columns, then rows, without an index for each.

    On the CPU about four times faster than torch's. The gradient goes to the first largest value in
    reading order, as there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = channels_last(x)
        columns = torch.maximum(*_halves(x, 3))
        ctx.save_for_backward(x, columns)
        return torch.maximum(*_halves(columns, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, columns = ctx.saved_tensors
        return _to_larger(_to_larger(channels_last(grad), columns, 2), x, 3)


def _halves(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Returns the values at even and at odd places of `axis`, without the last of an odd number."""
    last = x.shape[axis] // 2 * 2
    if axis == 2:
        return x[:, :, 0:last:2], x[:, :, 1:last:2]
    return x[..., 0:last:2], x[..., 1:last:2]


def _to_larger(grad: Tensor, x: Tensor, axis: int) -> Tensor:
    """Returns `grad` in the places of the larger of each pair of `x`, of the first if equal."""
    spread = torch.zeros_like(x) if x.shape[axis] % 2 else torch.empty_like(x)
    first, second = _halves(spread, axis)
    # 0.0 and 1.0 in place of booleans: torch multiplies by those several times more slowly.
    torch.mul(grad, torch.ge(*_halves(x, axis), out=torch.empty_like(first)), out=first)
    torch.sub(grad, first, out=second)
    return spread


def _conv2d_gradients(layer: nn.Conv2d, x: Tensor, grad: Tensor) -> Tensor:
    """Returns the per-sample gradients of a convolution's weight [B, *weight.shape]."""
    _, (top, left), *_ = _geometry(layer)
    padded = functional.pad(x, (left, left, top, top)) if top or left else x
    run = layer.weight.shape[1] * layer.kernel_size[1]
    if layer.groups == 1 and run >= grad.shape[3]:
        return _channels_inside(layer, padded.permute(0, 2, 3, 1).contiguous(), grad)
    return _positions_inside(layer, padded.contiguous(), grad)


def _channels_inside(layer: nn.Conv2d, x_BHWC: Tensor, grad: Tensor) -> Tensor:
    """Returns the gradients by products over [L, I]: copied in runs of kernel width x channels."""
    outputs_BLO = grad.permute(0, 2, 3, 1).flatten(1, 2)
    (kernel_h, kernel_w), channels = layer.kernel_size, layer.in_channels
    height, width = x_BHWC.shape[1:3]
    row_h, row_w = width * channels, channels
    (step_h, step_w), (gap_h, gap_w) = layer.stride, layer.dilation
    windows = x_BHWC.as_strided(
        (len(x_BHWC), *grad.shape[2:], kernel_h, kernel_w, channels),
        (height * row_h, step_h * row_h, step_w * row_w, gap_h * row_h, gap_w * row_w, 1),
    )
    shape = (outputs_BLO.shape[1], kernel_h * kernel_w * channels)
    grads_BOI = _multiplied(outputs_BLO.transpose(1, 2), windows, shape, transposed=False)
    split = (layer.out_channels, kernel_h, kernel_w, channels)
    return grads_BOI.view(-1, *split).permute(0, 1, 4, 2, 3)


def _positions_inside(layer: nn.Conv2d, x_BCHW: Tensor, grad: Tensor) -> Tensor:
    """Returns the gradients by products over [I, L], group by group: copied in runs of a row."""
    groups, (out_h, out_w), channels = layer.groups, grad.shape[2:], layer.in_channels
    outputs = grad.reshape(len(grad) * groups, -1, out_h * out_w)
    height, width = x_BCHW.shape[2:]
    share, plane = channels // groups, height * width
    (step_h, step_w), (gap_h, gap_w) = layer.stride, layer.dilation
    windows = x_BCHW.as_strided(
        (len(x_BCHW) * groups, share, *layer.kernel_size, out_h, out_w),
        (share * plane, plane, gap_h * width, gap_w, step_h * width, step_w),
    )
    shape = (layer.weight[0].numel(), out_h * out_w)
    grads = _multiplied(outputs, windows, shape, transposed=True)
    return grads.view(len(x_BCHW), *layer.weight.shape)


def _multiplied(
    outputs: Tensor, windows: Tensor, shape: tuple[int, int], *, transposed: bool
) -> Tensor:
    """Returns outputs [N, O, L] times unfolded inputs [N, L, I] ([N, I, L] if `transposed`)."""
    inner = shape[0] if transposed else shape[1]
    grads = outputs.new_empty(len(outputs), outputs.shape[1], inner)
    columns: Tensor | None = None
    for part in _parts(windows):
        unfolded = windows[part]
        if columns is None:
            columns = outputs.new_empty(len(unfolded), *shape)
        copied = columns[: len(unfolded)]
        copied.view(unfolded.shape).copy_(unfolded)
        factor = copied.transpose(1, 2) if transposed else copied
        torch.bmm(outputs[part], factor, out=grads[part])
    return grads


def _parts(rows: Tensor) -> Iterator[slice]:
    """Yields ranges of `rows` [B, ...] of about `_CACHED` numbers each, all rows in order."""
    size = max(1, _CACHED // max(1, rows[0].numel())) if len(rows) else 1
    for start in range(0, len(rows), size):
        yield slice(start, start + size)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    output: Tensor = _Linear.apply(layer, x, layer.weight, layer.bias)
    return output


def _conv2d(layer: nn.Conv2d, x: Tensor) -> Tensor:
    if _is_padded_before(layer):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = functional.pad(x, layer._reversed_padding_repeated_twice, mode)
    output: Tensor = _Conv2d.apply(layer, x, layer.weight, layer.bias)
    return output


def _conv2d_before_pool(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """As `_conv2d`, with the channels innermost on the CPU, where `_MaxPool2x2` needs them."""
    return _conv2d(layer, channels_last(x) if x.device.type == "cpu" else x)


def _plain_conv2d_before_pool(layer: nn.Conv2d, x: Tensor) -> Tensor:
    return nn.Conv2d.forward(layer, channels_last(x) if x.device.type == "cpu" else x)


def _max_pool2d(layer: nn.MaxPool2d, x: Tensor) -> Tensor:
    if x.device.type != "cpu" or x.dim() != 4:
        plain: Tensor = nn.MaxPool2d.forward(layer, x)
        return plain
    output: Tensor = _MaxPool2x2.apply(x)
    return output


_Rules = Mapping[type[nn.Module], Callable[..., Tensor]]

_FAST: _Rules = {nn.Linear: _linear, RNNLinear: _linear, nn.Conv2d: _conv2d}
_FAST_WITH_POOLS: _Rules = {**_FAST, nn.Conv2d: _conv2d_before_pool, nn.MaxPool2d: _max_pool2d}


def fast_layers(model: nn.Module, hooked: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the modules of `hooked` that have a rule here; Opacus keeps the others.

    Max-poolings by 2 come along; they have no parameters. Left to Opacus: subclasses, and a
    parameter that two layers share or that is frozen beside one that is not.
    """
    owners = Counter(
        id(parameter)
        for module in model.modules()
        if not isinstance(module, DPRNNBase)  # it names its cells' parameters a second time
        for parameter in module.parameters(recurse=False)
    )
    pools = [module for module in model.modules() if isinstance(module, nn.MaxPool2d)]
    return [module for module in (*hooked, *pools) if _has_rule(module, owners)]


def _has_rule(module: nn.Module, owners: Counter[int]) -> bool:
    if type(module) not in _FAST_WITH_POOLS or "forward" in vars(module):
        return False
    if isinstance(module, nn.MaxPool2d) and not _is_by_two(module):
        return False
    return all(p.requires_grad and owners[id(p)] == 1 for p in module.parameters(recurse=False))


def _is_by_two(pool: nn.MaxPool2d) -> bool:
    options = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    twice = [option if isinstance(option, tuple) else (option, option) for option in options]
    return twice == [(2, 2), (2, 2), (0, 0), (1, 1)] and not (pool.ceil_mode or pool.return_indices)


@contextmanager
def fast_forward(layers: Collection[nn.Module]) -> Iterator[None]:
    """Within it `layers` of `fast_layers` keep per-sample gradients, and get no plain ones."""
    with _forward(layers, _FAST_WITH_POOLS if _pooled(layers) else _FAST):
        yield


@contextmanager
def plain_forward(layers: Collection[nn.Module]) -> Iterator[None]:
    """Within it `layers` are plain, and lay out images as in `fast_forward`: dropout follows it."""
    with _forward(layers, {nn.Conv2d: _plain_conv2d_before_pool} if _pooled(layers) else {}):
        yield


def _pooled(layers: Collection[nn.Module]) -> bool:
    return any(isinstance(layer, nn.MaxPool2d) for layer in layers)


@contextmanager
def _forward(layers: Collection[nn.Module], rules: _Rules) -> Iterator[None]:
    changed = [layer for layer in layers if type(layer) in rules]
    for layer in changed:
        layer.forward = partial(rules[type(layer)], layer)
    try:
        yield
    finally:
        for layer in changed:
            del layer.forward
