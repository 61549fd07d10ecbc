-- Every layout that does not fit: it ran out of memory, or another trial condemned it without a launch.
-- condemned_by_layout: that trial's layout
CREATE VIEW v_oom AS
SELECT
    v_trial.sweep_id,
    v_trial.sweep,
    v_trial.cell_id,
    v_trial.cell,
    v_trial.model,
    v_trial.num_gpus,
    v_trial.trial_id,
    v_trial.layout,
    v_trial.micro_batch_size,
    v_trial.recompute,
    v_trial.recompute_policy,
    v_trial.recompute_layers,
    v_trial.zero_stage,
    v_trial.state,
    v_trial.why,
    v_trial.condemned_by,
    proof.layout_key AS condemned_by_layout,
    v_trial.predicted_memory_bytes,
    last.failure_peak_memory_bytes,
    last.failure_device_memory_bytes,
    last.failure_kind,
    last.failure_phase,
    last.failure_step,
    last.failure_step_part,
    last.failure_rank,
    last.failure_node,
    last.failure_message
FROM v_trial
LEFT JOIN trial AS proof ON proof.id = v_trial.condemned_by
LEFT JOIN attempt AS last ON last.trial_id = v_trial.trial_id AND last.number = v_trial.num_attempts AND NOT last.superseded
WHERE v_trial.state IN ('out_of_memory', 'pruned')
