import pytest

from mhaprune.model.heads import Head, select_heads


def test_a_head_is_named_by_its_layer_and_its_number():
    assert str(Head(4, 11)) == "L4H11"
    assert Head.parse("L4H11") == Head(layer=4, head=11)


def test_every_name_reads_back_as_the_same_head():
    heads = [Head(layer, head) for layer in range(12) for head in range(12)]
    assert [Head.parse(str(head)) for head in heads] == heads


def test_heads_sort_by_number_and_not_by_name():
    assert sorted([Head(10, 0), Head(2, 11), Head(2, 3)]) == [Head(2, 3), Head(2, 11), Head(10, 0)]


@pytest.mark.parametrize("name", ["", "4.11", "l4h11", "L4", "L-1H0", "L4H11 ", "L4H*", "L*H*"])
def test_what_is_not_the_name_of_one_head_is_refused(name):
    with pytest.raises(ValueError, match=r"expected .* such as 'L4H11'"):
        Head.parse(name)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["L1H2"], "L1H2"),
        (["L1H*"], "L1H0 L1H1 L1H2"),
        (["L*H2"], "L0H2 L1H2"),
        (["L*H*"], "L0H0 L0H1 L0H2 L1H0 L1H1 L1H2"),
        (["L1H0", "L0H1"], "L0H1 L1H0"),
        (["L1H*", "L*H1", "L1H1"], "L0H1 L1H0 L1H1 L1H2"),
    ],
)
def test_patterns_select_sorted_heads_without_repeats(patterns, names):
    selected = select_heads(patterns, num_layers=2, heads_per_layer=3)
    assert " ".join(map(str, selected)) == names


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["L2H0"], "layer in 'L2H0' is out of range: this model has 0 to 1, got 2"),
        (["L0H0", "L*H3"], r"head in 'L\*H3' is out of range: this model has 0 to 2, got 3"),
        (["layer 1"], "got 'layer 1'"),
        (["L1H"], "got 'L1H'"),
        ([], "no heads were selected"),
    ],
)
def test_a_pattern_that_names_no_head_is_refused_in_one_line(patterns, message):
    with pytest.raises(ValueError, match=message) as error:
        select_heads(patterns, num_layers=2, heads_per_layer=3)
    assert "\n" not in str(error.value)
