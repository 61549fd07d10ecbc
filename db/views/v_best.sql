-- Per cell and fingerprint the fastest layout. Numbers of two fingerprints are not comparable: rows with is_current are the ones to read.
CREATE VIEW v_best AS
SELECT
    ranked.sweep_id,
    ranked.sweep,
    ranked.cell_id,
    ranked.cell,
    ranked.model,
    ranked.model_digest,
    ranked.num_gpus,
    ranked.sequence_length,
    ranked.global_batch_size,
    ranked.fingerprint_digest,
    ranked.is_current_fingerprint AS is_current,
    ranked.trial_id,
    ranked.layout,
    ranked.tokens_per_second_per_gpu,
    ranked.tokens_per_second,
    ranked.step_seconds_median,
    ranked.relative_confidence,
    ranked.confident,
    ranked.mfu,
    ranked.hfu,
    ranked.peak_memory_allocated_bytes,
    ranked.peak_memory_reserved_bytes,
    ranked.device_memory_bytes,
    ranked.thrashing,
    ranked.updated_at
FROM (
    SELECT
        v_trial.*,
        row_number() OVER (
            PARTITION BY cell_id, coalesce(fingerprint_digest, '')
            ORDER BY tokens_per_second_per_gpu DESC, trial_id
        ) AS place
    FROM v_trial
    WHERE state = 'measured'
) AS ranked
WHERE ranked.place = 1
