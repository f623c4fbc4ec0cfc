"""Opacus with our noise: per-sample gradients for one call, clipped, summed, noised, divided.

Shape letters: B rows of a batch, P parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.linalg import vector_norm
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from fl_app.errors import ModelError
from fl_app.privacy import NoiseKind
from fl_app.rng import NoiseSource
from fl_app.stages import InputSpec

_LEFTOVERS = ("summed_grad", "grad_sample", "_current_grad_sample", "_forward_counter")


_REFUSED = "model: cannot be trained with per-sample gradients"
_WAY_OUT = "replace that layer, or choose training=sgd with a client-level mechanism"
_MARGIN = 1 - 2.0**-20
"""Clipped gradients end this much below C, so that float32 does not lift them over it."""
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
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        with _OutOfPlace():
            scores: torch.Tensor = super().forward(*inputs)
        return scores


@contextmanager
def per_sample_gradients(model: nn.Module) -> Iterator[nn.Module]:
    """Yields `model` as a module that keeps per-sample gradients of a *summed* loss.

    Afterwards `model` has no hook, wrapper or gradient left, whatever happened inside.

    Raises:
        ModelError: a layer that Opacus cannot take per-sample gradients of.
    """
    try:
        wrapped = _PerSample(model, loss_reduction="sum", strict=True)
    except NotImplementedError as error:
        _clean(model)
        raise ModelError(f"{_REFUSED}: {error}; {_WAY_OUT}") from error
    try:
        with warnings.catch_warnings():
            # The first layer's input needs no gradient; torch wonders whether that is meant.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            yield wrapped
    finally:
        wrapped.to_standard_module()
        _clean(model)


def check_per_sample(model: nn.Module, spec: InputSpec) -> None:
    """Returns if the per-sample gradients of `model` add up to its gradient, on made-up inputs.

    One forward and backward pass over two inputs, and a forward pass over one; the model and
    torch's generators stay as they were.

    Raises:
        ModelError: a layer that Opacus cannot take per-sample gradients of, or takes wrong ones of.
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
    labels = torch.arange(_PROBE_ROWS) % num_classes
    with torch.no_grad():
        model(inputs[:1])
        torch.default_generator.manual_seed(_PROBE_SEED)
        plain_scores = model(inputs)
    with per_sample_gradients(model) as wrapped:
        torch.default_generator.manual_seed(_PROBE_SEED)
        scores = wrapped(inputs)
        if not torch.allclose(scores, plain_scores, rtol=1e-3, atol=1e-4):
            raise ModelError(
                f"{_REFUSED}: it changes a layer's output in place; write x = x + y for x.add_(y)"
            )
        cross_entropy(scores, labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not _adds_up(parameter):
                raise ModelError(
                    f"{_REFUSED}: those of {_named(model, name.rpartition('.')[0])} do not add up "
                    f"to its gradient; {_WAY_OUT}"
                )


def _adds_up(parameter: nn.Parameter) -> bool:
    gradient, samples = parameter.grad, getattr(parameter, "grad_sample", None)
    if gradient is None or not isinstance(samples, torch.Tensor):
        return gradient is None or not bool(gradient.any())
    tolerance = 1e-3 * float(gradient.abs().max()) + 1e-5
    return bool(((samples.sum(0) - gradient).abs() <= tolerance).all())


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


class NoisySGD(DPOptimizer):  # type: ignore[misc]
    """Opacus' optimizer with our noise, a fixed denominator, and zero for what is not finite.

    Guarantee:
        Each step's gradient is (sum of per-sample gradients, each of norm <= C up to float32
        rounding, + noise of scale z C from `noise`) / `denominator`. RECORD, ADD_OR_REMOVE_ONE.
        GAUSSIAN: the L2 norm, std z C. LAPLACE: the L1 norm, scale b = z C.
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

    def clip_and_accumulate(self) -> None:
        """Adds the clipped per-sample gradients of this (part of a) batch to the sum."""
        grads = self.grad_samples
        order = 1 if self._kind is NoiseKind.LAPLACE else 2
        # float64, and a margin: float32 norms of many parameters come out too small.
        wide = torch.float32 if grads[0].device.type == "mps" else torch.float64
        norms = [vector_norm(g.flatten(1), order, dim=1, dtype=wide) for g in grads]
        norms_B = vector_norm(torch.stack(norms, dim=1), order, dim=1)
        norms_B[norms_B > torch.finfo(torch.float32).max] = torch.inf
        bound = self.max_grad_norm * _MARGIN
        factors_B = (bound / norms_B).clamp(max=1.0).to(grads[0].dtype)
        broken_B = ~torch.isfinite(norms_B)
        if bool(broken_B.any()):
            factors_B[broken_B] = 0.0
            # 0 * NaN is NaN, so the rows themselves are zeroed too.
            grads = [torch.where(_like(broken_B, g), 0.0, g) for g in grads]
        for parameter, grad in zip(self.params, grads, strict=True):
            clipped = torch.einsum("i,i...", factors_B, grad)
            if parameter.summed_grad is None:
                parameter.summed_grad = clipped
            else:
                parameter.summed_grad += clipped

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

    def scale_grad(self) -> None:
        """Divides by the public denominator, whatever the batch held."""
        for parameter in self.params:
            parameter.grad /= self.expected_batch_size

    def _draw(self, sizes: list[int], scale: float) -> tuple[torch.Tensor, ...]:
        laplace = self._kind is NoiseKind.LAPLACE
        drawn_P = (self._noise.laplace if laplace else self._noise.gaussian)(sum(sizes))
        drawn_P *= scale
        return torch.split(torch.from_numpy(drawn_P).float(), sizes)

    def _get_flat_grad_sample(self, p: torch.Tensor) -> torch.Tensor:
        if getattr(p, "grad_sample", None) is None:
            return p.new_zeros((self.num_rows, *p.shape))
        grads: torch.Tensor = super()._get_flat_grad_sample(p)
        return grads


def _like(flags_B: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return flags_B.view(-1, *[1] * (grad.dim() - 1))
