-- How much do two runs of one layout differ, and is the lead of the fastest larger than that?
WITH runs AS (
    SELECT
        trial.cell_id,
        attempt.number > first_value(attempt.number) OVER of_trial AS is_repeat,
        abs(measurement.step_seconds_median / first_value(measurement.step_seconds_median) OVER of_trial - 1) AS change
    FROM trial
    JOIN sweep ON sweep.id = trial.sweep_id
    JOIN attempt ON attempt.trial_id = trial.id AND attempt.pooled
    JOIN measurement ON measurement.attempt_id = attempt.id
    -- The others have no repeat.
    WHERE sweep.name = :sweep AND trial.num_measurements > 1
    WINDOW of_trial AS (PARTITION BY trial.id ORDER BY attempt.number)
),
floors AS (
    SELECT cell_id, count(*) AS num_repeats, avg(change) AS noise_floor, max(change) AS largest_change
    FROM runs
    WHERE is_repeat
    GROUP BY cell_id
),
ranked AS (
    SELECT
        trial.cell_id,
        measurement.tokens_per_second_per_gpu AS speed,
        row_number() OVER (PARTITION BY trial.cell_id ORDER BY measurement.tokens_per_second_per_gpu DESC, trial.id) AS place
    FROM trial
    JOIN sweep ON sweep.id = trial.sweep_id
    JOIN cell ON cell.id = trial.cell_id
    JOIN attempt ON attempt.trial_id = trial.id AND attempt.state = 'measured' AND NOT attempt.superseded
    JOIN measurement ON measurement.attempt_id = attempt.id
    WHERE sweep.name = :sweep AND trial.state = 'measured'
        AND coalesce(attempt.fingerprint_digest, '') = coalesce(cell.fingerprint_digest, '')
        AND measurement.implausible IS NULL AND measurement.step_seconds_bound IS NULL
)
SELECT
    cell.key AS cell,
    coalesce(floors.num_repeats, 0) AS num_repeats,
    floors.noise_floor,
    floors.largest_change,
    best.speed / runner_up.speed - 1 AS lead,
    CASE
        WHEN best.speed / runner_up.speed - 1 <= floors.noise_floor THEN 'within the noise'
        WHEN best.speed / runner_up.speed - 1 > floors.noise_floor THEN 'above the noise'
    END AS verdict
FROM cell
JOIN sweep ON sweep.id = cell.sweep_id
LEFT JOIN floors ON floors.cell_id = cell.id
LEFT JOIN ranked AS best ON best.cell_id = cell.id AND best.place = 1
LEFT JOIN ranked AS runner_up ON runner_up.cell_id = cell.id AND runner_up.place = 2
WHERE sweep.name = :sweep
ORDER BY cell.key
