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
