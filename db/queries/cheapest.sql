-- Which layout needs the least memory, of those at most 5 % slower than the fastest of their cell?
-- within (number, 0.05): how much slower than the fastest a layout may be, as a fraction
-- All layouts of a cell use the same GPUs, so their money follows from their speed. What is left to save is memory.
WITH measured AS (
    SELECT
        trial.cell_id,
        cell.key AS cell,
        trial.id AS trial_id,
        trial.layout_key AS layout,
        measurement.tokens_per_second_per_gpu,
        coalesce(
            nullif(measurement.peak_memory_reserved_bytes, 0),
            nullif(measurement.peak_memory_allocated_bytes, 0),
            CASE WHEN measurement.peak_memory_driver_kind = 'nvml' THEN nullif(measurement.peak_memory_driver_bytes, 0) END
        ) AS peak_memory_bytes,
        measurement.device_memory_bytes,
        measurement.joules_per_token,
        max(measurement.tokens_per_second_per_gpu) OVER (PARTITION BY trial.cell_id) AS fastest
    FROM trial
    JOIN sweep ON sweep.id = trial.sweep_id
    JOIN cell ON cell.id = trial.cell_id
    JOIN attempt ON attempt.trial_id = trial.id AND attempt.state = 'measured' AND NOT attempt.superseded
    JOIN measurement ON measurement.attempt_id = attempt.id
    WHERE sweep.name = :sweep AND trial.state = 'measured'
        AND coalesce(attempt.fingerprint_digest, '') = coalesce(cell.fingerprint_digest, '')
        AND measurement.implausible IS NULL AND measurement.step_seconds_bound IS NULL
),
ranked AS (
    SELECT
        measured.*,
        row_number() OVER (PARTITION BY cell_id ORDER BY peak_memory_bytes, tokens_per_second_per_gpu DESC, trial_id) AS place
    FROM measured
    WHERE peak_memory_bytes IS NOT NULL AND tokens_per_second_per_gpu >= (1 - CAST(:within AS double precision)) * fastest
)
SELECT
    cell,
    trial_id,
    layout,
    tokens_per_second_per_gpu,
    1 - tokens_per_second_per_gpu / fastest AS slower_by,
    peak_memory_bytes,
    device_memory_bytes,
    joules_per_token
FROM ranked
WHERE place = 1
ORDER BY cell
