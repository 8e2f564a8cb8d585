"""What is refused, by the field that the error carries; no test reads its sentence."""

from contextlib import contextmanager

import pytest

from g2po_trl.utils.errors import G2POError


@contextmanager
def refused(field: str | None):
    """Expect a [`G2POError`] about this field."""
    with pytest.raises(G2POError) as error:
        yield error
    assert error.value.field == field, error.value
