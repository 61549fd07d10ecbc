-- How much do two runs of one layout differ, and is the lead of the fastest more than noise?
-- The lead is noise if the 95 % intervals of both speeds overlap. `run_sd` is the relative standard deviation of one run that they rest on: `measured` by the repeats of the cell if there are at least 5, else 2 %, which is `usual`, as in `sweep compare`. `sweep best` compares without drift and the load of others, so it may tell layouts apart whose lead is noise here.
WITH runs AS (
    SELECT
        trial.cell_id,
        trial.id AS trial_id,
        attempt.number > first_value(attempt.number) OVER of_trial AS is_repeat,
        abs(measurement.step_seconds_median / first_value(measurement.step_seconds_median) OVER of_trial - 1) AS change,
        ln(measurement.step_seconds_median) - avg(ln(measurement.step_seconds_median)) OVER (PARTITION BY trial.id) AS deviation
    FROM trial
    JOIN sweep ON sweep.id = trial.sweep_id
    JOIN attempt ON attempt.trial_id = trial.id AND attempt.pooled
    JOIN measurement ON measurement.attempt_id = attempt.id
    -- The others have no repeat.
    WHERE sweep.name = :sweep AND trial.num_measurements > 1
    WINDOW of_trial AS (PARTITION BY trial.id ORDER BY attempt.number)
),
floors AS (
    SELECT
        cell_id,
        sum(CASE WHEN is_repeat THEN 1 ELSE 0 END) AS num_repeats,
        avg(CASE WHEN is_repeat THEN change END) AS noise_floor,
        max(CASE WHEN is_repeat THEN change END) AS largest_change,
        -- Pooled over the layouts: each has one degree of freedom less than runs. Fewer than 5 repeats are not used.
        CASE WHEN sum(CASE WHEN is_repeat THEN 1 ELSE 0 END) >= 5
            THEN sum(deviation * deviation) / sum(CASE WHEN is_repeat THEN 1 ELSE 0 END)
        END AS run_variance
    FROM runs
    GROUP BY cell_id
),
ranked AS (
    SELECT
        trial.cell_id,
        trial.id AS trial_id,
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
),
moments AS (
    SELECT
        ranked.cell_id,
        ranked.place,
        ranked.speed,
        count(*) AS num_runs,
        avg(ln(measurement.tokens_per_second_per_gpu)) AS mean,
        max(coalesce(measurement.relative_confidence, 0) / 1.96) AS own_sd,
        sum(ln(measurement.tokens_per_second_per_gpu) * ln(measurement.tokens_per_second_per_gpu))
            - count(*) * avg(ln(measurement.tokens_per_second_per_gpu)) * avg(ln(measurement.tokens_per_second_per_gpu)) AS squares
    FROM ranked
    JOIN attempt ON attempt.trial_id = ranked.trial_id AND attempt.state = 'measured' AND (attempt.pooled OR NOT attempt.superseded)
    JOIN measurement ON measurement.attempt_id = attempt.id
    WHERE ranked.place <= 2 AND measurement.implausible IS NULL AND measurement.step_seconds_bound IS NULL
    GROUP BY ranked.cell_id, ranked.place, ranked.speed
),
-- The variance of one run: that of its steps, that of the runs, or that of repeats in the cell, else of usual ones (2 %).
variances AS (
    SELECT
        moments.*,
        CASE
            WHEN own_sd * own_sd < floors.run_variance THEN floors.run_variance
            WHEN floors.run_variance IS NOT NULL THEN own_sd * own_sd
            WHEN own_sd > 0.02 THEN own_sd * own_sd ELSE 0.0004 END AS least,
        CASE WHEN num_runs > 1 THEN squares / (num_runs - 1) ELSE 0 END AS seen
    FROM moments
    LEFT JOIN floors ON floors.cell_id = moments.cell_id
),
speeds AS (
    SELECT
        variances.*,
        1.96 * sqrt((CASE WHEN seen > least THEN seen ELSE least END) / num_runs) AS width
    FROM variances
),
leads AS (
    SELECT
        cell_id,
        max(CASE WHEN place = 1 THEN speed END) / max(CASE WHEN place = 2 THEN speed END) - 1 AS lead,
        max(CASE WHEN place = 1 THEN mean - width END) > max(CASE WHEN place = 2 THEN mean + width END) AS is_apart
    FROM speeds
    GROUP BY cell_id
)
SELECT
    cell.key AS cell,
    coalesce(floors.num_repeats, 0) AS num_repeats,
    floors.noise_floor,
    floors.largest_change,
    coalesce(sqrt(floors.run_variance), 0.02) AS run_sd,
    CASE WHEN floors.run_variance IS NULL THEN 'usual' ELSE 'measured' END AS run_sd_is,
    leads.lead,
    CASE WHEN leads.is_apart THEN 'faster' WHEN leads.lead IS NOT NULL THEN 'noise' END AS verdict
FROM cell
JOIN sweep ON sweep.id = cell.sweep_id
LEFT JOIN floors ON floors.cell_id = cell.id
LEFT JOIN leads ON leads.cell_id = cell.id
WHERE sweep.name = :sweep
ORDER BY cell.key
