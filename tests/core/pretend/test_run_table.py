"""Measured runs as text: unknown values stay unknown, and a mistake is reported with its place."""

from __future__ import annotations

import csv

import pytest

from orchestrator.core.pretend.run_table import (
    REQUIRED,
    MeasuredRun,
    RunStatus,
    TableInvalid,
    parse_runs,
    read_precision,
    read_recompute,
    tables,
)
from orchestrator.core.problem.layout import Precision, Recompute

ROW = {
    "table_id": "t",
    "hardware": "H100-80GB",
    "gpu_mem_gb": "80",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "model": "small",
    "n_params": "",
    "layers": "16",
    "hidden": "2048",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "8192",
    "vocab": "128256",
    "tied_embeddings": "True",
    "seq_len": "4096",
    "gbs": "64.0",
    "dp": "4",
    "tp": "2",
    "pp": "1",
    "cp": "1",
    "mbs": "2",
    "grad_acc": "8",
    "recompute": "none",
    "zero_stage": "1.0",
    "sharding": "zero1",
    "precision": "bf16",
    "attention_kernel": "flash",
    "sequence_parallel": "True",
    "status": "ok",
    "step_time_s": "2.0",
    "tokens_per_s_per_gpu": "",
    "peak_mem_gb": "10",
    "peak_mem_kind": "max_memory_reserved GiB",
    "replay": "True",
}


def table(*changes: dict[str, str]) -> str:
    rows = [ROW | change for change in changes]
    return "\n".join([",".join(ROW), *(",".join(row.values()) for row in rows)])


def read(*changes: dict[str, str]) -> tuple[MeasuredRun, ...]:
    return parse_runs(table(*changes))


def test_a_row_is_a_run_of_one_layout_of_one_cell() -> None:
    (run,) = read({})
    assert run.layout is not None
    assert run.layout.key == "dp4_tp2_pp1_cp1_mbs2_ga8_none_z1_bf16"
    assert run.cell is not None
    assert run.cell.tokens_per_step == 64 * 4096
    assert run.tokens_per_second_per_gpu == 64 * 4096 / 2.0 / 8
    assert run.peak_memory_bytes == 10 * 2**30
    assert run.status is RunStatus.OK


def test_what_the_source_does_not_say_is_none() -> None:
    (run,) = read(
        {"vocab": "", "step_time_s": "", "peak_mem_gb": "", "gpu_mem_gb": "", "status": "oom"}
    )
    assert run.model is None and run.cell is None
    assert run.step_seconds is None and run.tokens_per_second_per_gpu is None
    assert run.peak_memory_bytes is None and run.memory_bytes is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"n_gpus": "eight"}, "line 3, column n_gpus: 'eight'"),
        ({"mbs": "1.5"}, "line 3, column mbs: '1.5'"),
        ({"mbs": "0"}, "line 3, column mbs: '0'"),
        (
            {"status": "fine"},
            "line 3, column status: 'fine': expected one of ok, oom, error, pruned",
        ),
        ({"grad_acc": ""}, "line 3, column grad_acc: '': a row with replay = True"),
        ({"grad_acc": "7"}, "line 3, column gbs: '64.0': dp x mbs x grad_acc is 56"),
        ({"tp": "4"}, "line 3, column n_gpus: '8': dp x tp x pp x cp is 16"),
        ({"zero_stage": "4"}, "line 3, column zero_stage"),
        ({"table_id": ""}, "line 3, column table_id"),
        (
            {"step_time_s": "-3"},
            "line 3, column step_time_s: '-3': expected a number that is not negative",
        ),
        ({"step_time_s": "inf"}, "line 3, column step_time_s"),
    ],
)
def test_a_mistake_is_told_with_line_column_and_rule(change: dict[str, str], told: str) -> None:
    with pytest.raises(TableInvalid, match=told.replace("(", r"\(")):
        read({}, change)


@pytest.mark.parametrize(("text", "stage"), [("", 0), ("0", 0), ("1", 1), ("2.0", 2), ("3", 3)])
def test_a_stage_of_zero_is_one_of_four(text: str, stage: int) -> None:
    (run,) = read({"zero_stage": text})
    assert run.layout is not None and run.layout.zero_stage == stage
    for wrong in ("0.5", "4"):
        with pytest.raises(TableInvalid, match="expected 0, 1, 2 or 3"):
            read({"zero_stage": wrong})


def test_time_and_speed_follow_from_each_other() -> None:
    """64 sequences of 4,096 tokens on 8 GPUs in 2 s."""
    (run,) = read({"step_time_s": "", "tokens_per_s_per_gpu": "16384"})
    assert (run.step_seconds, run.tokens_per_second_per_gpu) == (2.0, 16384.0)
    (both,) = read({"step_time_s": "2.0", "tokens_per_s_per_gpu": "16000"})
    assert (both.step_seconds, both.tokens_per_second_per_gpu) == (2.0, 16000.0)
    for unknown in ({"seq_len": "", "replay": "False"}, {"gbs": "", "replay": "False"}):
        (run,) = read(unknown)
        assert (run.step_seconds, run.tokens_per_second_per_gpu) == (2.0, None)


@pytest.mark.parametrize("word", ["True", "1", "yes"])
def test_a_row_is_replayed_if_it_says_so(word: str) -> None:
    assert read({"replay": word})[0].replay
    assert not read({"replay": "no"})[0].replay
    (run,) = read({"cp": "", "gpus_per_node": "", "replay": word})
    assert run.layout is not None and run.layout.context_parallel_size == 1
    assert run.gpus_per_node == 8


def test_a_row_that_is_not_replayed_may_leave_its_layout_open() -> None:
    (run,) = read({"grad_acc": "", "replay": "False"})
    assert run.layout is None


def test_a_field_without_end_is_told_with_its_line() -> None:
    for field in ("x" * 200_000, '"' + "x\n" * 100_000):
        text = f"{','.join(REQUIRED)},note\na,H100,8,ok,{field}"
        with pytest.raises(
            TableInvalid,
            match=r"line \d+: field larger than field limit \(131072\): is a quote left open",
        ):
            parse_runs(text)


def test_a_table_without_the_columns_is_refused() -> None:
    with pytest.raises(TableInvalid, match="no column hardware, n_gpus, status"):
        parse_runs("table_id,model\nt,m\n")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("none", "none"),
        ("", "none"),
        ("full", "full"),
        ("every_layer", "full"),
        ("full:4", "full:4"),
        ("selective", "selective_ops"),
        ("selective_attention", "selective_attention"),
        ("selective-core-attn", "selective_attention"),
        ("selective_op", "selective_ops"),
        ("attn_only", "selective_attention"),
        ("the-attention", "selective_attention"),
        ("core", "selective_attention"),
        # A word that nobody knows means the most.
        ("by-hand", "full"),
    ],
)
def test_words_for_recomputation_are_mapped_to_the_nearest(word: str, meant: str) -> None:
    assert read_recompute(word) == Recompute.parse(meant)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("bf16(fp32 grad accum)", Precision.BF16),
        ("bfloat16", Precision.BF16),
        ("fp16", Precision.FP16),
        ("FP8-CS", Precision.FP8),
        ("", Precision.BF16),
    ],
)
def test_words_for_precision_are_mapped_to_the_nearest(word: str, meant: Precision) -> None:
    assert read_precision(word) is meant


def test_a_word_that_is_mapped_stays_an_axis_where_it_varies() -> None:
    runs = read({"recompute": "full"}, {"recompute": "every_layer"}, {"recompute": "none"})
    assert [run.extra for run in runs] == [
        (("recompute", ""),),
        (("recompute", "every_layer"),),
        (("recompute", ""),),
    ]


def test_only_what_varies_beyond_the_layout_is_an_axis() -> None:
    runs = read(
        {"attention_kernel": "flash"},
        {"attention_kernel": "naive"},
        {
            "zero_stage": "0",
            "sharding": "zero0",
            "attention_kernel": "naive",
        },  # the word follows from the stage
        {
            "zero_stage": "0",
            "sharding": "zero0",
            "tp": "1",
            "dp": "8",
            "grad_acc": "4",
            "sequence_parallel": "False",
        },
    )
    assert [run.extra for run in runs] == [
        (("attention_kernel", k),) for k in ("flash", "naive", "naive", "flash")
    ]
    assert runs[0].word("sequence_parallel") == "True"


def test_tables_are_grouped_into_cells() -> None:
    found = tables(
        read({}, {"n_gpus": "4", "dp": "2", "grad_acc": "16"}, {}, {"table_id": "other"})
    )
    assert {name: [len(cell) for cell in cells] for name, cells in found.items()} == {
        "t": [2, 1],
        "other": [1],
    }


def test_a_feed_forward_of_two_matrices_keeps_its_number_of_weights() -> None:
    # GPT: 4 h^2 attention and 8 h^2 feed-forward a layer, tied.
    parameters = 24 * 12 * 2048**2 + 50304 * 2048
    sizes = {
        "layers": "24",
        "heads": "16",
        "kv_heads": "",
        "ffn": "8192",
        "vocab": "50304",
        "tied_embeddings": "",
        "n_params": str(parameters),
    }
    (run,) = read(sizes)
    assert run.model is not None
    assert run.model.tied_embeddings
    assert run.model.num_parameters == pytest.approx(parameters, rel=1e-3)
    # What is not in the layers is embedding.
    assert read(sizes | {"vocab": ""})[0].model == run.model


@pytest.mark.parametrize(
    ("ffn", "told", "gated_size", "is_tied"),
    [
        # Four times the hidden size is a feed-forward of two matrices, in three: 2/3 of it.
        (8192, "", 5461, True),
        (8192, "False", 5461, False),
        (8192, "True", 5461, True),
        # Any other size is a gated one.
        (6144, "", 6144, False),
        (6144, "True", 6144, True),
        (10_240, "", 10_240, False),
        (512, "", 512, False),
    ],
)
def test_without_a_number_of_weights_the_feed_forward_s_size_tells_its_kind(
    ffn: int, told: str, gated_size: int, *, is_tied: bool
) -> None:
    (run,) = read({"ffn": str(ffn), "tied_embeddings": told, "n_params": ""})
    assert run.model is not None
    assert (run.model.ffn_hidden_size, run.model.tied_embeddings) == (gated_size, is_tied)


@pytest.mark.parametrize(("told", "is_tied"), [("True", True), ("False", False)])
@pytest.mark.parametrize("embeddings", [1, 2])
def test_what_is_told_of_embeddings_holds_whatever_the_number_of_weights(
    told: str, embeddings: int, *, is_tied: bool
) -> None:
    parameters = 24 * (4 * 2048**2 + 3 * 2048 * 6144) + embeddings * 50_304 * 2048
    sizes = {"layers": "24", "heads": "16", "kv_heads": "", "ffn": "6144", "vocab": "50304"}
    (run,) = read(sizes | {"tied_embeddings": told, "n_params": str(parameters)})
    assert run.model is not None and run.model.tied_embeddings is is_tied


@pytest.mark.parametrize("column", ["layers", "hidden", "heads", "ffn"])
def test_a_model_needs_each_of_its_sizes(column: str) -> None:
    (run,) = read({column: ""})
    assert run.model is None and run.cell is None


@pytest.mark.parametrize("column", ["seq_len", "gbs"])
def test_a_cell_needs_its_length_and_its_batch(column: str) -> None:
    (run,) = read({column: "", "replay": "False"})
    assert run.model is not None and run.cell is None


def test_models_of_unknown_sizes_are_told_apart_by_their_names() -> None:
    unknown = {"layers": "", "replay": "False"}
    (cells,) = tables(read(unknown | {"model": "a"}, unknown | {"model": "b"}, unknown)).values()
    assert [[run.model_name for run in cell] for cell in cells] == [["a"], ["b"], ["small"]]


def test_what_varies_among_rows_that_are_not_replayed_is_no_axis_of_the_others() -> None:
    odd = {"attention_kernel": "naive", "replay": "False"}
    assert [run.extra for run in read({}, {}, odd)] == [(), (), ()]
    # Where no row is replayed, all count.
    none = [change | {"replay": "False"} for change in ({}, odd)]
    assert [dict(run.extra) for run in read(*none)] == [
        {"attention_kernel": "flash"},
        {"attention_kernel": "naive"},
    ]


def test_memory_in_gigabytes_is_not_taken_for_gibibytes() -> None:
    (run,) = read({"peak_mem_kind": "torch max_memory_allocated GB"})
    assert run.peak_memory_bytes == 10e9


def test_what_is_no_csv_is_refused_with_its_line() -> None:
    wide = "9" * (csv.field_size_limit() + 1)
    for text in (f"table_id,hardware,n_gpus,status\nt,H100,{wide},ok\n", f"table_id,{wide}\n"):
        with pytest.raises(TableInvalid, match=r"line \d: field larger than field limit"):
            parse_runs(text)


def test_without_tensor_parallelism_it_does_not_matter_whether_the_sequence_is_split() -> None:
    one, two = read(
        {"tp": "1", "dp": "8", "grad_acc": "4", "sequence_parallel": "False"},
        {"sequence_parallel": "False"},
    )
    assert one.trainer.sequence_parallel
    assert not two.trainer.sequence_parallel


@pytest.mark.parametrize(("matrices", "embeddings"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_the_number_of_weights_tells_a_gated_feed_forward_and_tied_embeddings(
    matrices: int, embeddings: int
) -> None:
    hidden, ffn, vocab = 2048, 6144, 50304
    parameters = 24 * (4 * hidden**2 + matrices * hidden * ffn) + embeddings * vocab * hidden
    sizes = {"layers": "24", "hidden": "2048", "heads": "16", "kv_heads": "", "ffn": "6144"}
    told = {"vocab": "50304", "tied_embeddings": "", "n_params": str(parameters)}
    (run,) = read(sizes | told)
    assert run.model is not None
    assert run.model.tied_embeddings is (embeddings == 1)
    assert run.model.ffn_hidden_size == (ffn if matrices == 3 else 4096)
    assert run.model.num_parameters == pytest.approx(parameters, rel=1e-3)


@pytest.mark.parametrize(("num_words", "is_known"), [(1, True), (0, False)])
def test_a_model_whose_weights_are_all_in_its_layers_is_not_known(
    num_words: int, *, is_known: bool
) -> None:
    """GPT: 4 h^2 of attention and 8 h^2 of feed-forward a layer; the rest are words."""
    parameters = 24 * 12 * 2048**2 + num_words * 2048
    sizes = {"layers": "24", "hidden": "2048", "heads": "16", "kv_heads": "", "ffn": "8192"}
    (run,) = read(sizes | {"vocab": "", "tied_embeddings": "", "n_params": str(parameters)})
    assert (run.model is not None) is is_known
