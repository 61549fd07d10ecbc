-- The best of each number of GPUs of one problem, against the best of the smallest: efficiency is speed-up over growth in GPUs.
CREATE VIEW v_scaling AS
SELECT
    best.sweep_id,
    best.sweep,
    best.model,
    best.model_digest,
    best.sequence_length,
    best.global_batch_size,
    best.num_gpus,
    best.layout,
    best.trial_id,
    best.tokens_per_second,
    best.tokens_per_second_per_gpu,
    best.tokens_per_second / smallest.tokens_per_second AS speed_up,
    smallest.num_gpus AS smallest_num_gpus,
    best.tokens_per_second_per_gpu / smallest.tokens_per_second_per_gpu AS efficiency,
    best.fingerprint_digest,
    coalesce(best.fingerprint_digest, '') = coalesce(smallest.fingerprint_digest, '') AS is_comparable
FROM v_best AS best
JOIN v_best AS smallest
    ON smallest.sweep_id = best.sweep_id
    AND smallest.model_digest = best.model_digest
    AND smallest.sequence_length = best.sequence_length
    AND smallest.global_batch_size = best.global_batch_size
    AND smallest.is_current
WHERE best.is_current
    AND smallest.num_gpus = (
        SELECT min(cell.num_gpus)
        FROM cell
        WHERE cell.sweep_id = best.sweep_id
            AND cell.model_digest = best.model_digest
            AND cell.sequence_length = best.sequence_length
            AND cell.global_batch_size = best.global_batch_size
            AND EXISTS (SELECT 1 FROM trial WHERE trial.sweep_id = cell.sweep_id AND trial.cell_id = cell.id AND trial.state = 'measured')
    )
