-- Which layouts are on the front of speed and memory: no other of their cell is faster with as little memory?
-- It takes the stored numbers as exact. `sweep best --pareto` also counts noise, and has one front for cells that differ in their number of GPUs alone.
WITH measured AS (
    SELECT
        trial.cell_id,
        cell.key AS cell,
        trial.id AS trial_id,
        trial.layout_key AS layout,
        measurement.tokens_per_second_per_gpu,
        measurement.relative_confidence,
        coalesce(
            nullif(measurement.peak_memory_reserved_bytes, 0),
            nullif(measurement.peak_memory_allocated_bytes, 0),
            CASE WHEN measurement.peak_memory_driver_kind = 'nvml' THEN nullif(measurement.peak_memory_driver_bytes, 0) END
        ) AS peak_memory_bytes,
        measurement.device_memory_bytes,
        measurement.joules_per_token
    FROM trial
    JOIN sweep ON sweep.id = trial.sweep_id
    JOIN cell ON cell.id = trial.cell_id
    JOIN attempt ON attempt.trial_id = trial.id AND attempt.state = 'measured' AND NOT attempt.superseded
    JOIN measurement ON measurement.attempt_id = attempt.id
    WHERE sweep.name = :sweep AND trial.state = 'measured'
        AND coalesce(attempt.fingerprint_digest, '') = coalesce(cell.fingerprint_digest, '')
        AND measurement.implausible IS NULL AND measurement.step_seconds_bound IS NULL
),
-- The least memory at each speed, and the least of all that are faster.
points AS (
    SELECT cell_id, tokens_per_second_per_gpu, min(peak_memory_bytes) AS least
    FROM measured
    GROUP BY cell_id, tokens_per_second_per_gpu
),
compared AS (
    SELECT
        points.*,
        min(least) OVER (
            PARTITION BY cell_id ORDER BY tokens_per_second_per_gpu DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS least_of_faster
    FROM points
    WHERE least IS NOT NULL
)
SELECT
    measured.cell,
    measured.trial_id,
    measured.layout,
    measured.tokens_per_second_per_gpu,
    measured.relative_confidence,
    measured.peak_memory_bytes,
    measured.device_memory_bytes,
    measured.joules_per_token
FROM compared
JOIN measured ON measured.cell_id = compared.cell_id
    AND measured.tokens_per_second_per_gpu = compared.tokens_per_second_per_gpu
    AND measured.peak_memory_bytes = compared.least
WHERE compared.least_of_faster IS NULL OR compared.least < compared.least_of_faster
ORDER BY measured.cell, measured.tokens_per_second_per_gpu DESC, measured.trial_id
