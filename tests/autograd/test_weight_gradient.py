"""Where a weight gradient goes: to autograd, into ``main_grad``, or into the queue of ``backward_dw``."""

from __future__ import annotations

import pytest
import torch

from narrowcast.autograd import LinearBwdArgs, LinearWgrad, add_to_main_grad_, compute_wgrad
from narrowcast.autograd.weight_gradient import placeholder, weight_gradient
from narrowcast.functional.wgrad_store import DeferredWgrad, WeightGradStore
from narrowcast.quantizers import IdentityQuantizer
from narrowcast.recipe import linear_plan

PLAN = linear_plan(None, "", True, True, module_type="linear")
ARGS = LinearBwdArgs(
    PLAN, torch.float32, None, LinearWgrad(), True, torch.float32, torch.float32, (3, 5), (1, None), (1, None)
)


def operands(overwrite: bool = False) -> tuple[DeferredWgrad, torch.Tensor]:
    """(operands, the gradient that they are to give)."""
    dy, x, plain = torch.randn(8, 3), torch.randn(8, 5), IdentityQuantizer()
    deferred = DeferredWgrad([dy], plain, [x], plain, dy.sum(0), overwrite, False, True)
    return deferred, dy.t() @ x


def test_autograd_gets_it() -> None:
    deferred, expected = operands()
    wgrad, grad_bias = weight_gradient(ARGS, deferred)
    torch.testing.assert_close(wgrad, expected)
    assert grad_bias is deferred.grad_bias


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dummy", ["", "zeros", "empty"])
def test_main_grad_gets_it(dummy: str, overwrite: bool) -> None:
    (deferred, expected), main_grad = operands(overwrite), torch.ones(3, 5)
    args = ARGS._replace(wgrad=LinearWgrad(main_grad, overwrite, dummy))
    returned, grad_bias = weight_gradient(args, deferred)
    torch.testing.assert_close(main_grad, expected if overwrite else expected + 1)
    assert grad_bias is deferred.grad_bias
    assert (returned is None) is (dummy == "")
    assert returned is None or returned.shape == (3, 5)


def test_the_queue_gets_it_with_the_bias_gradient() -> None:
    (deferred, expected), store = operands(), WeightGradStore()
    args = ARGS._replace(wgrad=LinearWgrad(store=store))
    assert weight_gradient(args, deferred) == (None, None)
    later = store.pop()
    assert later is deferred
    torch.testing.assert_close(compute_wgrad(later, (3, 5), torch.float32), expected)
    main_grad = torch.zeros(3, 5)
    add_to_main_grad_(later, main_grad)
    torch.testing.assert_close(main_grad, expected)


def test_a_placeholder_has_the_shape_and_dtype_of_the_weight() -> None:
    like = torch.ones(2, dtype=torch.bfloat16)
    assert placeholder("", like, (3, 5), torch.float32) is None
    zeros = placeholder("zeros", like, (3, 5), torch.float32)
    assert zeros is not None and zeros.dtype == torch.float32 and torch.equal(zeros, torch.zeros(3, 5))
