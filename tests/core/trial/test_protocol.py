"""Messages of ranks are untrusted: all but valid ones are refused, and the reader never crashes."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.protocol import (
    MAX_RESULT_BYTES,
    MAX_SAMPLES,
    BadResult,
    Device,
    Heartbeat,
    MeasurementPlan,
    NotFiniteResult,
    Phase,
    PhaseLimits,
    RankFailure,
    RankResult,
    TrialRequest,
    decode_failure,
    decode_heartbeat,
    decode_request,
    decode_result,
    encode,
)


def _collective(**keys: object) -> dict[str, object]:
    whole = {"collective": "x" * 32, "message_bytes": 1, "seconds": 1.0, "num_calls": 1}
    return whole | keys


def test_a_request_arrives_as_it_was_sent() -> None:
    request = TrialRequest(
        sweep="s",
        trial_id=7,
        attempt=2,
        workload="llama",
        options={"attention": "flash"},
        model=PRESETS["llama-3.1-8b"],
        sequence_length=4096,
        layout=Layout(
            data_parallel_size=4,
            recompute=Recompute.parse("selective_ops:8"),
            zero_stage=2,
            precision=Precision.FP32,
        ),
        device=Device.CUDA,
        measurement=MeasurementPlan(
            warmup_steps=2, min_steps=5, max_steps=50, relative_confidence=0.02
        ),
        limits=PhaseLimits(
            start=60, rendezvous=60, first_step=300, steady=60, teardown=30, total=600
        ),
        seed=1,
    )
    assert decode_request(encode(request)) == request
    assert request.tag == "s/7/2"
    assert (request.one_rank_per_node, request.reports_on_last_node) == (False, False)
    assert request.elapsed_seconds == 0.0


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"not json",
        b"\xff\xfe",
        b'{"step_seconds": []}',
        b'{"step_seconds": [0]}',
        b'{"step_seconds": [-1]}',
        b'{"step_seconds": [NaN]}',
        b'{"step_seconds": [Infinity]}',
        b'{"step_seconds": [1e400]}',
        b'{"step_seconds": [1e18]}',
        b'{"step_seconds": [5e-324]}',
        b'{"step_seconds": ["fast"]}',
        b'{"step_seconds": {"0": 1}}',
        b'{"step_seconds": [1], "peak_memory_allocated_bytes": -1}',
        b'{"step_seconds": [1], "peak_memory_allocated_bytes": 1e30}',
        b'{"step_seconds": [1], "peak_flops": NaN}',
        b'{"step_seconds": [1], "loss_last": Infinity}',
        b'{"step_seconds": [1], "phase_seconds": {"sleeping": 1}}',
        b'{"step_seconds": [1], "stack": {"device_name": "a\\u0000b"}}',
        b'{"step_seconds": [1], "peak_flops_source": "a\\u0000b"}',
        b'{"step_seconds": [1], "surprise": 1}',
        b'{"step_seconds": [1]',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"step_seconds": [' + b"1," * MAX_SAMPLES + b"1]}",
        b" " * (MAX_RESULT_BYTES + 1),
    ],
    ids=lambda text: repr(text[:40]),
)
def test_rubbish_is_refused_as_a_result(text: bytes) -> None:
    with pytest.raises(BadResult):
        decode_result(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b'{"step_seconds": [1], "loss_last": NaN}', "loss_last"),
        (b'{"step_seconds": [1], "loss_first": -Infinity, "surprise": 1}', "loss_first"),
        (b'{"step_seconds": [1], "loss_last": 1e400}', "loss_last"),
        (b'{"step_seconds": [1], "loss_last": "nan"}', "loss_last"),
        (b'{"step_seconds": [1], "loss_last": "inf"}', "loss_last"),
        (b'{"step_seconds": [1], "gradient_norm": NaN}', "gradient_norm"),
        (b'{"step_seconds": [1], "loss": NaN}', "loss"),
    ],
)
def test_a_result_of_a_training_that_diverged_is_told_from_rubbish(text: bytes, name: str) -> None:
    with pytest.raises(NotFiniteResult, match=name):
        decode_result(text)


@pytest.mark.parametrize(
    "text",
    [b'{"step_seconds": [1], "loss_last": null}', b'{"step_seconds": [1], "loss_first": 9.5}'],
)
def test_a_loss_that_nobody_tells_is_unknown(text: bytes) -> None:
    assert decode_result(text).loss_last is None


def test_a_loss_without_first_or_last_is_that_of_the_last_step() -> None:
    assert decode_result(b'{"step_seconds": [1], "loss": 2.5}').loss_last == 2.5


_SAMPLES = [1.0] * 10_000
_BYTES = ([0, 1 << 50], [-1, (1 << 50) + 1])
_COUNTS = ([0, 1 << 40], [-1, (1 << 40) + 1])
_FLOPS = ([1.0, 1e18], [0.0, 1.1e18])
_TEXTS = (["x" * 200], ["x" * 201])
_LOSSES = ([-1e30, 1e30], [-1.1e30, 1.1e30])


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("step_seconds", [[1e-9, 1e7], _SAMPLES], [[0.9e-9], [1.1e7], [*_SAMPLES, 1.0]]),
        ("warmup_seconds", [[1e-9, 1e7], _SAMPLES], [[0.9e-9], [1.1e7], [*_SAMPLES, 1.0]]),
        ("tokens_per_step", [1, 1 << 50], [0, (1 << 50) + 1]),
        ("phase_seconds", [{"start": 0.0, "steady": 1e7}], [{"start": 1.1e7}]),
        ("compile_seconds", [0.0, 1e7], [-1e-9, 1.1e7]),
        ("peak_memory_allocated_bytes", *_BYTES),
        (
            "memory_bytes_by_part",
            [{str(part): 1 << 50 for part in range(32)}],
            [{str(part): 1 for part in range(33)}],
        ),
        ("allocator_retries", *_COUNTS),
        ("allocator_ooms", *_COUNTS),
        ("peak_flops", *_FLOPS),
        ("peak_flops_source", *_TEXTS),
        ("attention_kernel", *_TEXTS),
        ("loss_first", *_LOSSES),
        ("loss_last", *_LOSSES),
        ("gradient_norm", [0.0, 1e30], [-1e-9, 1.1e30]),
        (
            "collectives",
            [[_collective()] * 1000, [_collective(message_bytes=1 << 40, num_calls=1 << 30)]],
            [
                [_collective()] * 1001,
                [_collective(collective="x" * 33)],
                [_collective(message_bytes=0)],
                [_collective(message_bytes=(1 << 40) + 1)],
                [_collective(num_calls=0)],
                [_collective(num_calls=(1 << 30) + 1)],
            ],
        ),
    ],
)
def test_a_field_of_a_result_is_taken_up_to_its_bounds(
    name: str, taken: list[object], refused: list[object]
) -> None:
    for value in taken:
        found = decode_result(json.dumps({"step_seconds": [1.0], name: value}).encode())
        assert found.model_dump(mode="json")[name] == value
    for value in refused:
        with pytest.raises(BadResult, match=f"^result is not valid: {name}"):
            decode_result(json.dumps({"step_seconds": [1.0], name: value}).encode())


def test_a_message_of_one_mebibyte_is_read() -> None:
    text = b'{"step_seconds": [1.0]}'
    assert decode_result(text.ljust(1_048_576)).step_seconds == [1.0]
    with pytest.raises(BadResult, match=r"^result has 1048577 bytes, more than 1048576$"):
        decode_result(text.ljust(1_048_577))


def test_the_first_five_mistakes_of_a_message_are_named() -> None:
    names = [f"field_{number}" for number in range(6)]
    with pytest.raises(BadResult) as caught:
        decode_result(json.dumps(dict.fromkeys(names, 1) | {"step_seconds": [1.0]}).encode())
    mistakes = "; ".join(f"{name}: Extra inputs are not permitted" for name in names[:5])
    assert str(caught.value) == f"result is not valid: {mistakes}"


def test_fields_that_a_message_lacks_are_false_zero_or_unknown() -> None:
    assert decode_heartbeat(b'{"phase": "start"}') == Heartbeat(
        phase=Phase.START, step=0, timed=False, enough=False, at=None, total_limit_seconds=None
    )
    note = b'{"exception": "E", "message": "", "phase": "start", "at_unix_seconds": 0}'
    assert decode_failure(note) == RankFailure(
        exception="E",
        message="",
        traceback="",
        phase=Phase.START,
        step=0,
        at_unix_seconds=0.0,
        out_of_memory=False,
        phase_seconds={},
    )
    seen = decode_result(b'{"step_seconds": [1.0], "seen": {"seconds": 0}}').seen
    assert seen is not None
    assert (seen.ended_itself, seen.knows_num_steps, seen.every) == (True, True, 1)
    plan = MeasurementPlan(warmup_steps=1, min_steps=2, max_steps=2, relative_confidence=0.1)
    assert (plan.warmup_seconds, plan.min_seconds, plan.counts_lines) == (0.0, 0.0, False)
    limits = PhaseLimits(start=1, rendezvous=1, first_step=1, steady=1, teardown=1, total=1)
    assert (limits.in_file, limits.compile_seconds) == (True, 0.0)


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ({"step": 0, "at": 0.0, "total_limit_seconds": 1e-9}, True),
        ({"step": 10**9, "at": 1e12, "total_limit_seconds": 1e7}, True),
        ({"step": -1}, False),
        ({"step": 10**9 + 1}, False),
        ({"at": -1e-9}, False),
        ({"at": 1.1e12}, False),
    ],
)
def test_a_heartbeat_is_read_up_to_its_bounds(text: dict[str, float], is_taken: bool) -> None:
    whole = json.dumps({"phase": "steady"} | text).encode()
    if is_taken:
        assert decode_heartbeat(whole).model_dump(include=set(text)) == text
    else:
        with pytest.raises(BadResult, match=f"^heartbeat is not valid: {next(iter(text))}: "):
            decode_heartbeat(whole)


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ({"exception": "x" * 4000, "message": "x" * 4000, "traceback": "x" * 100_000}, True),
        ({"at_unix_seconds": 1e11}, True),
        ({"exception": "x" * 4001}, False),
        ({"message": "x" * 4001}, False),
        ({"traceback": "x" * 100_001}, False),
        ({"at_unix_seconds": -1.0}, False),
        ({"at_unix_seconds": 1.1e11}, False),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_a_note_is_read_up_to_its_bounds(text: dict[str, object], is_taken: bool) -> None:
    note = {"exception": "E", "message": "", "phase": "steady", "at_unix_seconds": 0.0}
    whole = json.dumps(note | text).encode()
    if is_taken:
        assert decode_failure(whole).model_dump(include=set(text)) == text
    else:
        with pytest.raises(BadResult, match=f"^failure note is not valid: {next(iter(text))}: "):
            decode_failure(whole)


def test_a_step_that_no_column_holds_is_no_step() -> None:
    too_large = str(2**70).encode()
    with pytest.raises(BadResult, match="step"):
        decode_heartbeat(b'{"phase":"steady","step":' + too_large + b"}")
    with pytest.raises(BadResult, match="step"):
        decode_failure(
            b'{"exception":"E","message":"","phase":"steady","at_unix_seconds":1,"step":'
            + too_large
            + b"}"
        )


@given(st.binary(max_size=300))
def test_no_bytes_crash_a_decoder(text: bytes) -> None:
    for decode in (decode_result, decode_failure, decode_heartbeat):
        with pytest.raises(BadResult):
            decode(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*RankResult.model_fields, "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(_JSON)
def test_a_result_is_within_its_bounds_or_refused(value: object) -> None:
    try:
        result = decode_result(json.dumps(value).encode())
    except BadResult:
        return
    assert all(0 < seconds <= 1e7 for seconds in result.step_seconds)


def test_ten_thousand_broken_copies_of_a_result_crash_nothing() -> None:
    chance = random.Random(5)
    whole = encode(
        RankResult(step_seconds=[0.5, 0.6], peak_memory_allocated_bytes=1 << 30, loss_last=2.5)
    )
    num_refused = 0
    for _ in range(10_000):
        broken = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        try:
            result = decode_result(bytes(broken[: chance.randint(1, len(broken))]))
        except BadResult:
            num_refused += 1
        else:
            assert all(0 < seconds <= 1e7 for seconds in result.step_seconds)
    assert num_refused > 9_000


def test_notes_and_heartbeats_arrive_as_they_were_sent() -> None:
    note = RankFailure(
        exception="ValueError",
        message="x" * 4000,
        phase=Phase.STEADY,
        step=3,
        at_unix_seconds=1.8e9,
        out_of_memory=True,
    )
    assert decode_failure(encode(note)) == note
    heartbeat = Heartbeat(phase=Phase.FIRST_STEP, step=0)
    assert decode_heartbeat(encode(heartbeat)) == heartbeat
    assert decode_heartbeat(b'{"phase":"steady","step":5}          ') == Heartbeat(
        phase=Phase.STEADY, step=5
    )
