-- After each launch that found a faster layout: what did one more trial tell, and what did it cost?
-- launches and gpu_hours count every attempt of the cell so far, failed ones and repeats included. until_next is the number of launches until the next gain; NULL: there was none yet. A trial counts with its final number, at its first measurement.
WITH launches AS (
    SELECT
        attempt.id AS attempt_id,
        trial.cell_id,
        cell.key AS cell,
        trial.id AS trial_id,
        trial.layout_key AS layout,
        row_number() OVER in_order AS launches,
        count(*) OVER (PARTITION BY trial.cell_id) AS num_launches,
        coalesce(sum(attempt.gpu_seconds) OVER in_order, 0) / 3600 AS gpu_hours,
        -- The first measurement of the trial that counts, alone or with others.
        min(CASE WHEN attempt.state = 'measured' AND (attempt.pooled OR NOT attempt.superseded) THEN attempt.id END) OVER (PARTITION BY trial.id) AS first_id,
        -- The number of the trial, if it can be compared. Windows instead of joins: PostgreSQL plans those badly before it knows how large they are.
        max(CASE
            WHEN trial.state = 'measured' AND attempt.state = 'measured' AND NOT attempt.superseded
                AND coalesce(attempt.fingerprint_digest, '') = coalesce(cell.fingerprint_digest, '')
                AND measurement.implausible IS NULL AND measurement.step_seconds_bound IS NULL
            THEN measurement.tokens_per_second_per_gpu
        END) OVER (PARTITION BY trial.id) AS speed
    FROM attempt
    JOIN trial ON trial.id = attempt.trial_id
    JOIN sweep ON sweep.id = trial.sweep_id
    JOIN cell ON cell.id = trial.cell_id
    LEFT JOIN measurement ON measurement.attempt_id = attempt.id
    WHERE sweep.name = :sweep AND attempt.ended_at IS NOT NULL
    WINDOW in_order AS (PARTITION BY trial.cell_id ORDER BY attempt.ended_at, attempt.id ROWS UNBOUNDED PRECEDING)
),
told AS (
    SELECT
        launches.*,
        max(speed) OVER (PARTITION BY cell_id ORDER BY launches ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS best_before
    FROM launches
    WHERE attempt_id = first_id AND speed IS NOT NULL
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
    cell,
    launches,
    gpu_hours,
    trial_id,
    layout,
    speed AS tokens_per_second_per_gpu,
    speed / best_before - 1 AS gain,
    speed / best_of_all AS of_best,
    until_next,
    num_launches - launches AS launches_since
FROM gains
ORDER BY cell, launches
