-- Every measurement that counts, with the load of its machine, and for a repeat its change against the first run of its trial. Anchors show the drift of the machine.
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
    CASE
        WHEN attempt.number > first_value(attempt.number) OVER of_trial
            THEN measurement.step_seconds_median / first_value(measurement.step_seconds_median) OVER of_trial - 1
    END AS change_since_first
FROM attempt
JOIN measurement ON measurement.attempt_id = attempt.id
JOIN trial ON trial.id = attempt.trial_id
JOIN cell ON cell.id = trial.cell_id
JOIN sweep ON sweep.id = trial.sweep_id
WHERE attempt.pooled
WINDOW of_trial AS (PARTITION BY trial.id ORDER BY attempt.number)
