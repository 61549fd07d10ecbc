-- Which layout is the fastest of each cell, and how sure is that?
SELECT
    v_best.cell,
    v_best.trial_id,
    v_best.layout,
    v_best.tokens_per_second_per_gpu,
    v_best.relative_confidence,
    trial.num_measurements,
    v_best.step_seconds_median,
    v_best.mfu,
    coalesce(
        nullif(measurement.peak_memory_reserved_bytes, 0),
        nullif(measurement.peak_memory_allocated_bytes, 0),
        CASE WHEN measurement.peak_memory_driver_kind = 'nvml' THEN nullif(measurement.peak_memory_driver_bytes, 0) END
    ) AS peak_memory_bytes,
    v_best.device_memory_bytes
FROM v_best
JOIN trial ON trial.id = v_best.trial_id
JOIN attempt ON attempt.trial_id = trial.id AND attempt.state = 'measured' AND NOT attempt.superseded
JOIN measurement ON measurement.attempt_id = attempt.id
WHERE v_best.sweep = :sweep AND v_best.is_current
ORDER BY v_best.cell
