from __future__ import annotations

import ast
import operator
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import SHORT_NAMES, Layout, Precision, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from orchestrator.core.sweepfile.constraint import Constraint, facts_of
from orchestrator.core.sweepfile.constraint_language import NUMBERS, WORDS
from tests.examples import examples

CELL = Cell(model=PRESETS["llama-3.1-8b"], num_gpus=16, sequence_length=4096, global_batch_size=64)
LAYOUT = Layout(
    data_parallel_size=4,
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    micro_batch_size=2,
    grad_accum_steps=8,
)


def holds(text: str, *layouts: Layout) -> list[bool]:
    table = LayoutTable.of(layouts or [LAYOUT])
    return [
        bool(row)
        for row in Constraint(text).check(facts_of(table, cell=CELL, gpus_per_node=8), len(table))[
            0
        ]
    ]


def undefined(text: str, *layouts: Layout) -> list[bool]:
    table = LayoutTable.of(layouts or [LAYOUT])
    return [
        bool(row)
        for row in Constraint(text).check(facts_of(table, cell=CELL, gpus_per_node=8), len(table))[
            1
        ]
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dp == 4 and tp == 2 and pp == 2 and cp == 1 and mbs == 2 and ga == 8", True),
        (
            "data_parallel_size * tensor_parallel_size * pipeline_parallel_size *"
            " context_parallel_size == world_size",
            True,
        ),
        ("world_size == num_gpus and num_gpus == num_nodes * gpus_per_node", True),
        ("dp * mbs * ga == global_batch_size", True),
        (
            "num_layers == 32 and hidden_size == 4096 and num_attention_heads == 32 and"
            " num_key_value_heads == 8",
            True,
        ),
        ("sequence_length // 4096 == 1 and sequence_length % 4096 == 0", True),
        ("1 < tp <= 2 < dp", True),
        ("1 < tp < 2", False),
        ("tp in (1, 2, 4)", True),
        ("tp not in [1, 2, 4]", False),
        ("tp in {pp + 1, 2 * pp}", False),
        ("not pp > 1 or ga >= pp", True),
        ("not (tp > 1 and pp > 1)", False),
        ("-tp < -1", True),
        ("-3 // 2 == -2 and -3 % 2 == 1", True),
        ("recompute == 'none' and recompute != 'full'", True),
        ("recompute in ('none', \"full\")", True),
        ("'none' == recompute", True),
        ("recompute_layers == 0 and zero_stage == 0", True),
        ("precision == 'bf16' and precision not in ('fp8', 'fp32')", True),
        ("tp <= 8\n  and pp <= 8", True),
    ],
)
def test_constraints_read_as_people_write_them(text: str, expected: bool) -> None:
    assert holds(text) == [expected]


def test_every_name_that_is_offered_can_be_asked() -> None:
    for name in (*NUMBERS, *SHORT_NAMES):
        assert holds(f"{name} >= 0") == [True]
    for name, words in WORDS.items():
        assert holds(f"{name} in {tuple(map(str, words))}") == [True]


def test_a_selective_recompute_answers_to_its_mode_and_to_its_policy() -> None:
    layouts = [
        replace(LAYOUT, recompute=Recompute.parse(text))
        for text in ("none", "full:8", "selective_ops:4", "selective_attention")
    ]
    assert holds("recompute == 'selective'", *layouts) == [False, False, True, True]
    assert holds("recompute == 'selective_ops'", *layouts) == [False, False, True, False]
    assert holds("recompute == 'full'", *layouts) == [False, True, False, False]
    assert holds("recompute_layers >= 8", *layouts) == [False, True, False, True]


def test_rows_are_judged_one_by_one() -> None:
    layouts = [
        replace(LAYOUT, micro_batch_size=m, precision=p)
        for m, p in ((1, Precision.BF16), (2, Precision.FP8), (4, Precision.FP8))
    ]
    assert holds("mbs > 1 and precision == 'fp8'", *layouts) == [False, True, True]


def test_a_constraint_over_the_cell_alone_holds_for_all_rows_or_none() -> None:
    assert holds("num_gpus <= 16", LAYOUT, LAYOUT) == [True, True]
    assert holds("num_gpus > 16", LAYOUT, LAYOUT) == [False, False]
    assert Constraint("num_gpus > 16").check(
        facts_of(LayoutTable.of([]), cell=CELL, gpus_per_node=8), 0
    )[0].shape == (0,)


def test_division_by_zero_marks_its_row_and_no_other() -> None:
    layouts = [replace(LAYOUT, pipeline_parallel_size=p) for p in (1, 2, 3)]
    assert undefined("8 // (pp - 1) > 4", *layouts) == [True, False, False]
    assert holds("8 // (pp - 1) > 4", *layouts) == [False, True, False]
    assert undefined("8 % (pp - 1) == 0", *layouts) == [True, False, False]
    assert undefined("tp in (8 // (pp - 1), 2)", *layouts) == [True, False, False]
    assert undefined("not 8 // (pp - 1) > 4", *layouts) == [True, False, False]


def test_a_guard_before_a_division_is_heeded() -> None:
    layouts = [replace(LAYOUT, pipeline_parallel_size=p) for p in (1, 2)]
    assert undefined("pp == 1 or 8 // (pp - 1) > 4", *layouts) == [False, False]
    assert undefined("pp > 1 and 8 // (pp - 1) > 4", *layouts) == [False, False]
    assert undefined("8 // (pp - 1) > 4 or pp == 1", *layouts) == [
        True,
        False,
    ]  # left to right, as Python does
    assert undefined("2 < pp < 8 // (pp - 1)", *layouts) == [False, False]


def test_arithmetic_beyond_64_bits_is_exact() -> None:
    giant = 1 << 40
    assert holds(f"dp * {giant} * {giant} > {giant} * {giant} * 3") == [True]
    assert holds(f"(dp * {giant} * {giant} + 1) % {giant} == 1") == [True]
    assert holds(
        f"global_batch_size * {giant} * sequence_length // {giant} == global_batch_size *"
        " sequence_length"
    ) == [True]
    assert holds(f"-dp * {giant} * {giant} < -{giant} * {giant} * 3 < 0") == [True]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("tp", "compare it"),
        ("recompute", "compare it"),
        ("tp and dp > 1", "'tp' is a number, not a condition; compare it"),
        ("(tp > 1) + 1 > 2", "'tp > 1' is a condition, not a number"),
        ("recompute + 1 > 2", "recompute is a word; compare it: recompute == 'none'"),
        ("tp = 8", "write '==' instead of '='"),
        ("tp < 8 && dp > 1", "write 'and' instead of '&&'"),
        ("tp < 8 || dp > 1", "write 'or' instead of '||'"),
        ("!(tp < 8)", "write 'not' instead of '!'"),
        ("tp / 2 > 1", "write '//' instead of '/'"),
        ("tp ** 2 > 1", "'tp ** 2' is not allowed"),
        ("tp << 2 > 1", "is not allowed"),
        ("tp > 1.5", "'1.5' is not allowed"),
        ("tp > 1e9", "is not allowed"),
        ("tp > 2000000000000", "is larger than"),
        ("True", "is no number here"),
        ("tpp > 1", "'tpp' is no axis; did you mean tp?"),
        ("microbatch_size > 1", "did you mean micro_batch_size?"),
        ("nonsense > 1", "known: "),
        ("recompute == full", "words in quotes, not with full"),
        ("full == 1", "put a word in quotes: recompute == 'full'"),
        ("recompute == 'ful'", "did you mean 'full'?"),
        ("recompute == 'full:8'", "the number of layers is recompute_layers"),
        ("recompute == 3", "words in quotes, not with 3"),
        ("recompute < 'full'", "compare a word with =="),
        ("recompute == 'full' == tp", "compare a word with =="),
        ("recompute == precision", "words in quotes"),
        ("recompute in 'full'", "after in comes a list"),
        ("tp in 3", "after in comes a list"),
        ("tp in ()", "after in comes a list"),
        ("tp is 3", "compare with == != <"),
        ("f(tp) > 1", "is not allowed"),
        ("__import__('os').system('true')", "is not allowed"),
        ("tp.__class__ == 1", "is not allowed"),
        ("(1, 2)[tp] > 1", "is not allowed"),
        ("[tp for tp in (1, 2)]", "is not allowed"),
        ("(lambda: 1) == 1", "is not allowed"),
        ("1 if tp > 1 else 2", "is not allowed"),
        ("(tp := 3) > 1", "write '==' instead of '='"),
        ("f'{tp}' == '1'", "is not allowed"),
        ("await tp", "constraint 'await tp': "),
        ("tp > 1; dp > 1", "character ';' means nothing here"),
        ("tp > \\x31", "means nothing here"),
        ("tр > 1", "means nothing here"),  # a Cyrillic letter
        ("tp > 1 # why", "means nothing here"),
        ("((tp > 1", "not an expression"),
        ("tp > > 1", "not an expression"),
        ("(" * 220 + "tp" + ")" * 220 + " > 1", "not an expression"),
        ("-" * 60 + "tp > 1", "is nested more than 40 deep"),
        ("tp > 1 " + "and tp > 1 " * 60, "at most 500"),
    ],
)
def test_what_is_no_constraint_is_refused_with_the_fix(text: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        Constraint(text)
    assert told in str(caught.value)


def test_the_reason_is_the_users_or_the_expression_on_one_line() -> None:
    assert Constraint("tp <= 8", "one node has eight").reason == "one node has eight"
    assert Constraint("tp <= 8\n  and pp <= 8").reason == "constraint: tp <= 8 and pp <= 8"
    assert (
        Constraint("8 // (pp - 1) > 1").undefined_reason
        == "constraint divides by zero: 8 // (pp - 1) > 1"
    )


# Expressions of the language at random, against Python itself on one row at a time.
_atoms = st.one_of(
    st.sampled_from([*SHORT_NAMES, "num_gpus", "num_layers", "zero_stage"]),
    st.integers(0, 40).map(str),
)
_numbers = st.recursive(
    _atoms,
    lambda inner: st.builds(
        "({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner
    ),
    max_leaves=4,
)
_comparisons = st.builds(
    "{} {} {}".format, _numbers, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), _numbers
)
_conditions = st.recursive(
    _comparisons,
    lambda inner: st.one_of(
        st.builds("(not {})".format, inner),
        st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or"]), inner),
    ),
    max_leaves=4,
)
_layouts = st.builds(
    Layout,
    data_parallel_size=st.integers(1, 9),
    tensor_parallel_size=st.integers(1, 9),
    pipeline_parallel_size=st.integers(1, 9),
    context_parallel_size=st.integers(1, 9),
    micro_batch_size=st.integers(1, 9),
    grad_accum_steps=st.integers(1, 9),
    zero_stage=st.integers(0, 3),
)
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDERS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def reference(node: ast.AST, names: dict[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.BinOp(left=left, op=op, right=right):
            return int(_OPERATORS[type(op)](reference(left, names), reference(right, names)))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not reference(operand, names)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(reference(value, names) for value in values)
        case ast.BoolOp(values=values):
            return any(reference(value, names) for value in values)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return bool(_ORDERS[type(op)](reference(left, names), reference(right, names)))
    raise AssertionError(ast.dump(node))


@given(text=_conditions, layouts=st.lists(_layouts, min_size=1, max_size=5))
@settings(max_examples=examples(300))
def test_columns_are_judged_as_python_judges_each_row(text: str, layouts: list[Layout]) -> None:
    table = LayoutTable.of(layouts)
    held, broken = Constraint(text).check(facts_of(table, cell=CELL, gpus_per_node=8), len(table))
    for layout, row_held, row_undefined in zip(layouts, held, broken, strict=True):
        names = {short: getattr(layout, name) for short, name in SHORT_NAMES.items()}
        names |= {"num_gpus": 16, "num_layers": 32, "zero_stage": layout.zero_stage}
        try:
            expected = (bool(reference(ast.parse(text, mode="eval").body, names)), False)
        except ZeroDivisionError:
            expected = (False, True)
        assert (bool(row_held), bool(row_undefined)) == expected


@given(text=st.text(alphabet="tpdmbsga0123 ()<>=!+-*/%andornti'.,[]", max_size=60))
@settings(max_examples=examples(500))
def test_no_text_crashes_the_reader(text: str) -> None:
    try:
        constraint = Constraint(text)
    except ValueError:
        return
    table = LayoutTable.of([LAYOUT])
    mask, _ = constraint.check(facts_of(table, cell=CELL, gpus_per_node=8), 1)
    assert mask.dtype == np.bool_


# --- options that vary ---

VARYING = (("kernel", ("flash", "eager")), ("fused", (True, False)), ("threads", (1, 2)))
FLASH = replace(LAYOUT, options=(("fused", True), ("kernel", "flash"), ("threads", 2)))
EAGER = replace(LAYOUT, options=(("fused", False), ("kernel", "eager"), ("threads", 1)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kernel == 'flash'", [True, False]),
        ("kernel in ('eager', 'flash')", [True, True]),
        ("kernel != 'flash' or fused", [True, True]),
        ("not fused", [False, True]),
        ("threads * tp > 2", [True, False]),
        ("fused and threads == 2 or kernel == 'eager'", [True, True]),
    ],
)
def test_options_that_vary_are_asked_like_axes(text: str, expected: list[bool]) -> None:
    table = LayoutTable.of([FLASH, EAGER])
    assert (
        Constraint(text, varying=VARYING)
        .check(facts_of(table, cell=CELL, gpus_per_node=8), 2)[0]
        .tolist()
        == expected
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "kernel == 'flsh'",
            "kernel is never 'flsh'; allowed: flash, eager; did you mean 'flash'?",
        ),
        ("kernel", "is a value, not a condition"),
        ("kernel > 1", "compare a word with"),
        ("fused == 1", "'fused' is a condition, not a number"),
        ("kernle == 'flash'", "'kernle' is no axis; did you mean kernel?"),
        ("flash", "put a word in quotes: kernel == 'flash'"),
    ],
)
def test_a_mistake_about_an_option_is_told_by_its_values(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Constraint(text, varying=VARYING)


def test_without_such_an_axis_an_option_is_no_name() -> None:
    with pytest.raises(ValueError, match="'kernel' is no axis"):
        Constraint("kernel == 'flash'")


def test_a_constraint_may_name_the_schedule_and_its_stages() -> None:
    layouts = [
        Layout(pipeline_parallel_size=2, pipeline_schedule=PipelineSchedule.parse(text))
        for text in ("1f1b", "gpipe", "interleaved:2", "interleaved:4")
    ]
    assert holds("pipeline_schedule in ('1f1b', 'interleaved')", *layouts) == [
        True,
        False,
        True,
        True,
    ]
    assert holds("virtual_stages < 4", *layouts) == [True, True, True, False]


def test_numbers_beyond_64_bits_are_exact() -> None:
    """2 billion to the fourth power is 1.6e37: as 64 bits it would be 0."""
    large = "2000000000"
    assert holds(f"{large} * {large} * {large} * {large} * tp > {large} * {large}") == [True]
    assert holds(f"{large} * {large} * 2 * tp > 0") == [True]  # 1.6e19, above 2**63
    # A sum of two halves of 2**63, which is above the largest of 64 bits.
    half = f"{2**31} * {2**31} * tp"
    assert holds(f"{half} + {half} > 0") == [True]
    assert holds(f"0 - {half} - {half} - {half} < 0") == [True]
