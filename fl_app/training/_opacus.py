"""Opacus with our noise: per-sample gradients for one call, clipped, summed, noised, divided.

Layers with a rule in `_fast_gradients` do without Opacus' hooks.

Shape letters: B rows of a batch, P parameters, L parameter tensors (layers).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.linalg import vector_norm
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from fl_app.errors import ModelError
from fl_app.layers import LayerShares
from fl_app.privacy import NoiseKind
from fl_app.rng import NoiseSource
from fl_app.stages import FloatVector, InputSpec
from fl_app.training._fast_gradients import (
    SampleGradients,
    fast_forward,
    fast_layers,
    plain_forward,
    sample_gradients,
    wide,
)

_LEFTOVERS = ("summed_grad", "grad_sample", "_current_grad_sample", "_forward_counter")


_REFUSED = "model: cannot be trained with per-sample gradients"
_WAY_OUT = "replace that layer, or choose training=sgd with a client-level mechanism"
_MARGIN = 1 - 2.0**-20
"""Clipped gradients end this much below C, so that float32 does not lift them over it."""
ONE_NORM = LayerShares(norms=None, noises=None)
"""One norm over all layers, the same noise in each."""
_PROBE_ROWS = 2
_PROBE_SEED = 0

_OUT_OF_PLACE: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.add_: torch.add,
    torch.Tensor.sub_: torch.sub,
    torch.Tensor.mul_: torch.mul,
    torch.Tensor.div_: torch.div,
}


class _OutOfPlace(TorchFunctionMode):
    """Within it ``x += y`` on a layer's output and ``inplace=True`` make a new tensor.

    Opacus' hooks hand out views, which autograd does not let a network change in place (the
    residual additions of torchvision's networks do). A network that writes ``x.add_(y)`` and goes
    on with x would compute something else; `check_per_sample` refuses it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("inplace"):
            kwargs["inplace"] = False
        if func in _OUT_OF_PLACE and args[0].requires_grad and args[0]._is_view():
            func = _OUT_OF_PLACE[func]
        return func(*args, **kwargs)


class _PerSample(GradSampleModule):  # type: ignore[misc]
    """Opacus' grad-sample mode "hooks", without hooks on the layers that `_fast_gradients` has.

    Attributes:
        fast: these layers.
    """

    fast: frozenset[nn.Module] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self.fast = frozenset(fast_layers(model, self.iterate_submodules(model)))
        self._hooked = any(True for _ in self.iterate_submodules(model))
        super().__init__(model, loss_reduction="sum", strict=True)

    def iterate_submodules(self, module: nn.Module) -> Iterator[nn.Module]:
        yield from (m for m in super().iterate_submodules(module) if m not in self.fast)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        if any(
            getattr(p, "grad_sample", None) is not None
            for layer in self.fast
            for p in layer.parameters()
        ):
            raise ValueError("a batch is still there; zero_grad comes before the next one")
        with _OutOfPlace() if self._hooked else nullcontext():
            scores: torch.Tensor = super().forward(*inputs)
        return scores


@contextmanager
def per_sample_gradients(model: nn.Module) -> Iterator[_PerSample]:
    """Yields `model` as a module that keeps per-sample gradients of a *summed* loss.

    `sample_gradients` reads them. Afterwards `model` has no hook, wrapper or gradient left,
    whatever happened inside.

    Raises:
        ModelError: a layer that Opacus cannot take per-sample gradients of.
    """
    try:
        wrapped = _PerSample(model)
    except NotImplementedError as error:
        _clean(model)
        raise ModelError(f"{_REFUSED}: {error}; {_WAY_OUT}") from error
    try:
        with warnings.catch_warnings(), fast_forward(wrapped.fast):
            # The first layer's input needs no gradient; torch wonders whether that is meant.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            yield wrapped
    finally:
        wrapped.to_standard_module()
        _clean(model)


def check_per_sample(model: nn.Module, spec: InputSpec) -> None:
    """Returns if the per-sample gradients of `model` are those of each row, on made-up inputs.

    One forward and backward pass over two inputs on the path that training takes, compared with
    plain ones, and a forward pass over one input; the model and torch's generators stay as they
    were.

    Raises:
        ModelError: a layer that per-sample gradients cannot be taken of, or come out wrong for.
    """
    was_training, last = model.training, [""]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_PROBE_SEED)
        inputs = _made_up(spec)
        hooks = [m.register_forward_pre_hook(_remember(n, last)) for n, m in model.named_modules()]
        model.train()
        try:
            _compare(model, inputs, spec.num_classes)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise ModelError(
                f"{_REFUSED} (last layer reached: {_named(model, last[0])}): {reason}; {_WAY_OUT}"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
            model.train(was_training)


def _made_up(spec: InputSpec) -> torch.Tensor:
    shape = (_PROBE_ROWS, *spec.shape)
    if spec.vocabulary is not None:
        return torch.randint(spec.vocabulary, shape)
    return torch.randn(shape)


def _compare(model: nn.Module, inputs: torch.Tensor, num_classes: int) -> None:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    labels = torch.arange(_PROBE_ROWS) % num_classes
    with torch.no_grad():
        model(inputs[:1])
    with per_sample_gradients(model) as wrapped:
        torch.default_generator.manual_seed(_PROBE_SEED)
        scores = wrapped(inputs)
        cross_entropy(scores, labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
        samples = [sample_gradients(parameter, _PROBE_ROWS) for parameter in named.values()]
    with plain_forward(wrapped.fast):
        torch.default_generator.manual_seed(_PROBE_SEED)
        plain_scores = model(inputs)
    if not torch.allclose(scores, plain_scores, rtol=1e-3, atol=1e-4):
        raise ModelError(
            f"{_REFUSED}: it changes a layer's output in place; write x = x + y for x.add_(y)"
        )
    losses_B = cross_entropy(plain_scores, labels, reduction="none")
    for factors_B in (torch.ones(_PROBE_ROWS), torch.eye(_PROBE_ROWS)[0]):
        loss = (losses_B * factors_B).sum()
        plain = torch.autograd.grad(
            loss, list(named.values()), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for name, grads, gradient in zip(named, samples, plain, strict=True):
            if not _agree(grads, factors_B, gradient):
                raise ModelError(
                    f"{_REFUSED}: those of {_named(model, name.rpartition('.')[0])} do not add up "
                    f"to its gradient; {_WAY_OUT}"
                )


def _agree(grads: SampleGradients, factors_B: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Returns whether the weighted sum, and the norm if one row has all weight, are right."""
    factors_B = factors_B.to(wide(gradient))
    total = grads.weighted_sum(factors_B)
    close = (total - gradient).abs() <= 1e-3 * gradient.abs().max() + 1e-5
    norm, expected = float(grads.norms(2) @ factors_B), float(gradient.norm())
    alone = int(factors_B.sum()) == 1
    return bool(close.all()) and (not alone or abs(norm - expected) <= 1e-3 * expected + 1e-5)


def _remember(name: str, last: list[str]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: object) -> None:
        last[0] = name

    return hook


def _named(model: nn.Module, name: str) -> str:
    return f"{name or 'model'} ({type(model.get_submodule(name)).__name__})"


def _clean(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
        for name in _LEFTOVERS:
            if hasattr(parameter, name):
                delattr(parameter, name)
    for module in model.modules():
        for name in ("activations", "max_batch_len"):
            if name in module.__dict__:
                delattr(module, name)


class _Samples(Sequence[SampleGradients]):
    """Per-sample gradients of parameters; Opacus asks several times a step how many there are."""

    def __init__(self, parameters: Sequence[nn.Parameter], num_rows: int) -> None:
        self._parameters, self._num_rows = parameters, num_rows

    def __len__(self) -> int:
        return len(self._parameters)

    def __getitem__(self, index: Any) -> Any:
        return sample_gradients(self._parameters[index], self._num_rows)


class NoisySGD(DPOptimizer):  # type: ignore[misc]
    """Opacus' optimizer with our noise, a fixed denominator, and zero for what is not finite.

    Guarantee:
        Each step's gradient is (sum of per-sample gradients, each of norm <= C up to float32
        rounding, + noise of scale z C from `noise`) / `denominator`. RECORD, ADD_OR_REMOVE_ONE.
        GAUSSIAN: the L2 norm, std z C. LAPLACE: the L1 norm, scale b = z C. With `layers` each
        layer has its own norm and noise, which cost the same together (`fl_app.layers`).
        torch's generators are not touched. The un-noised sum is dropped when the noise is in.
        - a per-sample gradient with a NaN, an infinity or an overflowing norm: zero;
        - an empty batch: noise alone, counted;
        - a parameter without gradient (unused layer): zero per-sample gradients, noised.

    Attributes:
        num_noisy_steps: steps that went through `add_noise` (with z = 0 too).
        num_rows: B of the batch whose gradients are about to be used; private.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        noise_multiplier: float,
        clipping_norm: float,
        denominator: float,
        noise: NoiseSource,
        kind: NoiseKind = NoiseKind.GAUSSIAN,
        layers: LayerShares = ONE_NORM,
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clipping_norm,
            expected_batch_size=denominator,
            loss_reduction="mean",
        )
        self.num_noisy_steps = 0
        self.num_rows = 0
        self._noise = noise
        self._kind = kind
        self._layers = layers

    @property
    def grad_samples(self) -> Sequence[SampleGradients]:
        """The per-sample gradients of each parameter, made when they are asked for."""
        return _Samples(self.params, self.num_rows)

    def clip_and_accumulate(self) -> None:
        """Adds the clipped per-sample gradients of this (part of a) batch to the sum."""
        grads = list(self.grad_samples)
        order = 1 if self._kind is NoiseKind.LAPLACE else 2
        norms_BL = torch.stack([g.norms(order) for g in grads], dim=1)
        norms_B = vector_norm(norms_BL, order, dim=1)
        factors_BL = self._factors(norms_BL, norms_B)
        single = torch.finfo(torch.float32)
        # A factor below float32's normal numbers has too few digits to hold the bound.
        broken_B = ~(norms_B <= single.max) | (factors_BL < single.tiny).any(dim=1)
        if bool(broken_B.any()):
            factors_BL[broken_B] = 0.0
            # 0 * NaN is NaN, so the rows themselves are zeroed too.
            grads = [g.without(broken_B) for g in grads]
        for parameter, grad, factors_B in zip(
            self.params, grads, factors_BL.unbind(1), strict=True
        ):
            clipped = grad.weighted_sum(factors_B)
            if parameter.summed_grad is None:
                parameter.summed_grad = clipped
            else:
                parameter.summed_grad += clipped

    def _factors(self, norms_BL: torch.Tensor, norms_B: torch.Tensor) -> torch.Tensor:
        """Returns what each layer [L] of each row's gradient is multiplied with [B, L]."""
        bound: float = self.max_grad_norm * _MARGIN
        if self._layers.norms is None:
            factors_B = (bound / norms_B).clamp(max=1.0)
            return factors_B[:, None].repeat(1, norms_BL.shape[1])
        bounds_L = bound * norms_BL.new_tensor(self._layers.norms)
        return (bounds_L / norms_BL).clamp(max=1.0)

    def add_noise(self) -> None:
        """Turns the sum into the noised gradient; one noise vector [P] serves all parameters."""
        scale = self.noise_multiplier * self.max_grad_norm
        sizes = [parameter.numel() for parameter in self.params]
        noises = self._draw(sizes, scale) if scale > 0 else [None] * len(sizes)
        for parameter, noise in zip(self.params, noises, strict=True):
            total = parameter.summed_grad
            if noise is not None:
                total = total + noise.view_as(total).to(total.device)
            parameter.grad = total.view_as(parameter)
            parameter.summed_grad = None
        self.num_noisy_steps += 1

    def take_sum(self) -> FloatVector:
        """Returns the clipped sum [P] *without noise*, and keeps nothing of it."""
        parts = [p.summed_grad.reshape(-1).float().cpu().numpy() for p in self.params]
        for parameter in self.params:
            parameter.summed_grad = None
        sum_P: FloatVector = np.concatenate(parts)
        return sum_P

    def scale_grad(self) -> None:
        """Divides by the public denominator, whatever the batch held."""
        for parameter in self.params:
            parameter.grad /= self.expected_batch_size

    def _draw(self, sizes: list[int], scale: float) -> tuple[torch.Tensor, ...]:
        laplace = self._kind is NoiseKind.LAPLACE
        drawn_P = (self._noise.laplace if laplace else self._noise.gaussian)(sum(sizes))
        shares = self._layers.noises
        drawn_P *= scale if shares is None else np.repeat(np.multiply(shares, scale), sizes)
        return torch.split(torch.from_numpy(drawn_P).float(), sizes)
