"""The rotation: its golden matrix, orthogonality, agreement with a matrix product, rounding, layouts."""

import golden_vectors
import pytest
import torch

from narrowcast.reference import hadamard

from .checks import assert_bitwise, assert_fresh, normal


def test_golden_matrix(device: torch.device) -> None:
    golden = golden_vectors.load("nvfp4_rht_matrix")
    assert golden.meta["sign_mask"] == hadamard.SIGN_MASK
    assert_bitwise(hadamard.signs(True, device).cpu(), golden["sign"])
    assert_bitwise(hadamard.rht_matrix(True, device).cpu(), golden["matrix"])
    assert_bitwise(hadamard.rht_matrix(False, device).cpu() * 4, golden["hadamard"])
    assert torch.equal(hadamard.rht_matrix(True, device, torch.bfloat16).float().cpu(), golden["matrix"])


@pytest.mark.parametrize("random_signs", [True, False])
def test_orthogonal(random_signs: bool) -> None:
    matrix = hadamard.rht_matrix(random_signs, "cpu")
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))


@pytest.mark.parametrize("name", golden_vectors.names("nvfp4_rht", without=("nvfp4_rht_matrix",)))
def test_golden_rotation(name: str, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    x = golden.input().to(device)
    assert_bitwise(hadamard.rotate_rows(x.float(), True).t().cpu(), golden["rotated_columnwise"])


@pytest.mark.parametrize("random_signs", [True, False])
@pytest.mark.parametrize("shape", [(16, 1), (32, 7), (160, 33), (0, 5), (16, 0)])
def test_equals_the_product_with_the_matrix(shape: tuple[int, int], random_signs: bool) -> None:
    x = normal(shape, torch.bfloat16).float()
    matrix = hadamard.rht_matrix(random_signs, "cpu").double()
    exact = (x.t().reshape(-1, 16).double() @ matrix).float().reshape(shape[1], shape[0]).t()
    rotated = hadamard.rotate_rows(x, random_signs)
    torch.testing.assert_close(rotated, exact.bfloat16().float(), rtol=2.0**-7, atol=1e-6)
    assert torch.equal(rotated, rotated.bfloat16().float())
    torch.testing.assert_close(hadamard.unrotate_rows(rotated, random_signs), x, rtol=0, atol=0.05)


def test_the_order_of_additions_is_fixed() -> None:
    # 1 survives only if it meets -2**24 before +2**24 does: elements 0 and 8 are paired first.
    x = torch.zeros(16, 1)
    x[0], x[8], x[1] = 2.0**24, -(2.0**24), 1.0
    rotated = hadamard.rotate_rows(x, False)
    assert rotated[0].item() == 0.25


def test_pure_and_with_scratch() -> None:
    x = normal((32, 5), torch.float32)
    kept = x.clone()
    rotated = hadamard.rotate_rows(x, True)
    assert_fresh([rotated], [x])
    assert_bitwise(x, kept)
    assert_bitwise(hadamard.rotate_rows(x, True, scratch=torch.full_like(x, 3.0)), rotated)
    own = x.clone()
    assert hadamard.rotate_rows(own, True, out=own).data_ptr() == own.data_ptr()
    assert_bitwise(own, rotated)
    assert_bitwise(hadamard.unrotate_rows(x, True), hadamard.unrotate_rows(kept, True))
    assert_bitwise(x, kept)
