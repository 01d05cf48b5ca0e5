"""``BasicLinear._functional_forward`` and ``_functional_backward``, and that their fakes tell the same story."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import QUANTIZED
from torch import Tensor

import narrowcast as nc
from narrowcast.dynamo import TensorProto, to_tensor_proto
from narrowcast.ops import BasicLinear
from narrowcast.quantizers import DelayedFloat8Quantizer
from narrowcast.recipe import linear_plan
from narrowcast.testing import assert_close

K, N, LEAD = 48, 80, (3, 8)
forward, forward_fake = BasicLinear._functional_forward, BasicLinear._functional_forward_fake
backward, backward_fake = BasicLinear._functional_backward, BasicLinear._functional_backward_fake
NAMES = [name for name in QUANTIZED if name != "delayed"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def quantizers(name: str) -> dict[str, Any]:
    """Those of a recipe."""
    plan = linear_plan(QUANTIZED[name], "", True, True, module_type="linear")
    operands = {"input": plan.input, "weight": plan.kept_weight, "grad_output": plan.grad_output}
    return {kind: operand.quantizer for kind, operand in operands.items()}


def protos(*tensors: Any) -> list[TensorProto | None]:
    return [None if tensor is None else to_tensor_proto(tensor) for tensor in tensors]


def check_forward(x: Any, w: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Run it and its fake; compare."""
    described = {key: to_tensor_proto(value) for key, value in options.items() if isinstance(value, Tensor)}
    wanted = list(forward_fake(*protos(x, w), **{**options, **described}))
    results = forward(x, w, **options)
    assert protos(*results) == wanted
    return results


def check_backward(*operands: Any, **options: Any) -> tuple[Any, Any]:
    described = {key: to_tensor_proto(value) for key, value in options.items() if isinstance(value, Tensor)}
    wanted = list(backward_fake(*protos(*operands), **{**options, **described}))
    results = backward(*operands, **options)
    assert protos(*results) == wanted
    return results


@pytest.mark.covering
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize(("dgrad", "wgrad"), [(True, True), (True, False), (False, True), (False, False)])
def test_is_the_module(name: str, override: str | None, dgrad: bool, wgrad: bool) -> None:
    """Both passes, every recipe, every combination of gradients."""
    x, w, dy = draw(*LEAD, K), draw(N, K, seed=1), draw(*LEAD, N, seed=2)
    made = quantizers(name)
    quantized = {"input_quantizer": made["input"], "weight_quantizer": made["weight"]}
    needs = {"input_requires_grad": dgrad, "weight_requires_grad": wgrad}
    y, x_saved, w_saved = check_forward(
        x, w, with_quantized_compute=True, backward_override=override, **quantized, **needs
    )
    assert (x_saved is None) == (not wgrad) and (w_saved is None) == (not dgrad)
    for saved in (x_saved, w_saved):
        if override != "high_precision" and saved is not None:
            rowwise = override == "dequantized"
            assert saved.get_usages() == {"rowwise": rowwise, "columnwise": not rowwise}
    torch.manual_seed(7)
    options = {**quantized, "grad_output_quantizer": made["grad_output"]} if override is None else {}
    dx, dw = check_backward(dy, x_saved, w_saved, with_quantized_compute=override is None, **options, **needs)
    assert (dx is None) == (not dgrad) and (dw is None) == (not wgrad)
    recipe = with_override(name, override)
    module = nc.Linear(K, N, bias=False, device="cpu", params_dtype=torch.bfloat16)
    module.weight = torch.nn.Parameter(w, requires_grad=wgrad)
    x = x.detach().requires_grad_(dgrad)
    with nc.autocast(recipe=recipe):
        expected = module(x)
    assert torch.equal(y, expected)
    wanted = [tensor for tensor in (x, module.weight) if tensor.requires_grad]
    if wanted:
        torch.manual_seed(7)
        grads = torch.autograd.grad(expected, wanted, dy)
        found = [grad for grad in (dx, dw) if grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, grads, strict=True))


def with_override(name: str, override: str | None) -> Any:
    if name == "custom":
        return nc.recipe.CustomRecipe(qfactory=QUANTIZED[name].qfactory, backward_override=override)
    return type(QUANTIZED[name])(backward_override=override)


def test_quantizers_with_state() -> None:
    """Those of delayed scaling hold their scale and amax themselves."""
    x, w, dy = draw(*LEAD, K), draw(N, K, seed=1), draw(*LEAD, N, seed=2)
    e4m3, e5m2 = nc.DType.kFloat8E4M3, nc.DType.kFloat8E5M2
    made = [
        nc.Float8Quantizer(torch.tensor([largest]) / one.abs().max().float(), torch.zeros(1), dtype)
        for one, largest, dtype in ((x, 448.0, e4m3), (w, 448.0, e4m3), (dy, 57344.0, e5m2))
    ]
    options = {"with_quantized_compute": True, "input_quantizer": made[0], "weight_quantizer": made[1]}
    y, *saved = forward(x, w, **options)
    dx, dw = backward(dy, *saved, grad_output_quantizer=made[2], **options)
    module = nc.Linear(K, N, bias=False, device="cpu", params_dtype=torch.bfloat16)
    module.weight = torch.nn.Parameter(w)
    x.requires_grad_(True)
    with nc.autocast(recipe=nc.recipe.DelayedScaling()):  # of a first step
        expected = module(x)
    assert torch.equal(y, expected)
    for ours, theirs in zip((dx, dw), torch.autograd.grad(expected, (x, module.weight), dy), strict=True):
        assert torch.equal(ours, theirs)
    assert [quantizer.amax for quantizer in made] == [x.abs().max(), w.abs().max(), dy.abs().max()]


def test_high_precision() -> None:
    x, w, dy = draw(*LEAD, K), draw(N, K, seed=1), draw(*LEAD, N, seed=2)
    bias = draw(N, seed=3)
    y, x_saved, w_saved = check_forward(x, w, bias=bias)
    assert torch.equal(y, F.linear(x, w, bias)) and x_saved is x and w_saved is w
    dx, dw = check_backward(dy, x_saved, w_saved)
    assert torch.equal(dx, dy @ w)
    assert_close(dw, dy.reshape(-1, N).t() @ x.reshape(-1, K), "bf16_output")


@pytest.mark.parametrize("name", ["none", "current", "mxfp8"])
def test_factors_bias_and_accumulation(name: str) -> None:
    """y = alpha x w^T + bias + beta out, and the same of both gradients."""
    x, w, dy, bias = draw(*LEAD, K), draw(N, K, seed=1), draw(*LEAD, N, seed=2), draw(N, seed=3)
    options: dict[str, Any] = {}
    if name != "none":
        made = quantizers(name)
        options = {f"{kind}_quantizer": made[kind] for kind in ("input", "weight")}
        options["with_quantized_compute"] = True
    plain, x_saved, w_saved = forward(x, w, **options)
    out = draw(*LEAD, N, seed=4)
    expected = 0.5 * plain.float() + bias.float() + 2 * out.float()
    y, *_ = check_forward(x, w, bias=bias, alpha=0.5, out=out, beta=2.0, accumulate_into_out=True, **options)
    assert y is out
    assert_close(y, expected, "bf16_output")
    assert torch.equal(forward(x, w, out=torch.empty_like(out), **options)[0], plain)

    if name != "none":
        options["grad_output_quantizer"] = made["grad_output"]
    dx, dw = backward(dy, x_saved, w_saved, **options)
    into_x, into_w = draw(*LEAD, K, seed=5), draw(N, K, seed=6).float()
    wanted_x, wanted_w = 0.5 * dx.float() + into_x.float(), 2 * dw.float() + 0.25 * into_w
    ours = check_backward(
        dy,
        x_saved,
        w_saved,
        grad_input_alpha=0.5,
        grad_input=into_x,
        accumulate_into_grad_input=True,
        grad_weight_alpha=2.0,
        grad_weight=into_w,
        grad_weight_beta=0.25,
        accumulate_into_grad_weight=True,
        **options,
    )
    assert ours[0] is into_x and ours[1] is into_w
    assert_close(into_x, wanted_x, "bf16_output")
    assert_close(into_w, wanted_w, "bf16_output")
    before = into_w.clone()
    _, again = backward(dy, x_saved, w_saved, grad_weight=into_w, accumulate_into_grad_weight=True, **options)
    assert again is into_w
    assert_close(into_w - before, dw.float(), "bf16_output")


def test_quantized_results() -> None:
    made = quantizers("current")
    x, w, dy = draw(*LEAD, K), draw(N, K, seed=1), draw(*LEAD, N, seed=2)
    y, *saved = check_forward(x, w, output_quantizer=made["input"])
    assert isinstance(y, nc.Float8Tensor) and torch.equal(
        y.dequantize(), made["input"].quantize(x @ w.t()).dequantize()
    )
    out = made["input"].make_empty((*LEAD, N), dtype=torch.bfloat16, device="cpu")
    again, *_ = forward(x, w, output_quantizer=made["input"], out=out)
    assert again is out and torch.equal(out.dequantize(), y.dequantize())
    dx, _ = check_backward(dy, *saved, grad_input_quantizer=made["grad_output"])
    assert isinstance(dx, nc.Float8Tensor) and dx.shape == x.shape


@pytest.mark.parametrize("name", NAMES)
def test_operands_that_are_quantized_already(name: str) -> None:
    made = quantizers(name)
    x, w = draw(24, K), draw(N, K, seed=1)
    y, x_saved, w_saved = forward(
        x, w, with_quantized_compute=True, input_quantizer=made["input"], weight_quantizer=made["weight"]
    )
    ours, ours_x, ours_w = check_forward(
        made["input"].quantize(x), made["weight"].quantize(w), with_quantized_compute=True
    )
    assert torch.equal(ours, y)
    for a, b in ((ours_x, x_saved), (ours_w, w_saved)):
        assert all(
            torch.equal(p, q) for p, q in zip(a.columnwise_operand(), b.columnwise_operand(), strict=True)
        )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("quantized", [False, True])
def test_shapes_of_parallel_layers(size: int, quantized: bool) -> None:
    """No processes, no memory: a fake takes their number."""
    made = quantizers("mxfp8")
    options: dict[str, Any] = {"tensor_parallel_group": size}
    if quantized:
        options |= {f"{kind}_quantizer": made[kind] for kind in ("input", "weight")}
        options["with_quantized_compute"] = True
    rows = 8
    cases = {
        ("column", False): ((rows, K), (rows, N), (rows, K)),
        ("column", True): ((rows, K), (rows * size, N), (rows, K)),
        ("row", False): ((rows, K), (rows, N), (rows, K)),
        ("row", True): ((rows, K), (rows // size, N), (rows, K)),
    }
    weight = TensorProto((N, K), torch.bfloat16, device="cuda")  # this process's; nothing is allocated
    for (mode, sequence), (x, y, dx) in cases.items():
        split = {"tensor_parallel_mode": mode, "sequence_parallel": sequence, **options}
        out, x_saved, w_saved = forward_fake(TensorProto(x, torch.bfloat16, device="cuda"), weight, **split)
        assert out.shape == y and out.device == torch.device("cuda")
        gathered_again = mode == "column" and sequence
        assert x_saved is not None and x_saved.shape == x
        assert x_saved.is_quantized == (quantized and not gathered_again)
        if quantized:
            split["grad_output_quantizer"] = made["grad_output"]
        grads = backward_fake(out, x_saved, w_saved, **split)
        assert grads[0].shape == dx and grads[1].shape == (N, K)


@pytest.mark.parametrize(("mode", "run"), [("row", forward_fake), ("column", backward_fake)])
def test_rows_must_divide(mode: str, run: Any) -> None:
    weight = TensorProto((K, K), torch.bfloat16)
    operands = [TensorProto((7, K), torch.bfloat16)] * (2 if run is backward_fake else 1) + [weight]
    with pytest.raises(ValueError, match=r"shape \(7, 48\) does not divide among 2 processes"):
        run(
            *operands,
            weight_requires_grad=False,
            tensor_parallel_mode=mode,
            tensor_parallel_group=2,
            sequence_parallel=True,
        )


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("override", [None, "dequantized"])
@pytest.mark.parametrize("given", [False, True])
def test_identity_is_described_with_the_directions_that_are_read(
    given: bool, override: str | None, dtype: torch.dtype | None
) -> None:
    """Its one buffer serves both directions: only the quantizer says which of them is meant."""
    quantizer = nc.IdentityQuantizer(dtype=dtype)
    x, w, dy = draw(*LEAD, K), draw(N, K, seed=1), draw(*LEAD, N, seed=2)
    operands = (quantizer.quantize(x), quantizer.quantize(w)) if given else (x, w)
    options = {"input_quantizer": quantizer, "weight_quantizer": quantizer}
    y, *saved = check_forward(*operands, with_quantized_compute=True, backward_override=override, **options)
    for kept in saved:
        columnwise = override is None
        assert kept._quantizer.get_usages() == {"rowwise": not columnwise, "columnwise": columnwise}
    if override is None:
        options["grad_output_quantizer"] = quantizer
    dx, dw = check_backward(dy, *saved, with_quantized_compute=override is None, **options)
    assert_close(y, x @ w.t(), "bf16_output")
    assert_close(dx, dy @ w, "bf16_output")
    assert_close(dw, dy.reshape(-1, N).t() @ x.reshape(-1, K), "bf16_output")


def test_both_are_one_graph() -> None:
    made = quantizers("mxfp8")
    x, w, dy = draw(*LEAD, K), draw(N, K, seed=1), draw(*LEAD, N, seed=2)
    options = {"with_quantized_compute": True} | {
        f"{kind}_quantizer": made[kind] for kind in ("input", "weight")
    }

    def step(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
        y, *saved = forward(x, w, **options)
        return [y, *backward(dy, *saved, grad_output_quantizer=made["grad_output"], **options)]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(x, w, dy), step(x, w, dy), strict=True))


X, W, DY = draw(8, K), draw(N, K, seed=1), draw(8, N, seed=2)
Q8, MX = quantizers("current")["input"], quantizers("mxfp8")["input"]
SLOT = DelayedFloat8Quantizer(nc.DType.kFloat8E4M3, 0)
OFF = Q8.with_usage(rowwise=False, columnwise=False)
ROWS, COLUMNS = MX.with_usage(columnwise=False), MX.with_usage(rowwise=False)
IN_MX: dict[str, Any] = {
    "with_quantized_compute": True,
    "input_quantizer": MX,
    "weight_quantizer": MX,
}
BACK_MX = {**IN_MX, "grad_output_quantizer": MX}
BAD_FORWARD = [
    ((X, W), {"bias": X[0, :3]}, r"bias has shape \(3,\); it must be \(80,\)"),
    ((X, W), {"bias": X[0, :3], **IN_MX}, r"bias has shape \(3,\)"),
    ((X, W), {"out": DY[:3]}, r"the result has shape \(8, 80\), but out has \(3, 80\)"),
    ((X, W), {"out": Q8.quantize(DY[:3]), "output_quantizer": Q8}, r"but out has \(3, 80\)"),
    (
        (X, W),
        {"out": nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E5M2).quantize(DY), "output_quantizer": Q8},
        "out is read with .*E5M2.* written with .*E4M3",
    ),
    ((X, W), {**IN_MX, "input_quantizer": SLOT}, "DelayedFloat8Quantizer.* needs the state of a layer"),
    ((X, W), {**IN_MX, "weight_quantizer": SLOT}, "DelayedFloat8Quantizer.* needs the state of a layer"),
    ((X, W), {"output_quantizer": SLOT}, "DelayedFloat8Quantizer.* needs the state of a layer"),
    ((X, W), {"output_quantizer": OFF}, "both directions switched off"),
    ((X, W[0]), IN_MX, r"weight has shape \(48,\)"),
    ((X, W[None]), {}, r"weight has shape \(1, 80, 48\)"),
    ((X, W), {**IN_MX, "dtype": torch.float64}, "cannot quantize input from torch.float64"),
    ((ROWS.quantize(X), W), IN_MX, "input is an MXFP8Tensor.* without column-wise data"),
    ((X, ROWS.quantize(W)), IN_MX, "weight is an MXFP8Tensor.* without column-wise data"),
    ((COLUMNS.quantize(X), W), IN_MX, "input is an MXFP8Tensor.* without row-wise data"),
    ((X, COLUMNS.quantize(W)), IN_MX, "weight is an MXFP8Tensor.* without row-wise data"),
    ((COLUMNS.quantize(X), W), {}, "input is an MXFP8Tensor.* without row-wise data"),
    ((X, W), {"with_quantized_compute": True, "weight_quantizer": Q8}, "needs input_quantizer"),
    ((X, W), {"with_quantized_compute": True, "input_quantizer": Q8}, "needs weight_quantizer"),
    ((X, W), {"beta": 2.0}, "factor of out is 2.0"),
    ((X, W), {"accumulate_into_out": True}, "accumulating into out needs out"),
    (
        (X, W),
        {"out": MX.quantize(DY), "output_quantizer": Q8},
        "out is an MXFP8Tensor, .* is Float8TensorStorage",
    ),
    ((X, W), {"out": DY, "output_quantizer": Q8}, "out is a Tensor"),
    ((X, W), {"out": Q8.quantize(DY)}, "is a plain tensor"),
    ((X, W), {"backward_override": "exact"}, "backward_override is 'exact'"),
    ((X, DY), {}, "its last dim must be that of the weight"),
    ((X, W), {"tensor_parallel_mode": "both"}, "tensor_parallel_mode is 'both'"),
]
BAD_BACKWARD = [
    (
        (DY[:, :3], X, W),
        {},
        r"grad_output has shape \(8, 3\); its last dim must be the first one of the weight",
    ),
    ((DY[:3], X, W), BACK_MX, r"grad_output has shape \(3, 80\), the input \(8, 48\)"),
    ((DY, X[:, :3], W), {}, r"input has shape \(8, 3\)"),
    ((DY, X, W), {"grad_weight": X}, r"the result has shape \(80, 48\), but grad_weight has \(8, 48\)"),
    (
        (DY, X, W),
        {"grad_weight": X.float(), "accumulate_into_grad_weight": True, **BACK_MX},
        r"but grad_weight has \(8, 48\)",
    ),
    ((DY, X, W), {"grad_input": X[:3]}, r"the result has shape \(8, 48\), but grad_input has \(3, 48\)"),
    ((ROWS.quantize(DY), X, W), BACK_MX, "grad_output is an MXFP8Tensor.* without column-wise data"),
    ((COLUMNS.quantize(DY), X, W), BACK_MX, "grad_output is an MXFP8Tensor.* without row-wise data"),
    ((DY, ROWS.quantize(X), W), BACK_MX, "input is an MXFP8Tensor.* without column-wise data"),
    ((DY, X, ROWS.quantize(W)), BACK_MX, "weight is an MXFP8Tensor.* without column-wise data"),
    (
        (DY, X, W),
        {**BACK_MX, "grad_output_quantizer": SLOT},
        "DelayedFloat8Quantizer.* needs the state of a layer",
    ),
    ((DY, X, W), {**BACK_MX, "dtype": torch.float64}, "cannot quantize grad_output from torch.float64"),
    ((DY, X, W), {"grad_input_quantizer": OFF}, "both directions switched off"),
    ((DY, X, W), {"with_quantized_compute": True}, "needs grad_output_quantizer"),
    ((DY, X, W), {"with_quantized_compute": True, "grad_output_quantizer": Q8}, "needs input_quantizer"),
    ((DY, None, W), {}, "input is None"),
    ((DY, X, None), {}, "weight is None"),
    ((DY, X, W), {"grad_weight_beta": 1.0}, "factor of grad_weight is 1.0"),
    ((DY, X, W), {"accumulate_into_grad_input": True}, "accumulating into grad_input needs grad_input"),
]


@pytest.mark.parametrize(("operands", "options", "message"), BAD_FORWARD + BAD_BACKWARD)
def test_bad_arguments_are_refused_by_function_and_fake(
    operands: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    real, fake = (forward, forward_fake) if len(operands) == 2 else (backward, backward_fake)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message) as raised:
        real(*operands, **options)
    described = {key: to_tensor_proto(value) for key, value in options.items() if isinstance(value, Tensor)}
    with pytest.raises(raised.type, match=message.replace("Tensor, ", ".*, ").replace("a Tensor", "a ")):
        fake(*protos(*operands), **{**options, **described})


def test_row_parallel_bias_is_refused() -> None:
    x, w, bias = (TensorProto(shape, torch.bfloat16) for shape in ((8, K), (N, K), (N,)))
    with pytest.raises(ValueError, match="bias of a row-parallel layer comes behind the sum"):
        forward_fake(x, w, bias=bias, tensor_parallel_mode="row", tensor_parallel_group=2)
    quantized = TensorProto((8, K), torch.bfloat16, Q8)
    with pytest.raises(TypeError, match="a quantized input cannot be gathered"):
        forward_fake(
            quantized, w, tensor_parallel_mode="column", tensor_parallel_group=2, sequence_parallel=True
        )
