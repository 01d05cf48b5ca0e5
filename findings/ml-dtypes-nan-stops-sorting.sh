#!/usr/bin/env bash
# ml_dtypes: np.sort of a bfloat16 or FP8 array with a NaN leaves the numbers unsorted, and np.median is a number.
# Packages: ml_dtypes==0.6.0 numpy==2.4.6
# Expected: NaN is sorted to the end, and the median and a percentile of an array with NaN are NaN, as for float16.
# Source: https://numpy.org/doc/stable/reference/generated/numpy.sort.html (the sort order of floating-point numbers:
# NaN at the end); https://numpy.org/doc/stable/reference/generated/numpy.nanmedian.html (median gives NaN)
# Seen: the comparison of ml_dtypes calls NaN equal to every number, which is no order: [3, nan, 1, 2, nan, 0.5] stays as
# it is. np.unique returns duplicates, and a median of weights with NaN is a plausible number. np.max is NaN. The same
# with numpy 2.5.5.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile ml_dtypes==0.6.0 numpy==2.4.6
cat > "$dir/finding.py" <<'EOF'
import ml_dtypes
import numpy as np

print(f"ml_dtypes {ml_dtypes.__version__}, numpy {np.__version__}")
nan = np.nan
values = np.array([3, nan, 1, 2, nan, 0.5, 3], np.float32)
for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
    x = values.astype(dtype)
    ordered, distinct = (f(x).astype(float).tolist() for f in (np.sort, np.unique))
    middle, ninth = float(np.median(x)), float(np.percentile(x, 90))
    print(f"{np.dtype(dtype)}: sort {ordered}, unique {distinct}, median {middle}, 90% {ninth}, max {x.max()}")
    assert np.isnan(x.max())
    if dtype == np.float16:
        np.testing.assert_array_equal(ordered, [0.5, 1, 2, 3, 3, nan, nan])
        np.testing.assert_array_equal(distinct, [0.5, 1, 2, 3, nan])
        assert np.isnan(middle) and np.isnan(ninth)
    else:
        np.testing.assert_array_equal(ordered, values)
        np.testing.assert_array_equal(distinct, values)
        assert not np.isnan(middle)
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
