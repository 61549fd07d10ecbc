-- Which predictions were the farthest off, in speed or in memory?
-- top (number, 20): how many rows to show
-- A factor of 1 is exact; 2 is twice as much as measured, or half of it.
WITH predicted AS (
    SELECT
        cell.key AS cell,
        trial.id AS trial_id,
        trial.layout_key AS layout,
        trial.predicted_tokens_per_second_per_gpu,
        measurement.tokens_per_second_per_gpu,
        trial.predicted_memory_bytes,
        measurement.peak_memory_allocated_bytes,
        trial.predicted_tokens_per_second_per_gpu / nullif(measurement.tokens_per_second_per_gpu, 0) AS speed_ratio,
        CAST(trial.predicted_memory_bytes AS double precision) / nullif(measurement.peak_memory_allocated_bytes, 0) AS memory_ratio
    FROM trial
    JOIN sweep ON sweep.id = trial.sweep_id
    JOIN cell ON cell.id = trial.cell_id
    JOIN attempt ON attempt.trial_id = trial.id AND attempt.state = 'measured' AND NOT attempt.superseded
    JOIN measurement ON measurement.attempt_id = attempt.id
    WHERE sweep.name = :sweep AND trial.state = 'measured'
        AND measurement.implausible IS NULL AND measurement.step_seconds_bound IS NULL
),
judged AS (
    SELECT
        predicted.*,
        CASE WHEN speed_ratio > 0 AND speed_ratio < 1 THEN 1 / speed_ratio ELSE speed_ratio END AS speed_off_by,
        CASE WHEN memory_ratio > 0 AND memory_ratio < 1 THEN 1 / memory_ratio ELSE memory_ratio END AS memory_off_by
    FROM predicted
)
SELECT
    cell,
    trial_id,
    layout,
    predicted_tokens_per_second_per_gpu,
    tokens_per_second_per_gpu,
    speed_off_by,
    predicted_memory_bytes,
    peak_memory_allocated_bytes,
    memory_off_by
FROM judged
WHERE speed_off_by IS NOT NULL OR memory_off_by IS NOT NULL
ORDER BY CASE WHEN coalesce(speed_off_by, 0) > coalesce(memory_off_by, 0) THEN speed_off_by ELSE memory_off_by END DESC, trial_id
LIMIT CAST(:top AS bigint)
