-- Up to which micro-batch does a layout fit, and from which on does memory run out?
-- One row for each cell and combination of the other axes. Accumulation follows from the batch.
SELECT
    cell.key AS cell,
    trial.data_parallel_size,
    trial.tensor_parallel_size,
    trial.pipeline_parallel_size,
    trial.context_parallel_size,
    trial.pipeline_schedule,
    trial.virtual_stages,
    trial.recompute,
    trial.recompute_policy,
    trial.recompute_layers,
    trial.zero_stage,
    trial.precision,
    CAST(trial.options AS text) AS options,
    max(CASE WHEN trial.state = 'measured' THEN trial.micro_batch_size END) AS largest_that_fits,
    min(CASE WHEN trial.state = 'out_of_memory' THEN trial.micro_batch_size END) AS smallest_out_of_memory,
    min(CASE WHEN trial.state = 'pruned' THEN trial.micro_batch_size END) AS smallest_condemned,
    max(coalesce(
        nullif(measurement.peak_memory_reserved_bytes, 0),
        nullif(measurement.peak_memory_allocated_bytes, 0),
        CASE WHEN measurement.peak_memory_driver_kind = 'nvml' THEN nullif(measurement.peak_memory_driver_bytes, 0) END
    )) AS highest_peak_memory_bytes,
    max(measurement.device_memory_bytes) AS device_memory_bytes
FROM trial
JOIN sweep ON sweep.id = trial.sweep_id
JOIN cell ON cell.id = trial.cell_id
LEFT JOIN attempt ON attempt.trial_id = trial.id AND attempt.state = 'measured' AND NOT attempt.superseded
LEFT JOIN measurement ON measurement.attempt_id = attempt.id
WHERE sweep.name = :sweep
    AND (trial.state IN ('out_of_memory', 'pruned')
        OR (trial.state = 'measured' AND coalesce(attempt.fingerprint_digest, '') = coalesce(cell.fingerprint_digest, '')))
GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13
ORDER BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13
