"""Operations of your own: one in the two-method form, one in a single method, and both in a fused list."""

from typing import Any

import torch

import narrowcast as nc


class Softcap(nc.ops.BasicOperation):
    """y = 10 tanh(x / 10): compute is pure, save only stores; so a compiler can trace either."""

    def op_forward_compute(self, input_: Any, *, requires_grad: bool, **kwargs: Any) -> Any:
        y = 10 * torch.tanh(input_ / 10)
        return y, (y,) if requires_grad else ()

    def op_forward_save_ctx(self, ctx: Any, input_: Any, tensors_to_save: Any, **kwargs: Any) -> None:
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grad_output * (1 - (y / 10) ** 2), ()


class Cube(nc.ops.BasicOperation):
    """y = x^3 in a single method, as an autograd function is written."""

    def op_forward(self, ctx: Any, input_: Any, **kwargs: Any) -> Any:
        ctx.save_for_backward(input_)
        return input_**3

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad_output, ()


class SoftcapCube(nc.ops.FusedOperation):
    """Both at once in the forward; each still runs its own backward."""

    def fuser_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        y = 10 * torch.tanh(input_ / 10)
        return y**3, [(), ()], [(y,), (y,)]

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        for ctx, tensors in zip(basic_op_ctxs, tensors_to_save, strict=True):
            ctx.save_for_backward(*tensors)


def fuse(ops: list[Any], *, recipe: nc.recipe.Recipe | None) -> list[Any]:
    for at in range(len(ops) - 1):
        if isinstance(ops[at], Softcap) and isinstance(ops[at + 1], Cube):
            return [*ops[:at], SoftcapCube(ops[at : at + 2]), *fuse(ops[at + 2 :], recipe=recipe)]
    return ops


def main() -> None:
    torch.manual_seed(0)
    nc.ops.register_forward_fusion(fuse)
    block = nc.ops.Sequential(
        nc.ops.Linear(64, 64, device="cpu"), Softcap(), Cube(), nc.ops.RMSNorm(64, device="cpu")
    )
    x = torch.randn(16, 64, requires_grad=True)
    recipe = nc.recipe.MXFP8BlockScaling(emulate=True)
    gradients = []
    for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        with nc.autocast(recipe=recipe):
            y = run(x)
        gradients.append(torch.autograd.grad(y.square().sum() + y.sum(), x)[0])
    block.explain(recipe)
    print("compiled and eager gradients are equal:", torch.equal(*gradients))


if __name__ == "__main__":
    main()
