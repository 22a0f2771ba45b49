"""What a Rule refuses when it is made."""

import pytest

from streamload.mapping.rules import Rule
from streamload.mapping.transforms import Identity, Transpose


@pytest.mark.parametrize("transform", ["transpose", Transpose, 3, lambda x: x])
def test_what_is_no_transform_is_refused_when_the_rule_is_made(transform):
    with pytest.raises(TypeError, match=r"an object like Transpose\(\).*, not "):
        Rule("a", "b", transform)


def test_transforms_are_taken():
    assert Rule("a", "b", Transpose()).transform == Transpose()
    assert Rule("a", "b").transform == Identity()
