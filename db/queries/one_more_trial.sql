-- After each launch that found a faster layout: what did one more trial tell, and what did it cost?
-- launches and gpu_hours count every attempt of the cell so far, failed ones and repeats included. until_next is the number of launches until the next gain; NULL: there was none yet. A trial counts with its final number, at its first measurement.
WITH launches AS (
    SELECT
        attempt.id AS attempt_id,
        trial.cell_id,
        trial.id AS trial_id,
        row_number() OVER in_order AS launches,
        coalesce(sum(attempt.gpu_seconds) OVER in_order, 0) / 3600 AS gpu_hours
    FROM attempt
    JOIN trial ON trial.id = attempt.trial_id
    JOIN sweep ON sweep.id = trial.sweep_id
    WHERE sweep.name = :sweep AND attempt.ended_at IS NOT NULL
    WINDOW in_order AS (PARTITION BY trial.cell_id ORDER BY attempt.ended_at, attempt.id ROWS UNBOUNDED PRECEDING)
),
totals AS (
    SELECT cell_id, max(launches) AS num_launches FROM launches GROUP BY cell_id
),
told AS (
    SELECT
        launches.cell_id,
        launches.trial_id,
        launches.launches,
        launches.gpu_hours,
        measurement.tokens_per_second_per_gpu AS speed,
        max(measurement.tokens_per_second_per_gpu) OVER (
            PARTITION BY launches.cell_id ORDER BY launches.launches ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS best_before
    FROM launches
    JOIN trial ON trial.id = launches.trial_id AND trial.state = 'measured'
    JOIN cell ON cell.id = launches.cell_id
    JOIN attempt ON attempt.trial_id = launches.trial_id AND attempt.state = 'measured' AND NOT attempt.superseded
    JOIN measurement ON measurement.attempt_id = attempt.id
    WHERE launches.attempt_id IN (
            SELECT min(run.id)
            FROM attempt AS run
            WHERE run.state = 'measured' AND (run.pooled OR NOT run.superseded)
            GROUP BY run.trial_id
        )
        AND coalesce(attempt.fingerprint_digest, '') = coalesce(cell.fingerprint_digest, '')
        AND measurement.implausible IS NULL AND measurement.step_seconds_bound IS NULL
),
gains AS (
    SELECT
        told.*,
        -- The last gain of a cell is its best.
        max(speed) OVER (PARTITION BY cell_id) AS best_of_all,
        lead(launches) OVER (PARTITION BY cell_id ORDER BY launches) - launches AS until_next
    FROM told
    WHERE best_before IS NULL OR speed > best_before
)
SELECT
    cell.key AS cell,
    gains.launches,
    gains.gpu_hours,
    gains.trial_id,
    trial.layout_key AS layout,
    gains.speed AS tokens_per_second_per_gpu,
    gains.speed / gains.best_before - 1 AS gain,
    gains.speed / gains.best_of_all AS of_best,
    gains.until_next,
    totals.num_launches - gains.launches AS launches_since
FROM gains
JOIN totals ON totals.cell_id = gains.cell_id
JOIN cell ON cell.id = gains.cell_id
JOIN trial ON trial.id = gains.trial_id
ORDER BY cell.key, gains.launches
