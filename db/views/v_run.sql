-- Every measurement that counts, with the load of its machine, and for a repeat its change against the first run of its trial. Anchors show the drift of the machine.
-- usual_gpu_clock_mhz: median of `gpu_clock_mhz` over the measurements of its cell that count
-- gpu_clock_off: `gpu_clock_mhz` over that median, less 1; beyond 0.03 either way the device was in another state
-- change_since_first: step time of a repeat over that of its trial's first run, less 1; NULL: it is the first
CREATE VIEW v_run AS
SELECT
    sweep.id AS sweep_id,
    sweep.name AS sweep,
    cell.id AS cell_id,
    cell.key AS cell,
    trial.id AS trial_id,
    trial.layout_key AS layout,
    attempt.number AS attempt,
    attempt.purpose,
    coalesce(attempt.measured_at, attempt.ended_at) AS measured_at,
    attempt.nodes,
    measurement.step_seconds_median,
    measurement.tokens_per_second_per_gpu,
    measurement.relative_confidence,
    measurement.thrashing,
    measurement.implausible,
    attempt.cpu_cores,
    attempt.own_cpu_cores,
    attempt.sweep_cpu_cores,
    attempt.others_cpu_cores,
    attempt.foreign_gpu_processes,
    attempt.gpu_clock_ratio,
    attempt.gpu_throttled_fraction,
    attempt.gpu_throttle_reasons,
    attempt.gpu_temperature_celsius,
    measurement.gpu_clock_mhz,
    usual.mhz AS usual_gpu_clock_mhz,
    measurement.gpu_clock_mhz / usual.mhz - 1 AS gpu_clock_off,
    measurement.joules_per_token,
    CASE
        WHEN attempt.number > first_value(attempt.number) OVER of_trial
            THEN measurement.step_seconds_median / first_value(measurement.step_seconds_median) OVER of_trial - 1
    END AS change_since_first
FROM attempt
JOIN measurement ON measurement.attempt_id = attempt.id
JOIN trial ON trial.id = attempt.trial_id
JOIN cell ON cell.id = trial.cell_id
JOIN sweep ON sweep.id = trial.sweep_id
LEFT JOIN (
    -- No database but PostgreSQL has a median: the mean of the one or two in the middle.
    SELECT
        cell_id,
        avg(mhz) AS mhz
    FROM (
        SELECT
            clocked.cell_id,
            measurement.gpu_clock_mhz AS mhz,
            row_number() OVER (PARTITION BY clocked.cell_id ORDER BY measurement.gpu_clock_mhz) AS place,
            count(*) OVER (PARTITION BY clocked.cell_id) AS num
        FROM measurement
        JOIN attempt AS run ON run.id = measurement.attempt_id
        JOIN trial AS clocked ON clocked.id = run.trial_id
        WHERE run.pooled AND measurement.gpu_clock_mhz IS NOT NULL
    ) AS ordered
    WHERE place IN ((num + 1) / 2, (num + 2) / 2)
    GROUP BY cell_id
) AS usual ON usual.cell_id = trial.cell_id
WHERE attempt.pooled
WINDOW of_trial AS (PARTITION BY trial.id ORDER BY attempt.number)
