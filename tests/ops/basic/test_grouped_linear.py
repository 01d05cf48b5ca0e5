"""``GroupedLinear`` as an operation does what the module does, alone and among others, eager and compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from modules import assert_same
from recipes import DEVICE, RECIPES
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import narrowcast as nc
from narrowcast.ops import GroupedLinear
from narrowcast.ops.fuser import OperationFuser

K, N = 48, 80  # not multiples of every block size
SPLITS = [24, 0, 9]
GROUPS, ROWS = len(SPLITS), sum(SPLITS)
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def make_op(groups: int = GROUPS, dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> GroupedLinear:
    torch.manual_seed(1)
    op = GroupedLinear(groups, K, N, device=DEVICE, dtype=dtype, **kwargs)
    with torch.no_grad():
        for bias in op._parts_of("bias"):
            bias.normal_()
    return op


def module_of(op: GroupedLinear, **kwargs: Any) -> nc.GroupedLinear:
    """The module with the same parameters."""
    module = nc.GroupedLinear(
        op.num_groups,
        op.in_features,
        op.out_features,
        bias=op.use_bias,
        device=DEVICE,
        params_dtype=op._parts_of("weight")[0].dtype,
        single_grouped_weight=op.single_grouped_weight,
        single_grouped_bias=op.single_grouped_bias,
        **kwargs,
    )
    module.load_state_dict(op.state_dict())
    return module


def splits_of(sizes: Any = SPLITS, device: str = DEVICE) -> Tensor:
    return torch.tensor(sizes, device=device)


def rows(count: int = ROWS, seed: int = 2, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, K, generator=generator).to(DEVICE, dtype).requires_grad_(True)


def scale_rows(count: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return (torch.rand(count, generator=generator) + 0.5).to(DEVICE).requires_grad_(True)


def compile_or_not(function: Any, compiled: bool) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function


def forward(function: Any, name: str, *args: Any, **kwargs: Any) -> Tensor:
    torch.manual_seed(7)
    with nc.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        return function(*args, **kwargs)


def gradients(y: Tensor, wanted: list[Tensor], **kwargs: Any) -> list[Tensor]:
    torch.manual_seed(8)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted, **kwargs)]


def run(
    owner: nn.Module, name: str, x: Tensor, *extra: Any, function: Any = None, **kwargs: Any
) -> list[Tensor]:
    y = forward(owner if function is None else function, name, x, *extra, **kwargs)
    # weights before biases, as operations have them; modules have them group by group
    parameters = sorted(owner.named_parameters(), key=lambda named: "bias" in named[0])
    wanted = [x, *extra, *(parameter for _, parameter in parameters)]
    wanted = [t for t in wanted if isinstance(t, Tensor) and t.requires_grad]
    return gradients(y, wanted)


@pytest.mark.parametrize(
    ("name", "single"),
    [
        pytest.param(name, False, marks=pytest.mark.requested if name in ("mxfp8", "custom") else ())
        for name in RECIPES
    ]
    + [("none", True), ("block", True)],
)
def test_equals_the_module(name: str, single: bool) -> None:
    op = make_op(single_grouped_weight=single, single_grouped_bias=single)
    twin, module = copy.deepcopy(op), module_of(op)
    function = compile_or_not(twin, True)
    for seed in range(2):  # delayed scaling takes its second scale from the first step
        x = rows(ROWS + 3, seed)
        ours = run(op, name, x, splits_of())
        assert all(map(torch.equal, ours, run(twin, name, x, splits_of(), function=function)))
        theirs = run(module, name, x, splits_of())
        empty = 2 + SPLITS.index(0)
        if not single:
            assert not ours.pop(empty).any() and not ours.pop(empty + GROUPS - 1).any()
            del theirs[empty], theirs[empty + GROUPS - 1]
        assert_same(ours, theirs)
        assert not ours[0][ROWS:].any() and not ours[1][ROWS:].any()


@pytest.mark.parametrize("where", ["host", "device"])
def test_splits_on_either_side_and_leading_dims(where: str) -> None:
    op = make_op(2)
    x = rows(48)
    folded = x.detach().view(3, 16, K).requires_grad_(True)
    splits = splits_of([20, 28], "cpu" if where == "host" else DEVICE).to(torch.int32)
    y, dx, *others = run(op, "block", folded, splits)
    assert y.shape == (3, 16, N)
    assert_same([y.view(48, N), dx.view(48, K), *others], run(op, "block", x, splits))


def test_one_graph_for_all_values_of_the_splits_and_one_more_for_all_counts_of_rows() -> None:
    op = make_op(2)
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(op, fullgraph=True, backend=counter)
    for first in (10, 0, 48):
        run(op, "mxfp8", rows(48), splits_of([first, 48 - first]), function=function)
    assert counter.frame_count == 1
    for count in (60, 75):
        ours = run(op, "mxfp8", rows(count), splits_of([20, count - 20]), function=function)
        assert_same(ours, run(op, "mxfp8", rows(count), splits_of([20, count - 20])))
    assert counter.frame_count == 2


@pytest.mark.parametrize(("name", "compiled"), [("block", True), ("none", False), ("nvfp4", False)])
@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "weight+bias"])
def test_frozen(frozen: str, name: str, compiled: bool) -> None:
    op, x = make_op(bias="bias" in frozen or frozen == "input"), rows()
    whole = dict(zip(("y", "x", *dict(op.named_parameters())), run(op, name, x, splits_of()), strict=True))
    kinds = frozen.split("+")
    for kind in kinds:
        for parameter in op._parts_of(kind) if kind != "input" else []:
            parameter.requires_grad_(False)
    if "input" in kinds:
        x = x.detach()
        del whole["x"]
    kept = [value for label, value in whole.items() if label.rstrip("0123456789") not in kinds]
    ours = run(op, name, x, splits_of(), function=compile_or_not(op, compiled))
    assert len(ours) == len(kept) and all(map(torch.equal, ours, kept))


@pytest.mark.parametrize("name", ["none", "delayed", "nvfp4"])
def test_without_gradients(name: str) -> None:
    op, x = make_op(), rows()
    function = compile_or_not(op, True)
    with torch.no_grad():
        y = forward(function, name, x, splits_of())
    op.reset_delayed_scaling()
    assert not y.requires_grad and torch.equal(y, forward(op, name, x, splits_of()))


@COMPILED
def test_two_backwards_of_one_forward_and_none_of_a_backward(compiled: bool) -> None:
    op, x = make_op(), rows()
    y = forward(compile_or_not(op, compiled), "nvfp4", x, splits_of())
    wanted = [x, *op.parameters()]
    first, second = gradients(y, wanted, retain_graph=True), gradients(y, wanted)
    assert len(first) == len(second) and all(map(torch.equal, first, second))
    y = forward(compile_or_not(op, compiled), "block", x, splits_of())
    (dx,) = torch.autograd.grad(y.float().square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative|does not currently support double backward"):
        dx.float().sum().backward()


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_recomputation(name: str) -> None:
    op, x = make_op(), rows()

    def recomputed(x: Tensor, splits: Tensor) -> Tensor:
        return nc.checkpoint(op, x, splits)

    expected = run(op, name, x, splits_of())
    for compiled in (False, True):
        ours = run(op, name, x, splits_of(), function=compile_or_not(recomputed, compiled))
        assert all(map(torch.equal, ours, expected))


def test_compute_is_pure() -> None:
    op, x = make_op(), rows()
    before = {name: value.clone() for name, value in op.state_dict().items()}
    attributes = set(vars(op))
    arguments: dict[str, Any] = {
        "basic_op_extra_inputs": [(splits_of(),)],
        "prev_op_grad_output_quantizer": None,
        "next_op_input_quantizer": None,
        "basic_op_kwargs": [{}],
        "requires_grad": True,
    }
    with nc.autocast(recipe=RECIPES["block"]), torch.no_grad():
        (a, _, (saved,)), (b, _, (again,)) = (op.fuser_forward_compute(x, **arguments) for _ in range(2))
    assert torch.equal(a, b) and len(saved) == len(again) > 2
    assert set(vars(op)) == attributes
    assert all(torch.equal(value, before[name]) for name, value in op.state_dict().items())


# -- a scale per row for the bias ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "compiled", "single"),
    [("none", True, False), ("delayed", False, False), ("delayed", True, True), ("nvfp4", False, True)],
)
def test_scaled_bias(name: str, compiled: bool, single: bool) -> None:
    op = make_op(scale_bias=True, single_grouped_bias=single)
    plain = module_of(op).requires_grad_(True)
    plain.return_bias = True
    x, scales = rows(ROWS + 2), scale_rows(ROWS + 2)
    y, dx, dscale, *grads = run(op, name, x, splits_of(), scales, function=compile_or_not(op, compiled))
    product, _ = forward(plain, name, x, splits_of())
    biases = op.bias if single else torch.stack(op._parts_of("bias"))
    of_rows = torch.cat([biases.repeat_interleave(splits_of(), 0), biases.new_zeros(2, N)]).float()
    expected = (product.float() + of_rows * scales.unsqueeze(-1)).to(product.dtype)
    assert torch.equal(y, expected) and not y[ROWS:].any()
    dy = 2 * expected.detach().float()
    assert torch.allclose(dscale, (dy * of_rows).sum(-1), rtol=1e-4, atol=1e-3) and dscale.any()
    per_group = (dy * scales.unsqueeze(-1))[:ROWS].split(SPLITS)
    theirs = torch.stack([part.sum(0) for part in per_group])
    ours = grads[-1] if single else torch.stack(grads[-GROUPS:])
    assert torch.allclose(ours.float(), theirs, rtol=1e-2, atol=1e-2) and ours.any()
    torch.manual_seed(8)
    wanted = [x, *plain._parts_of("weight")]
    by_module = torch.autograd.grad(product, wanted, dy.to(product.dtype))
    assert all(map(torch.equal, [dx, *grads[: len(wanted) - 1]], by_module))


def test_scaled_bias_waits_with_the_weight_gradients() -> None:
    at_once, delayed = (make_op(scale_bias=True, delay_wgrad_compute=wait) for wait in (False, True))
    for op in (at_once, delayed):
        forward(op, "block", rows(), splits_of(), scale_rows()).float().square().sum().backward()
    assert all(parameter.grad is None for parameter in delayed.parameters())
    delayed.backward_dw()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(at_once.parameters(), delayed.parameters()))
    assert delayed.bias2.grad.any()


# -- buffers ------------------------------------------------------------------------------------------------------


@COMPILED
@pytest.mark.parametrize(("name", "scaled"), [("none", True), ("nvfp4", False)])
def test_results_go_to_buffers(name: str, scaled: bool, compiled: bool) -> None:
    op = make_op(scale_bias=scaled)
    extra = (splits_of(), *([scale_rows()] if scaled else []))
    nan = {"dtype": torch.bfloat16, "device": DEVICE}
    output, grad_input = torch.full((ROWS, N), torch.nan, **nan), torch.full((ROWS, K), torch.nan, **nan)
    function = compile_or_not(op, compiled)
    for seed in range(2):
        x = rows(seed=seed)
        ours = run(op, name, x, *extra, function=function, output=output, grad_input=grad_input)
        expected = run(op, name, x, *extra)
        assert all(map(torch.equal, ours, expected))
        assert torch.equal(output, expected[0]) and torch.equal(grad_input, expected[1])
        assert compiled or ours[0].data_ptr() == output.data_ptr()


def test_buffers_that_cannot_be() -> None:
    op, x = make_op(), rows()
    wrong = torch.zeros(ROWS, N + 1, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match=r"output is torch.bfloat16 \(33, 81\)"):
        op(x, splits_of(), output=wrong)
    with pytest.raises(ValueError, match=r"grad_input is torch.bfloat16 \(33, 81\)"):
        op(x, splits_of(), grad_input=wrong)


# -- where weight gradients go ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "compiled", "single"),
    [("none", True, True), ("current", False, True), ("current", True, False), ("none", False, False)],
)
def test_main_grads(name: str, compiled: bool, single: bool) -> None:
    """They accumulate what the module's do; the gradient is a fresh placeholder, never main_grad itself."""
    op = make_op(single_grouped_weight=single, accumulate_into_main_grad=True)
    module = module_of(op, fuse_wgrad_accumulation=True)
    for owner in (op, module):
        for weight in owner._parts_of("weight"):
            weight.main_grad = torch.full(weight.shape, 0.5, device=DEVICE)
            weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
    function = compile_or_not(op, compiled)
    for seed in range(2):
        for owner, call in ((op, function), (module, module)):
            for weight in owner._parts_of("weight"):
                weight.grad_added_to_main_grad = False
            forward(call, name, rows(seed=seed), splits_of()).float().square().sum().backward()
    for ours, theirs in zip(op._parts_of("weight"), module._parts_of("weight"), strict=True):
        assert torch.equal(ours.main_grad, theirs.main_grad) and ours.grad_added_to_main_grad
        assert ours.grad is not None and not ours.grad.any()
        assert ours.grad.data_ptr() != ours.main_grad.data_ptr()
    assert any((weight.main_grad != 0.5).any() for weight in op._parts_of("weight"))


@COMPILED
@pytest.mark.parametrize("name", ["none", "nvfp4"])
def test_waiting_weight_gradients(name: str, compiled: bool) -> None:
    op = make_op(delay_wgrad_compute=True)
    twin, function = module_of(op), compile_or_not(op, compiled)
    expected = []
    for seed in range(2):
        x = rows(seed=seed)
        _, *grads = run(twin, name, x, splits_of())
        y = forward(function, name, x, splits_of())
        torch.manual_seed(8)
        y.float().square().sum().backward()
        assert torch.equal(x.grad, grads[0])
        expected.append(grads[1:])
    assert all(parameter.grad is None for parameter in op.parameters())
    for grads in expected:
        op.zero_grad()
        op.backward_dw()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(op.parameters(), grads, strict=True))
    with pytest.raises(RuntimeError, match="no weight gradient is waiting"):
        op.backward_dw()


# -- among others -------------------------------------------------------------------------------------------------


@COMPILED
@pytest.mark.parametrize("name", ["none", "delayed", "mxfp8"])
def test_two_in_a_row(name: str, compiled: bool) -> None:
    torch.manual_seed(1)
    first = GroupedLinear(GROUPS, K, N, device=DEVICE, dtype=torch.bfloat16)
    second = GroupedLinear(GROUPS, N, K, device=DEVICE, dtype=torch.bfloat16)
    ops = nn.ModuleList([first, second])
    modules = nn.ModuleList([module_of(first), module_of(second)])
    fuser = OperationFuser([first, second])

    def together(x: Tensor, splits: Tensor) -> Tensor:
        return fuser(x, splits, splits)

    def one_by_one(x: Tensor, splits: Tensor) -> Tensor:
        return modules[1](modules[0](x, splits), splits)

    x = rows()
    ours = run(ops, name, x, splits_of(), function=compile_or_not(together, compiled))
    theirs = run(modules, name, x, splits_of(), function=one_by_one)
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs)) and ours[1].any()


@COMPILED
def test_torch_autocast(compiled: bool) -> None:
    op = make_op(dtype=torch.float32)
    x = rows(dtype=torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        ours = run(op, "current", x, splits_of(), function=compile_or_not(op, compiled))
        theirs = run(module_of(op), "current", x, splits_of())
    assert ours[0].dtype == torch.bfloat16 and ours[1].dtype == torch.float32
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_quantized_parameters(name: str) -> None:
    options = {"single_grouped_weight": True}
    with nc.quantized_model_init(recipe=RECIPES[name]):
        op = make_op(**options)
    assert isinstance(op.weight, nc.GroupedTensor)
    theirs = run(make_op(**options), name, rows(), splits_of())
    for compiled in (False, True):
        ours = run(op, name, rows(), splits_of(), function=compile_or_not(op, compiled))
        assert all(map(torch.equal, ours, theirs))


def test_parameters_and_state() -> None:
    op = make_op()
    assert set(op.state_dict()) == set(make_op(accumulate_into_main_grad=True).state_dict())
    other = make_op(single_grouped_weight=True, single_grouped_bias=True)
    other.load_state_dict(op.state_dict())
    assert torch.equal(other.weight, torch.stack(op._parts_of("weight")))
    bound = 1 / K**0.5
    assert (
        0.9 * bound < op.weight1.abs().max() <= bound and not GroupedLinear(1, 3, 5, device="cpu").bias0.any()
    )
    twin = copy.deepcopy(op)
    assert_same(run(twin, "block", rows(), splits_of())[:2], run(op, "block", rows(), splits_of())[:2])
    meta = GroupedLinear(2, K, N, device="meta")
    with pytest.raises(RuntimeError, match="reset_parameters"):
        meta(torch.zeros(4, K), splits_of([2, 2]))
    meta.reset_parameters()
    assert meta.weight1.device.type == DEVICE and meta.weight1.abs().max() <= bound
    roles = [role.tensor_type for mode in ("forward", "backward") for role in op.get_quantizer_roles(mode)]
    assert roles == ["input", "weight", "grad_output"]


def test_initialisation_runs_under_the_tracker() -> None:
    entered = []

    class Tracker:
        def fork(self) -> Any:
            entered.append(True)
            return torch.random.fork_rng(devices=[])

    make_op(rng_state_tracker_function=Tracker)
    assert len(entered) == GROUPS


def test_inputs_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="scale_bias=True with bias=False"):
        make_op(bias=False, scale_bias=True)
    with pytest.raises(ValueError, match="num_groups is 0"):
        make_op(0)
    op, x = make_op(), rows()
    with pytest.raises(ValueError, match="extra inputs"):
        op(x)
    for splits, message in (
        (splits_of([1, 2]), "2 entries"),
        (splits_of([ROWS, 1, 0], "cpu"), "at most the 33 rows"),
        (splits_of([1.0, 2.0, 0.0]), "torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            op(x, splits)
    with pytest.raises(ValueError, match="in_features"):
        op(torch.zeros(4, K + 1, device=DEVICE, dtype=torch.bfloat16), splits_of())
    with pytest.raises(TypeError, match="parameters are"):
        op(x.float(), splits_of())
    quantized = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)(x.detach())
    with pytest.raises(TypeError, match="plain tensor"):
        op(quantized, splits_of())
    with pytest.raises(ValueError, match="scales of the bias have shape"):
        make_op(scale_bias=True)(x, splits_of(), torch.ones(ROWS - 1, device=DEVICE))
