-- Every attempt that failed, with the kind of failure, its rank and node, and the evidence.
CREATE VIEW v_failure AS
SELECT
    sweep.id AS sweep_id,
    sweep.name AS sweep,
    cell.key AS cell,
    trial.id AS trial_id,
    trial.layout_key AS layout,
    attempt.number AS attempt,
    attempt.state,
    attempt.superseded,
    attempt.failure_kind,
    attempt.failure_node,
    attempt.failure_rank,
    attempt.failure_phase,
    attempt.failure_step,
    attempt.failure_step_part,
    attempt.failure_signal,
    attempt.failure_exit_code,
    attempt.failure_message,
    attempt.failure_evidence,
    attempt.failure_log_path,
    attempt.processes_killed,
    attempt.started_at,
    attempt.ended_at
FROM attempt
JOIN trial ON trial.id = attempt.trial_id
JOIN cell ON cell.id = trial.cell_id
JOIN sweep ON sweep.id = trial.sweep_id
WHERE attempt.failure_kind IS NOT NULL
