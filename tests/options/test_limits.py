"""The limits on sampling fields, and the page that shows them."""

import pytest

from gllm.config.sampling import SamplingParams
from gllm.options import limits
from gllm.options.field_types import FieldError
from scripts.api_limits import LIMITS


def largest(name):
    """A field's largest value, and one that is too large for each of its limits."""
    count, length = limits.SAMPLING_SIZES[name]
    if length is not None:
        fits = tuple(f"{i:x}".rjust(length, "a") for i in range(count))
        return fits, [(*fits, "b"), ("a" * (length + 1),)]
    if name == "logit_bias":
        return dict.fromkeys(range(count), 1.0), [dict.fromkeys(range(count + 1), 1.0)]
    return tuple(range(count)), [tuple(range(count + 1))]


@pytest.mark.parametrize("name", limits.SAMPLING_SIZES)
def test_the_largest_value_is_taken_and_no_larger_one(name):
    fits, others = largest(name)
    assert getattr(SamplingParams(**{name: fits}), name) == fits
    for value in others:
        with pytest.raises(FieldError, match=rf"^{name} has .* at most \d+ are allowed") as told:
            SamplingParams(**{name: value})
        assert told.value.param == name


def test_every_number_is_in_the_table():
    numbers = {value for name, value in vars(limits).items() if name.startswith("MAX_")}
    assert numbers == {limit.maximum for limit in LIMITS}
