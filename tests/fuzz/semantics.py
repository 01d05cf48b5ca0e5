"""What autograd promises, of layers under every recipe: each way to run a step gives the bits of the plain step."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.testing import relative_error

from .draw import Draw, assert_same, gradients

Check = Callable[[Draw, nn.Module, Tensor, Tensor], None]
SEED = 7  # of random rounding, in every backward that is compared


def case(draw: Draw) -> dict[str, float]:
    recipe, dtype = draw.recipe(with_none=True), draw.dtype()
    features, rows = draw.size("features", 130), draw.size("rows", 130)
    module = draw.layer(features, recipe, dtype)
    x = draw.values("x", (*draw.lead(rows), features), dtype)
    with torch.no_grad():
        outputs = copy.deepcopy(module)(x).shape
    dy = draw.values("dy", outputs, dtype)
    for _ in range(draw.random.randint(0, 2)):  # so that delayed scaling has moved
        gradients(module, x, dy)
    checks = draw.random.sample(CHECKS, 4)
    for check in checks:
        draw.note("check", check.__name__)
        check(draw, module, x, dy)
    return {}


def _plain(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The step on a copy, whose scales then move alone."""
    return gradients(copy.deepcopy(module), x, dy, seed=SEED)


def _backward(y: Tensor, module: nn.Module, x: Tensor, dy: Tensor, retain: bool = False) -> list[Tensor]:
    torch.manual_seed(SEED)
    wanted = [x, *module.parameters()]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy, retain_graph=retain)]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(True)


def _error_of(function: Callable[[], object]) -> str:
    """What a ``RuntimeError`` of the function says; nothing where it raises none."""
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


def retained_graph(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    expected, ours, leaf = _plain(module, x, dy), copy.deepcopy(module), _leaf(x)
    y = ours(leaf)
    for time in range(3):
        assert_same(_backward(y, ours, leaf, dy, retain=time < 2), expected, f"backward {time} of one graph")
    error = _error_of(lambda: _backward(y, ours, leaf, dy))
    assert "second time" in error, f"a freed graph runs backward once more: {error or 'no error'}"


def interleaved(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    """Two forwards, then their backwards in either order."""
    other = torch.randn_like(x)
    for order in ((0, 1), (1, 0)):
        ours = copy.deepcopy(module)
        leaves = [_leaf(x), _leaf(other)]
        outputs = [ours(leaf) for leaf in leaves]
        results: dict[int, list[Tensor]] = {}
        for index in order:
            results[index] = _backward(outputs[index], ours, leaves[index], dy)
        assert_same(results[0], _plain(module, x, dy), f"the first of two forwards, order {order}")
        if not any(
            "scale" in name for name, _ in module.named_buffers()
        ):  # else gradients of the first set the scale
            assert_same(results[1], _plain(module, other, dy), f"the second of two forwards, order {order}")


def hooks(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    """Hooks of tensors, modules and parameters see the gradients, and may change them."""
    expected, ours, leaf = _plain(module, x, 2 * dy), copy.deepcopy(module), _leaf(x)
    seen: list[str] = []
    grads: list[Tensor] = []
    handle = ours.register_full_backward_hook(
        lambda m, gi, go: seen.append("module") or grads.append(gi[0].detach())
    )
    forward = ours.register_forward_hook(lambda m, inputs, out: seen.append("forward"))
    for parameter in ours.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append("parameter"))
    y = ours(leaf)
    y.register_hook(lambda grad: 2 * grad)
    torch.manual_seed(SEED)
    y.backward(dy)
    handle.remove()
    forward.remove()
    results = [y.detach(), leaf.grad, *(p.grad for p in ours.parameters())]
    assert_same(results, expected, "with hooks")
    assert_same(grads, [expected[1]], "what the module's hook sees")
    count = len(list(ours.parameters()))
    assert sorted(seen) == sorted(["forward", "module", *["parameter"] * count]), f"hooks that ran: {seen}"


def saved_tensors(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    """What is saved passes through hooks that copy it, and through those that keep it in CPU memory."""
    expected = _plain(module, x, dy)
    contexts = {
        "copies": torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()),
        "save_on_cpu": torch.autograd.graph.save_on_cpu(pin_memory=draw.device == "cuda"),
    }
    for name, context in contexts.items():
        ours, leaf = copy.deepcopy(module), _leaf(x)
        with context:
            y = ours(leaf)
        assert_same(_backward(y, ours, leaf, dy), expected, name)


def anomaly(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    expected, ours, leaf = _plain(module, x, dy), copy.deepcopy(module), _leaf(x)
    with torch.autograd.detect_anomaly(check_nan=all(bool(e.isfinite().all()) for e in expected)):
        assert_same(_backward(ours(leaf), ours, leaf, dy), expected, "anomaly mode")


def checkpointed(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    """PyTorch's own checkpoint around the layer, in both of its ways."""
    expected = _plain(module, x, dy)
    ours, leaf = copy.deepcopy(module), _leaf(x)
    y = checkpoint(ours, leaf, use_reentrant=False)
    assert_same(_backward(y, ours, leaf, dy), expected, "checkpoint")
    ours, leaf = copy.deepcopy(module), _leaf(x)
    y = checkpoint(ours, leaf, use_reentrant=True)
    torch.manual_seed(SEED)
    y.backward(dy)
    results = [y.detach(), leaf.grad, *(p.grad for p in ours.parameters())]
    assert_same(results, expected, "reentrant checkpoint")


def some_gradients(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    """Of the input alone, of the parameters alone, of one parameter."""
    expected = _plain(module, x, dy)
    for index in draw.random.sample(range(1, len(expected)), min(2, len(expected) - 1)):
        ours = copy.deepcopy(module)
        leaf = _leaf(x) if index == 1 or draw.random.random() < 0.5 else x.detach()
        wanted = [leaf, *ours.parameters()][index - 1]
        for parameter in ours.parameters():
            parameter.requires_grad_(parameter is wanted)
        y = ours(leaf)
        torch.manual_seed(SEED)
        (found,) = torch.autograd.grad(y, wanted, dy)
        assert_same([y.detach()], expected[:1], f"y for gradient {index} alone")
        if found.dim() > 1 or index == 1:
            assert_same([found], [expected[index]], f"gradient {index} alone")
        else:  # where a bias alone wants a gradient, nothing is quantized, and PyTorch sums in an order of its own
            error = relative_error(found, expected[index])
            assert error <= max(1e-4, 4 * torch.finfo(found.dtype).eps), (
                f"gradient {index} alone is off by {error}"
            )


def accumulated(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    """A graph that runs twice adds its gradients up."""
    expected, ours, leaf = _plain(module, x, dy), copy.deepcopy(module), _leaf(x)
    y = ours(leaf)
    for retain in (True, False):
        torch.manual_seed(SEED)
        y.backward(dy, retain_graph=retain)
    results = [leaf.grad, *(p.grad for p in ours.parameters())]
    assert_same(results, [e + e for e in expected[1:]], "accumulated gradients")


def changed_in_place(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    """The input or a weight changes between forward and backward: an error, or the gradients of before."""
    expected = _plain(module, x, dy)
    for what in ("x", "weight"):
        ours, base = copy.deepcopy(module), _leaf(x)
        leaf = base.clone()
        y = ours(leaf)
        with torch.no_grad():
            (leaf if what == "x" else next(p for p in ours.parameters() if p.dim() == 2)).mul_(3.0)
        torch.manual_seed(SEED)
        found: list[Tensor] = []
        error = _error_of(lambda: found.extend(torch.autograd.grad(y, [base, *ours.parameters()], dy)))
        if error:
            assert "modified by an inplace operation" in error, f"{what} changed: {error}"
        else:
            assert_same([y.detach(), *found], expected, f"{what} changed in place")


def without_gradients(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    expected = _plain(module, x, dy)[0]
    for context in (torch.no_grad(), torch.inference_mode()):
        ours = copy.deepcopy(module)
        with context:
            y = ours(x)
        assert not y.requires_grad
        assert_same([y.clone()], [expected], f"{type(context).__name__}")


def strided_gradients(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    """A gradient that is expanded from one number, and one with its dims swapped in memory."""
    if not draw.quantized:  # PyTorch's own product in high precision takes another way for other strides
        return
    one = torch.ones((), dtype=dy.dtype, device=dy.device).expand_as(dy)
    assert_same(_plain(module, x, one), _plain(module, x, one.contiguous()), "an expanded gradient")
    swapped = dy.transpose(0, -1).contiguous().transpose(0, -1)
    assert_same(_plain(module, x, swapped), _plain(module, x, dy.contiguous()), "a transposed gradient")


def other_thread(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    expected, ours, leaf = _plain(module, x, dy), copy.deepcopy(module), _leaf(x)
    y = ours(leaf)
    results: list[list[Tensor]] = []
    count = torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(count)  # OpenMP keeps it for each thread; another gives sums another order
        results.append(_backward(y, ours, leaf, dy))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results, "the backward of another thread raised"
    assert_same(results[0], expected, "the backward in another thread")


def saved_and_loaded(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    """A state dict carries all that decides a step.

    Of quantized weights it holds decoded row-wise values: they are quantized anew, and what was quantized once more in
    the other direction, or with a finer scale, gets other bits.
    """
    if any(isinstance(p, nc.QuantizedTensor) for p in module.parameters()):
        return
    fresh = copy.deepcopy(module)
    with torch.no_grad():
        for tensor in fresh.parameters():
            tensor.zero_()
    fresh.load_state_dict(module.state_dict())
    assert_same(gradients(fresh, x, dy, seed=SEED), _plain(module, x, dy), "after load_state_dict")


def no_rows(draw: Draw, module: nn.Module, x: Tensor, dy: Tensor) -> None:
    empty = x.new_empty(0, x.shape[-1])
    results = gradients(copy.deepcopy(module), empty, dy.new_empty(0, dy.shape[-1]))
    assert results[0].shape == (0, dy.shape[-1]) and results[1].shape == empty.shape
    assert not any(gradient.any() for gradient in results[2:]), "of no rows, a gradient is not zero"


CHECKS: tuple[Check, ...] = (
    retained_graph,
    interleaved,
    hooks,
    saved_tensors,
    anomaly,
    checkpointed,
    some_gradients,
    accumulated,
    changed_in_place,
    without_gradients,
    strided_gradients,
    other_thread,
    saved_and_loaded,
    no_rows,
)
