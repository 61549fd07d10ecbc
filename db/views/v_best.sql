-- The fastest layout of each cell and fingerprint, among those whose numbers may be true and that were timed to their end. Numbers of two fingerprints are not comparable: read the rows with is_current.
-- is_current: whether the cell's newest measurement has this fingerprint
CREATE VIEW v_best AS
SELECT
    v_trial.sweep_id,
    v_trial.sweep,
    v_trial.cell_id,
    v_trial.cell,
    v_trial.model,
    v_trial.model_digest,
    v_trial.num_gpus,
    v_trial.sequence_length,
    v_trial.global_batch_size,
    v_trial.fingerprint_digest,
    v_trial.is_current_fingerprint AS is_current,
    v_trial.trial_id,
    v_trial.layout,
    v_trial.tokens_per_second_per_gpu,
    v_trial.tokens_per_second,
    v_trial.step_seconds_median,
    v_trial.relative_confidence,
    v_trial.confident,
    v_trial.mfu,
    v_trial.hfu,
    v_trial.peak_memory_allocated_bytes,
    v_trial.peak_memory_reserved_bytes,
    v_trial.device_memory_bytes,
    v_trial.thrashing,
    v_trial.updated_at
FROM (
    -- Only the columns that rank: sorting whole rows of v_trial takes three times as long.
    SELECT
        trial.id AS trial_id,
        row_number() OVER (
            PARTITION BY trial.cell_id, coalesce(attempt.fingerprint_digest, '')
            ORDER BY measurement.tokens_per_second_per_gpu DESC, trial.id
        ) AS place
    FROM attempt
    JOIN trial ON trial.id = attempt.trial_id
    JOIN measurement ON measurement.attempt_id = attempt.id
    WHERE attempt.state = 'measured' AND NOT attempt.superseded AND trial.state = 'measured' AND measurement.implausible IS NULL AND measurement.step_seconds_bound IS NULL
) AS ranked
JOIN v_trial ON v_trial.trial_id = ranked.trial_id
WHERE ranked.place = 1
