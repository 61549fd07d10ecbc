-- The best layout for each number of GPUs of one problem, against that for the smallest number. Efficiency is speed-up over growth in GPUs.
-- smallest_num_gpus: the smallest number of GPUs of the problem
-- speed_up: tokens/s against the best of the smallest number of GPUs
-- efficiency: tokens/s/GPU against the best of the smallest number of GPUs
-- is_comparable: whether both points of the efficiency have the same fingerprint
CREATE VIEW v_scaling AS
SELECT
    sweep_id,
    sweep,
    model,
    model_digest,
    sequence_length,
    global_batch_size,
    num_gpus,
    layout,
    trial_id,
    tokens_per_second,
    tokens_per_second_per_gpu,
    first_value(num_gpus) OVER same_problem AS smallest_num_gpus,
    tokens_per_second / first_value(tokens_per_second) OVER same_problem AS speed_up,
    tokens_per_second_per_gpu / first_value(tokens_per_second_per_gpu) OVER same_problem AS efficiency,
    fingerprint_digest,
    -- False: the two were measured with different stacks.
    coalesce(fingerprint_digest, '') = first_value(coalesce(fingerprint_digest, '')) OVER same_problem AS is_comparable
FROM v_best
WHERE is_current
WINDOW same_problem AS (PARTITION BY sweep_id, model_digest, sequence_length, global_batch_size ORDER BY num_gpus)
